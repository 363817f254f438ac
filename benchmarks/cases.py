"""The cases of the benchmark against TRL: policies, questions, dialogues and tools of both sides.

A policy of random weights calls no tool by itself. In the dialogues here each of its turns is a
call (``EveryTurnCalls``), and each call is answered at once by a text that depends on the call
alone (``passage``). What a turn does depends on the dialogue before it and on nothing else, so both
sides follow the same rules without knowing of each other.
"""

from __future__ import annotations

import copy
import hashlib
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from params.schema.agent import Dialogue
from params.schema.base import PARAMS
from params.schema.prepare import PretrainedPolicy, TinyPolicy
from params.schema.recipe import Recipe, named_sets
from tasks.cold_start import ColdStartInputs, cold_start
from tasks.dialects import open_dialect
from tasks.dialects.contract import Dialect, Tokens, Turn
from tasks.dialects.tags import TagsDialect
from tasks.environments import open_environment
from tasks.environments.question import answer
from tasks.ledger import artifacts
from tasks.ledger.substeps import SubStep
from tasks.policy.gguf_file import INSTALLED_BY, source_of
from tasks.policy.load_model import load_policy, load_tokenizer
from tasks.policy.tiny import build_policy
from tasks.prepare import PrepareInputs, prepare
from tasks.questions.sources import source_files
from tasks.recipes import agent_of, scorer_sources
from tasks.recipes import load as load_settings
from tasks.tools.contract import text_spec, text_tool
from tasks.tools.python import SPEC as PYTHON
from tasks.tools.python import Run
from tasks.trees import dialogue as talk
from tasks.trees.marks import token_texts
from tasks.trees.outcomes import Outcome
from tasks.trees.tables import load_questions
from tasks.trees.tree import Call, Observation, Question, ToolSpec

RECIPE = "tiny"
SMOLLM = "smollm"
# Enough for dialogues with calls and answers; what is measured is not how right these are.
SHORT_COLD_STARTS = {SMOLLM: {"steps": 20, "batch": 8, "micro_batch": 4, "warmup_steps": 2}}
SEED = 0

TRL, BEAMLINE, BRANCHING = "trl", "beamline", "beamline_branching"
SIDES = (TRL, BEAMLINE, BRANCHING)
LEADING = (BEAMLINE, TRL, BRANCHING)
PEER_PATHS = ("rollout_func", "tools")  # as benchmarks/peer.py has them
ROLLOUT_FUNC = PEER_PATHS[:1]


@dataclass(frozen=True)
class Case:
    """One comparison: the policy, its dialogues, and the size of a batch."""

    name: str
    policy: str  # a key of POLICIES
    questions: int  # a step
    group: int  # rollouts a question
    contestants: tuple[str, ...]
    peer_paths: tuple[str, ...]  # TRL's ways to make tool calls; the fastest is taken
    # a step of TRL; the fastest is taken, but for the memory, which is measured with the first
    peer_micro_batches: tuple[int, ...]
    world: str | None = None  # a key of WORLDS; None: the recipe's own dialogue and tool
    precision: str = "float32"
    tries: int = 3  # steps of each shape of TRL that is tried, and of each side for its memory
    repetitions: int = 5  # where the command line does not say
    recipe: str = RECIPE  # whose dialogue, tools, rewards and learning rate both sides have
    # TRL samples the leaves that Beamline has sampled right before: both have equal lengths.
    scripted: bool = False
    peer_caches: tuple[str, ...] = ("dynamic",)  # of TRL's ``generate``; the fastest is taken


CASES = {
    case.name: case
    for case in (
        Case("tiny-8", "tiny", 8, 8, SIDES, PEER_PATHS, (1, 2, 4)),
        Case("tiny-16", "tiny", 8, 16, SIDES, PEER_PATHS, (1, 2, 4)),
        Case("25m-16", "25m", 2, 16, SIDES[:2], ROLLOUT_FUNC, (1, 4)),
        # A step of TRL takes about a minute.
        Case(
            *("search-25m", "25m", 1, 16, SIDES, ROLLOUT_FUNC, (4, 8), "search"),
            tries=1,
            repetitions=3,
        ),
        Case(
            *("search-25m-bf16", "25m", 1, 16, SIDES, ROLLOUT_FUNC, (4, 8), "search", "bfloat16"),
            tries=1,
            repetitions=3,
        ),
        Case("household-1m", "1m", 1, 16, SIDES, ROLLOUT_FUNC, (1, 2), "household", tries=2),
        Case(
            *("household-1m-fresh", "1m", 1, 16, SIDES, ROLLOUT_FUNC, (2, 4), "household-fresh"),
            tries=2,
        ),
        # As the recipe has it: 4 questions and 8 leaves.
        *(
            Case(
                *(name, SMOLLM, 4, 8, LEADING, ROLLOUT_FUNC, (4, 1), None, precision),
                tries=1,
                repetitions=3,
                recipe=SMOLLM,
                scripted=True,
                peer_caches=("dynamic", "static"),
            )
            for name, precision in ((SMOLLM, "float32"), (f"{SMOLLM}-bf16", "bfloat16"))
        ),
    )
}


