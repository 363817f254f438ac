"""Hold every family of causal language models against its own forward pass, and write the table.

    python -m benchmarks.families            every family (some fifteen minutes)
    python -m benchmarks.families lfm2 opt   these alone

Each row is printed and replaced in docs/families.md.

Each is a small copy with random weights (tasks/policy/small_copy.py): a layer of each kind, and
contexts that are longer than its windows and chunks. It goes through the check that each run begins
with (tasks/check_policy.py): the learner's log-probabilities and gradients, and what the engine
``transformers`` reports, against the model's plain pass over each context. Then a copy that learns
as trees is timed as trees and as rows (benchmarks/trees_against_rows.py).
"""

from __future__ import annotations

import argparse
import logging
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import trees_against_rows
from params.schema.agent import EngineSettings
from params.schema.base import Machine
from tasks import check_policy
from tasks.check_policy import Found, PolicyCheckInputs
from tasks.engines.contract import most_positions
from tasks.engines.transformers import ways
from tasks.ledger.artifacts import Artifact
from tasks.policy import layer_kinds, small_copy
from tasks.policy.lean_transformers import transformers
from tasks.policy.optimizer import AdamW
from tasks.policy.resident import Learner

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
BEGIN = "<!-- python -m benchmarks.families writes what follows -->"
SECONDS = 60  # of processor time for a family
TOKENS, REPETITIONS, SEED = 320, 3, 0  # of a leaf, and how often each form is timed
CONFIGS = transformers.models.auto.configuration_auto.CONFIG_MAPPING
FAMILIES = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
LAST = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
BOTH = ["sliding_attention", "full_attention"]
# Where the default lacks a kind of layer, or a size.
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {
        **{"num_hidden_layers": 2, "layer_types": BOTH, "sliding_window": 64},
        **{"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    },
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "laguna": {"num_hidden_layers": 2, "layer_types": BOTH, "sliding_window": 64},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mixtral": {"sliding_window": 64},
    "nemotron": {"num_key_value_heads": 8},
    "phi3": {"sliding_window": 64},
    "phi4_multimodal": {"sliding_window": 64},
    "phimoe": {"sliding_window": 64},
    "qwen2": LAST,
    "qwen2_moe": LAST,
    "qwen3": LAST,
    "qwen3_moe": LAST,
    "smollm3": {"num_hidden_layers": 2, "layer_types": BOTH, **LAST},
    "starcoder2": {"sliding_window": 64},
}


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    name: str
    layers: str
    learner: str  # trees, rows, or why it is refused
    sampler: str  # in which way the engine samples
    found: dict[str, Found]
    fault: str  # why it could not be measured
    reason: str = ""  # why it learns as rows
    faster: float | None = None  # how many times an update on trees is faster than one on rows


def config_of(name: str) -> Any:
    """Return the default config of a family, with layers of each of its kinds."""
    return CONFIGS[name](**CHANGES.get(name, {}))


def family(name: str, timed: bool = False) -> Family:
    """Measure a family, with its speed if ``timed``, or say why it is refused or cannot be."""
    try:
        config = config_of(name)
        values = config.to_dict()
    except Exception as error:  # some have no config without those of their parts
        values, config = {"model_type": name}, error
    if refused := layer_kinds.refusal(values, INPUTS.context):
        what = refused.removeprefix(f"of the architecture {name}, ").partition(":")[0]
        return Family(name, "", f"refused: {what}", "refused", {}, "")
    if isinstance(config, Exception):
        return Family(name, "", "", "", {}, _line(config))
    described = layer_kinds.described(config)
    form, reason = layer_kinds.learner_form(described)
    layers = ", ".join(layer_kinds.kinds_of(described))
    sampler = "ragged" if ways.is_ragged(config) else "own"
    faster = None
    try:
        with at_most(SECONDS):
            found, fault = check_policy.structure_of(config, INPUTS)
        if timed and form == layer_kinds.TREES and not fault:
            faster = times_faster(config)
    except Exception as error:  # whatever a family raises is its row
        found, fault = {}, _line(error)
    return Family(name, layers, form, sampler, found, fault, reason, faster)


def times_faster(config: Any) -> float | None:
    """Return how many times an update of a small copy is faster as trees than as rows.

    Eight leaves share four fifths of their context. A copy is so narrow that much of the time is
    not spent on tokens; wider policies gain more. None: it takes too long.
    """
    model = small_copy.small_copy(config, INPUTS.context, check_policy.SEED)
    most = most_positions(model.config) or TOKENS
    tokens = min(TOKENS, most)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    trees = [trees_against_rows.tree_of(tokens, tokens * 4 // 5, SEED, vocabulary)]
    weights = list(model.parameters())
    optimizer = AdamW(weights, lr=0.0, weight_decay=0.0)
    policy = Learner(None, model, None, optimizer)  # type: ignore[arg-type]
    try:
        with at_most(SECONDS):
            own, plain = trees_against_rows.both_forms(policy, trees, REPETITIONS, INPUTS.machine)
    except TimeoutError:
        return None
    return plain / own


INPUTS = PolicyCheckInputs(
    config="",
    questions=Artifact("", ""),
    engine=EngineSettings(kind="transformers", memory=1.0),
    machine=Machine(threads=1, device="cpu", precision="float32"),
    context=2**30,
    device="cpu",
    form="",
    served=False,
    versions={},
)


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise TimeoutError where this takes more processor time."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"no result in {seconds} seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:50]


# ---------------------------------------------------------------- the table


REFUSED = re.compile(r"\| `.*` \|  \| refused: (.*) \|  \|  \|  \| refused \|  \|")


def refused_row(name: str, reason: str) -> str:
    """Return the row of a family that is refused, as ``row_of`` writes it."""
    return row_of(Family(name, "", f"refused: {reason}", "refused", {}, ""))


def row_of(each: Family) -> str:
    """Return the row of a family, in Markdown; what exceeds a tolerance is bold."""
    numbers = {name: _number(found) for name, found in each.found.items()}
    learner, gradient, sampler = (
        numbers.get(name, "") for name in ("learner", "gradient", "sampler")
    )
    if each.fault:
        learner = f"not measured: {each.fault}".replace("|", "/")
    faster = "" if each.faster is None else f"{each.faster:.1f}"
    reason = each.reason.removeprefix(f"the architecture {each.name}").lstrip(", ")
    form = f"{each.learner}: {reason or 'not tried as trees'}" if each.reason else each.learner
    cells = [each.layers, form, learner, gradient, faster, each.sampler, sampler]
    return f"| {' | '.join([f'`{each.name}`', *cells])} |"


def _number(found: Found) -> str:
    text = f"{found.difference:.0e}" if found.difference else "0"
    return text if found.holds else f"**{text}**"


def table(rows: Mapping[str, str]) -> str:
    """Return the table of rows by family, and below it the refused ones by reason, in Markdown."""
    names = ("family", "layers", "learner", "log-probabilities", "gradient", "times faster")
    head = f"| {' | '.join((*names, 'sampler', 'log-probabilities'))} |"
    reasons = {name: found[1] for name, row in rows.items() if (found := REFUSED.fullmatch(row))}
    ordered = [row for name, row in sorted(rows.items()) if name not in reasons]
    by_reason: dict[str, list[str]] = {reason: [] for reason in sorted(set(reasons.values()))}
    for name in sorted(reasons):
        by_reason[reasons[name]].append(f"`{name}`")
    refused = [f"- {', '.join(each)}: {reason}" for reason, each in by_reason.items()]
    lines = [head, "|---|---|---|---:|---:|---:|---|---:|", *ordered, "", "Refused:", "", *refused]
    return "\n".join(lines)


def summary(rows: Mapping[str, str]) -> str:
    """Return how many families there are of each kind, and which are not as they should be."""
    refused = [name for name, row in rows.items() if "| refused" in row]
    unknown = sorted(name for name, row in rows.items() if "not measured" in row)
    wrong = sorted(name for name, row in rows.items() if "**" in row)
    right = [name for name in rows if name not in {*refused, *unknown, *wrong}]
    trees = sum("| trees |" in rows[name] for name in right)
    line = (
        f"Of the {len(rows)} families here, of {len(FAMILIES)} that transformers "
        f"{transformers.__version__} lists as causal language models, {len(right)} are within the "
        f"tolerances ({trees} as trees, {len(right) - trees} as rows) and {len(refused)} are "
        "refused."
    )
    if wrong:
        line += f" Beyond a tolerance, so that a run of them ends at its start: {', '.join(wrong)}."
    if unknown:
        line += f" Not measured: {', '.join(unknown)}."
    return line


def written() -> dict[str, str]:
    """Return the rows of the page by family."""
    lines = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    for line in lines:
        if line.startswith("- `"):
            names, _, reason = line.rpartition("`: ")
            rows |= {name: refused_row(name, reason) for name in names[3:].split("`, `")}
    return rows


def write(rows: Mapping[str, str]) -> None:
    """Put the table into its page, below the text that is written by hand."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[0]
    PAGE.write_text(f"{text}{BEGIN}\n\n{summary(rows)}\n\n{table(rows)}\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure families, print their rows, and replace them in the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("names", nargs="*", help="families, by model_type; all of them if none")
    names = parser.parse_args(arguments).names or sorted(FAMILIES)
    transformers.logging.set_verbosity_error()
    logging.getLogger("tasks").setLevel(logging.ERROR)
    rows = written()
    for name in names:
        rows[name] = row_of(family(name, timed=True))
        print(rows[name], flush=True)
        write(rows)


if __name__ == "__main__":
    main()