@dataclass(frozen=True)
class World:
    """Dialogues in which every turn is a call: how many of them, and how long the answers are."""

    tool: ToolSpec
    limits: Mapping[str, Any]  # changes of the recipe's dialogue
    turn: int  # tokens of a turn that ends by chance, about; the dialogue limits them
    answer: tuple[int, int]  # tokens of an answer, from and to
    calls: tuple[int, int]  # of a trajectory, from and to


SEARCH = text_spec("search", "Search the documents.", "query", "What to search for.")
ACT = text_spec("act", "Act in the household.", "act", "What to do.")
HOUSEHOLD = {"turn_tokens": 16, "result_tokens": 64, "response_tokens": 1200, "tool_calls": 14}
WORLDS = {
    "search": World(
        SEARCH,
        {"turn_tokens": 64, "result_tokens": 330, "response_tokens": 1950, "tool_calls": 5},
        turn=50,
        answer=(280, 320),
        calls=(3, 5),
    ),
    # 14 acts are answered; with the turn after the last one there are 15 steps.
    "household": World(ACT, HOUSEHOLD, turn=24, answer=(30, 60), calls=(15, 15)),
    "household-fresh": World(
        ACT,
        {**HOUSEHOLD, "prompt": "fresh", "prompt_tokens": 448, "history": 2},
        turn=24,
        answer=(30, 60),
        calls=(15, 15),
    ),
}


@dataclass
class Tools:
    """The tool of both sides, and the seconds of its calls since the last ``take``."""

    run: Run  # a round's calls side by side
    spec: ToolSpec = PYTHON
    seconds: float = 0.0

    def beamline(self, calls: Sequence[Call]) -> list[Observation]:
        """Run identical calls of a round once, as Beamline's environment does."""
        return self._timed(lambda: answer([text_tool(self.spec, self.run)], calls))

    def trl(self, calls: Sequence[Call]) -> list[Observation]:
        """Run every call: TRL leaves tools to its user."""
        return self._timed(lambda: self._each(calls))

    def _each(self, calls: Sequence[Call]) -> list[Observation]:
        known = [call.argument for call in calls if call.tool == self.spec.name]
        answers = iter(self.run(known))
        unknown = Observation(Outcome.NO_SUCH_TOOL, "")
        return [next(answers) if call.tool == self.spec.name else unknown for call in calls]

    def _timed(self, work: Callable[[], list[Observation]]) -> list[Observation]:
        began = time.perf_counter()
        observations = work()
        self.seconds += time.perf_counter() - began
        return observations

    def take(self) -> float:
        taken, self.seconds = self.seconds, 0.0
        return taken


@dataclass(frozen=True)
class Start:
    """The start of both sides. Each side reads the files itself, since it changes its own copy."""

    recipe: Recipe
    model: Callable[[], Any]  # a fresh copy of the policy
    tokenizer: Any
    questions: list[Question]
    tools: Tools
    dialect: Dialect
    draws_rewards: bool  # random rewards, for a policy that has learned nothing


# ---------------------------------------------------------------- dialogues of random weights


class EveryTurnCalls(TagsDialect):
    """The dialect of tags, but that each turn is a call with its text, until there are enough.

    A turn ends where its text has one of a few letters, which random weights sample by chance.
    """

    def __init__(self, tokenizer: Any, dialogue: Dialogue, world: World) -> None:
        super().__init__(tokenizer, dialogue, [world.tool])
        self.world = world
        self.stop_strings = ending_letters(token_texts(tokenizer, len(tokenizer)), world.turn)
        opening, _ = (talk.encode(tokenizer, tag) for tag in talk.RESULT_TAGS)
        self.opening = np.concatenate([opening, talk.encode(tokenizer, HEAD)])

    def read(self, prompt: Tokens, turn: Tokens, text: str, stopped: str) -> Turn:
        """Read a turn as a call of the world's tool, or as the end of the dialogue."""
        if calls_again(occurrences(prompt, self.opening), turn, *self.world.calls):
            return Turn(Outcome.CALL, (Call(self.world.tool.name, text),))
        return Turn(Outcome.NO_ANSWER)


HEAD = "Seen: "  # begins each answer, so that answers can be counted among sampled tokens


def calls_again(calls: int, turn: Tokens, least: int, most: int) -> bool:
    """Return whether a turn after ``calls`` calls is a call; ``least`` to ``most`` are as likely.

    The draw depends on the turn's tokens alone.
    """
    drawn = int.from_bytes(hashlib.blake2b(turn.tobytes(), digest_size=8).digest()) / 2**64
    return calls < least or drawn < (most - calls) / (most - calls + 1)


def occurrences(tokens: Tokens, pattern: Tokens) -> int:
    """Count how often ``pattern`` stands in ``tokens``."""
    if len(tokens) < len(pattern):
        return 0
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(pattern))
    return int((windows == pattern).all(axis=1).sum())


def ending_letters(texts: Sequence[str], turn: int) -> tuple[str, ...]:
    """Return letters that stand in one of ``turn`` tokens of a vocabulary, as nearly as possible.

    They are taken from the rarest on, as long as they stand in too few tokens.
    """
    letters = [chr(code) for code in range(ord("A"), ord("Z") + 1)]
    held = {letter: {i for i, text in enumerate(texts) if letter in text} for letter in letters}
    result: list[str] = []
    ending: set[int] = set()
    for letter in sorted(letters, key=lambda letter: (len(held[letter]), letter)):
        if len(ending | held[letter]) * turn > len(texts):
            break
        result.append(letter)
        ending |= held[letter]
    return tuple(result)


def answering(texts: Sequence[str], tokenizer: Any, size: tuple[int, int]) -> Run:
    """Return a tool that answers at once: ``passage`` of each call."""
    lengths = [len(talk.encode(tokenizer, f"{text} ")) for text in texts]
    head = len(talk.encode(tokenizer, HEAD))

    def run(arguments: Sequence[str]) -> list[Observation]:
        return [
            Observation(Outcome.OK, HEAD + passage(argument, texts, lengths, size, head))
            for argument in arguments
        ]

    return run


def passage(
    call: str, texts: Sequence[str], lengths: Sequence[int], size: tuple[int, int], taken: int = 0
) -> str:
    """Return words of some of the texts, as a call draws them, of about ``size`` tokens.

    ``lengths``: tokens of each text; ``taken``: tokens that come before the passage.
    """
    drawn = random.Random(call)
    budget = drawn.randint(*size) - taken
    words: list[str] = []
    while budget > 0:
        index = drawn.randrange(len(texts))
        text_words = texts[index].split()
        excerpt = (
            text_words
            if lengths[index] <= budget
            else text_words[: len(text_words) * budget // lengths[index] or 1]
        )
        words += excerpt
        budget -= max(1, lengths[index] * len(excerpt) // len(text_words))
    return " ".join(words)


# ---------------------------------------------------------------- where both sides begin


def first_case(recipe_name: str) -> Case:
    """Return the case whose machine trains the cold-started policy of all cases of a recipe."""
    return next(case for case in CASES.values() if case.recipe == recipe_name)


def cold_start_inputs(recipe: Recipe) -> PrepareInputs:
    """Return the inputs of the stage ``prepare``, as flows/stages/prepare.py fills them."""
    sets = named_sets(recipe, PARAMS)
    return PrepareInputs(
        settings=recipe.prepare,
        sets=sets,
        sources=source_files(recipe.prepare, recipe.tools, sets),
        dialogue=recipe.dialogue,
        tools=recipe.tools,
        machine=recipe.machine,
        dialect=recipe.dialect,
        named=agent_of(recipe).sources,
        scorers=scorer_sources(recipe),
    )


def cold_started(recipe_name: str, recipe: Recipe) -> tuple[Path, Path]:
    """Return the folder of the cold-started policy and the file of its training questions.

    They are made by the pipeline's own sub-steps, once (some three minutes): the ledger keeps them.
    """
    name = "bench" if recipe_name == RECIPE else f"bench-{recipe_name}"
    opening = partial(open_environment, recipe.tools, {}, recipe.machine.threads)
    step = SubStep(name, "prepare", 0, recipe.seed)
    record = prepare(step, cold_start_inputs(recipe), open_environment=opening)
    initial, traces = (artifacts.output(record, name) for name in ("initial", "traces"))
    assert recipe.cold_start, f"the recipe {recipe_name} has a cold start"
    short = recipe.cold_start.model_copy(update=SHORT_COLD_STARTS.get(recipe_name))
    tuning = ColdStartInputs(initial, traces, short, recipe.machine)
    trained = cold_start(SubStep(name, "cold_start", 0, recipe.seed), tuning)
    questions = Path(artifacts.output(record, "questions").path, "train.parquet")
    return Path(artifacts.output(trained, "policy").path), questions


def require_package(recipe: Recipe) -> None:
    """Raise SystemExit, with the remedy, where the policy is a package that is not installed."""
    policy = recipe.prepare.policy
    name = policy.name if isinstance(policy, PretrainedPolicy) else ""
    if name in INSTALLED_BY and not Path(source_of(name)).is_dir():
        sys.exit(f"the policy's package {name} is missing: {INSTALLED_BY[name]}")


def cold(recipe: Recipe, folder: Path) -> Callable[[], Any]:
    """Return what loads the cold-started policy, which calls its tool."""
    return lambda: load_policy(folder, recipe.machine)


def drawn(recipe: Recipe, folder: Path, sizes: Mapping[str, int]) -> Callable[[], Any]:
    """Return what copies a policy of random weights."""
    settings = TinyPolicy.model_validate({**recipe.prepare.policy.model_dump(), **sizes})
    model = build_policy(settings, load_tokenizer(folder), recipe.seed)
    model.set_attn_implementation("sdpa")
    return lambda: copy.deepcopy(model)


MEDIUM = {"hidden": 512, "layers": 8, "heads": 8, "key_value_heads": 4, "feed_forward": 1536}
LONG = 2048  # tokens of context
POLICIES: dict[str, Callable[[Recipe, Path], Callable[[], Any]]] = {
    "tiny": cold,
    SMOLLM: cold,
    "1m": partial(drawn, sizes={"context": LONG}),
    "25m": partial(drawn, sizes={"context": LONG, **MEDIUM}),
}


def begin(case: Case, folder: Path, questions: Path, python: Run) -> Start:
    """Return the start of both sides of a case. ``python`` is the recipe's own tool."""
    recipe, training_questions = load_recipe(case), load_questions(questions)
    model, tokenizer = POLICIES[case.policy](recipe, folder), load_tokenizer(folder)
    return start_of(case, recipe, model, tokenizer, training_questions, python)


def start_of(
    case: Case,
    recipe: Recipe,
    model: Callable[[], Any],
    tokenizer: Any,
    questions: list[Question],
    python: Run,
) -> Start:
    """Return the start of both sides with the dialect and the tool of the case."""
    drawn = POLICIES[case.policy] is not cold
    if case.world is None:
        dialect = open_dialect(recipe.dialect, tokenizer, recipe.dialogue, [PYTHON])
        return Start(recipe, model, tokenizer, questions, Tools(python), dialect, drawn)
    world = WORLDS[case.world]
    run = answering([question.text for question in questions], tokenizer, world.answer)
    every = EveryTurnCalls(tokenizer, recipe.dialogue, world)
    return Start(recipe, model, tokenizer, questions, Tools(run, world.tool), every, drawn)


def load_recipe(case: Case) -> Recipe:
    """Return the case's recipe with its groups, of which half start at the prompt (ARPO)."""
    recipe = load_settings(case.recipe, PARAMS)
    threads = int(os.environ.get("OMP_NUM_THREADS") or recipe.machine.threads)
    # Drawn as in the ARPO authors' code: the entropy of so young a policy hardly rises after a tool
    # result, so the paper's rule would hardly branch.
    budget = {"leaves": case.group, "initial": case.group // 2, "draw": True}
    rollout = recipe.reinforce.rollout.model_copy(update=budget)
    limits = WORLDS[case.world].limits if case.world else {}
    machine = {"threads": threads, "precision": case.precision}
    return recipe.model_copy(
        update={
            "reinforce": recipe.reinforce.model_copy(update={"rollout": rollout}),
            "dialogue": recipe.dialogue.model_copy(update=dict(limits)),
            "machine": recipe.machine.model_copy(update=machine),
        }
    )


def batch_of(start: Start, case: Case, number: int) -> list[Question]:
    """Return the questions of one repetition."""
    indices = range(number * case.questions, (number + 1) * case.questions)
    return [start.questions[index % len(start.questions)] for index in indices]


def drawn_rewards(case: Case, number: int) -> list[float]:
    """Draw a standard normal reward for each rollout of a repetition."""
    return np.random.default_rng((SEED, number)).normal(size=case.questions * case.group).tolist()
