"""prepare: questions, a corpus, SFT traces and the first policy, checked before any training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from params.schema.agent import Dialogue
from params.schema.base import Frozen, Machine
from params.schema.prepare import Policy, Prepare, PretrainedPolicy
from tasks.dialects import dialect_kind, open_dialect
from tasks.dialects.contract import Dialect
from tasks.dialects.prompt_check import PROBE
from tasks.environments.contract import OpenEnvironment, recording
from tasks.gates import gate
from tasks.gates import questions as question_gate
from tasks.gates import traces as trace_gate
from tasks.ledger import substeps
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import SubStep
from tasks.policy import first, layer_kinds
from tasks.policy import machine as policies
from tasks.policy.load_model import fetch_config, fetch_tokenizer, save_model
from tasks.questions import choice, solver, sources, trace_tables, unusable, written
from tasks.questions.contract import ExpertSettings, Rules
from tasks.questions.entries import Entry, Problem, places_in, question_of
from tasks.questions.experts import Dropped, Material, Trace
from tasks.questions.faults import Fault
from tasks.questions.samples import TraceTable, samples_of, trace_table
from tasks.questions.sources import Sets, World
from tasks.questions.stored import mapped, portions, where
from tasks.scorers import names, open_scorers
from tasks.scorers.contract import Scorer
from tasks.tools.own_tool import offered
from tasks.tools.recording import Origin
from tasks.tools.search import save_corpus
from tasks.trees import dialogue as talk
from tasks.trees.markers import encode
from tasks.trees.tables import save_questions, write_table
from tasks.trees.tree import Question, ToolSpec
from tasks.trees.words import printable

Scorers = Mapping[str, Scorer]  # by the names that questions give them
# opens the recipe's tools and its world, given the folder of the corpus
OpenWorld = Callable[[Path], AbstractContextManager[OpenEnvironment]]
FIRST_SIGHTS = 1000  # tasks whose first observation a tokenizer learns from, without traces


@dataclass(frozen=True)
class PrepareInputs:
    """What decides questions, traces and the first policy."""

    settings: Prepare
    sets: Sets  # rows of params/benchmarks.yaml that the settings name
    sources: list[Artifact]  # the files that they name
    dialogue: Dialogue
    tools: Mapping[str, Frozen]  # their settings, by name
    machine: Machine
    dialect: Mapping[str, Frozen]  # its settings, by name
    environment: World = field(default_factory=dict)
    # name -> digest of the files that it stands for: of the expert, the world, tools, the dialect
    named: Mapping[str, str] = field(default_factory=dict)
    scorers: Mapping[str, str] = field(default_factory=dict)  # digests of their sources, by name
    policy: Artifact | None = None  # where the first policy is a folder, or a file in one


@substeps.recorded
def prepare(step: SubStep, inputs: PrepareInputs, *, open_environment: OpenWorld) -> Record:
    """Make the questions, the corpus, the SFT traces and the first policy, and check them.

    Artifacts: ``questions`` (a table a split), ``corpus``, ``traces``, ``dropped`` (questions that
    were left out or got no trace, each with its reason), ``initial`` (the policy), ``gates``, and
    ``calls``, where results of tools or of the world are not repeatable.

    ``open_environment`` opens the tools and the world, given the folder of the corpus.
    Raises ValueError for a fault in the user's files, those of the intake folder excepted, or a
    context too small for a prompt and the response budget, GateError for a table that breaks a
    critical expectation.
    """
    with opened_scorers(inputs) as scorers:
        return _prepared(step, inputs, open_environment, scorers)


@contextmanager
def opened_scorers(inputs: PrepareInputs) -> Iterator[dict[str, Scorer]]:
    """Keep this project's scorers and those of the inputs' sets ready, by name."""
    of_sets = [name for row in inputs.sets.values() for name in row.scorers]
    with open_scorers([*names(), *of_sets]) as kinds:
        yield {name: kind.compare for name, kind in kinds.items()}


def _prepared(
    step: SubStep, inputs: PrepareInputs, open_environment: OpenWorld, scorers: Scorers
) -> Record:
    settings = inputs.settings
    with suppress(OSError):  # fetching the policy says what is wrong
        check_layers(step.recipe, settings.policy)
        check_template(inputs)
    policies.use_machine(inputs.machine)
    rules = rules_of(inputs, scorers)
    recipe_material = sources.material(settings, inputs.sets, rules, step.seed, inputs.environment)
    documents, of_corpus = sources.read_corpus(inputs.tools)
    docs = gate.DOCS / step.recipe
    faults = [*recipe_material.faults, *of_corpus]
    faulty = leave_out_faulty(faults, recipe_material, inputs, docs)
    check_questions(
        recipe_material,
        recipe_material,
        settings,
        scorers,
        step.out / "gates" / "questions.json",
        docs,
    )
    save_corpus([*recipe_material.documents, *documents], step.out / "corpus")

    traces, without, sights, specs = ask_expert(step, inputs, recipe_material, open_environment)
    texts = chain(known_texts(recipe_material, traces), sights)
    check_layers(step.recipe, settings.policy)
    model, tokenizer, dialect = first_policy(inputs, texts, specs, step.seed)
    tool_names = [spec.name for spec in specs]
    traces, forging = written.without_marks(traces, talk.forged(tokenizer, tool_names))
    short_material, traces, written_traces, long, faults = leave_out_long(
        recipe_material, traces, tokenizer, dialect, inputs, docs, faults
    )
    for line in unusable.unsayable(written_traces, inputs.dialogue):
        print(f"prepare: {line}", flush=True)
    # its lengths depend on the tokenizer, which does not depend on it
    lengths = partial(_long_entries, tokenizer, dialect, inputs)
    material, delivery = sources.take_in(settings, inputs.sets, short_material, rules, lengths)
    long += unusable.leave_out([*delivery.faults, *delivery.long], docs, faults)
    if long or delivery.entries:
        verdict = step.out / "gates" / "questions.json"
        check_questions(material, recipe_material, settings, scorers, verdict, docs)
    dropped = [*material.dropped, *faulty, *long, *without, *forging]
    save_tables(step.out, material, dropped, written_traces.table)
    save_model(model, step.out / "initial")
    tokenizer.save_pretrained(step.out / "initial")
    if settings.expert and not choice.find(settings.expert.kind).sampled:
        verdict = step.out / "gates" / "traces.json"
        check_traces(written_traces, material, inputs, tool_names, verdict, docs)
    _print_summary(len(traces), len(material.questions["train"]), dropped)
    return {"metrics": _metrics(material.questions, traces, dropped, model)}


def ask_expert(
    step: SubStep, inputs: PrepareInputs, material: Material, open_environment: OpenWorld
) -> tuple[Sequence[Trace], Sequence[Dropped], list[str], Sequence[ToolSpec]]:
    """Return the expert's traces, the questions without one, first sights, and the tools' specs.

    First sights are of a world without traces, for a tokenizer to learn from. Saves ``calls``.
    Raises ValueError where an expert has solved no task of a world.
    """
    scratch = partial(step.ledger.scratch, step)
    with (
        open_environment(step.out / "corpus") as opened,
        recording(opened, Origin("prepare", 0), scratch) as recorded,
    ):
        with at_hand(inputs, recorded.environment) as tools:
            traces, without = material.write_traces(tools)
        check_episodes(traces, without, inputs)
        lacking = inputs.environment and not traces
        sights = first_sights(recorded.environment, material) if lacking else []
        recorded.save_calls(step.out / "calls")
    return traces, without, sights, opened.specs


def check_layers(recipe: str, policy: Policy) -> None:
    """Raise ValueError for a policy that can be trained in no form.

    Its config.json alone is fetched, where it is not here yet.
    """
    if not isinstance(policy, PretrainedPolicy):
        return
    config = fetch_config(policy)
    if fault := layer_kinds.refusal(config, policy.context):
        key = f"params/{recipe}.yaml: 'prepare.policy.name' = {policy.name!r}"
        raise ValueError(f"{key} is {fault}")
    room = layer_kinds.positions(config)
    if room is not None and policy.context > room:
        raise ValueError(
            f"params/{recipe}.yaml: 'prepare.policy.context' is {policy.context}, and the policy "
            f"{policy.name} has {room} positions: lower it, or take another policy"
        )


def check_template(inputs: PrepareInputs) -> None:
    """Raise ValueError for a chat template with which an agent would not read what it is to read.

    A pretrained policy's tokenizer alone is fetched, where it is not here yet. What a world offers
    is known when it is open, and checked then.
    """
    policy = inputs.settings.policy
    if isinstance(policy, PretrainedPolicy):
        specs = [ToolSpec(name, "", {"type": "object"}) for name in offered(inputs.tools)]
        open_dialect(inputs.dialect, fetch_tokenizer(policy), inputs.dialogue, specs)


def first_policy(
    inputs: PrepareInputs, texts: Iterable[str], specs: Sequence[ToolSpec], seed: int
) -> tuple[Any, Any, Dialect]:
    """Return the first policy, its tokenizer and the dialect; a tiny one learns ``texts``."""
    policy = inputs.settings.policy
    tags = dialect_kind(inputs.dialect).tags([spec.name for spec in specs])
    model, tokenizer = first.POLICIES[policy.kind](policy, texts, tags, seed)
    dialect = open_dialect(inputs.dialect, tokenizer, inputs.dialogue, specs)
    _check_rows(model, tokenizer, dialect, tags)
    if isinstance(policy, PretrainedPolicy):
        name_dialect(tokenizer, inputs.dialect, dialect)
    return model, tokenizer, dialect


def _check_rows(model: Any, tokenizer: Any, dialect: Dialect, tags: Sequence[str]) -> None:
    """Raise ValueError where a text can have a token for which the policy has no embedding.

    Added tokens that no text has may lack one: published tokenizers have some of pictures.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    added = tokenizer.added_tokens_decoder
    words = (number for number in tokenizer.get_vocab().values() if number not in added)
    written = [dialect.prompt(PROBE), *(encode(tokenizer, f"a{tag}") for tag in tags)]
    highest = max(*words, *(int(tokens.max()) for tokens in written))
    if highest >= rows:
        raise ValueError(
            f"the policy's tokenizer has the token {tokenizer.convert_ids_to_tokens(highest)!r} "
            f"with the id {highest}, and the policy has {rows} rows of embeddings: resize them "
            "(resize_token_embeddings), or take the tokenizer that the policy was trained with"
        )


def check_episodes(
    traces: Sequence[Trace], without: Sequence[Dropped], inputs: PrepareInputs
) -> None:
    """Raise ValueError where an expert has solved no task of a world, with the first reason."""
    if traces or not without or not inputs.environment:
        return
    reasons = Counter(each.reason for each in without)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    raise ValueError(
        f"prepare.expert wrote no trace in {', '.join(inputs.environment)} ({counts}); the first: "
        f"{without[0].question_id}: {without[0].detail}: correct the world or its solver"
    )


@contextmanager
def at_hand(inputs: PrepareInputs, opened: OpenEnvironment) -> Iterator[Any]:
    """Yield what an expert acts with: the world, or a function that answers a round of calls."""
    if inputs.environment:
        yield opened
        return
    with opened.session() as session:
        ((handle, _),) = session.open([Question("", "", "", ())])
        yield lambda calls: session.act([(handle, call) for call in calls])


def first_sights(opened: OpenEnvironment, material: Material) -> list[str]:
    """Return what the world shows first in some training tasks."""
    with opened.session() as session:
        started = session.open(material.questions["train"][:FIRST_SIGHTS])
        for handle, _ in started:
            session.close(handle)
    return [talk.first_text(first) for _, first in started if first]


def name_dialect(tokenizer: Any, section: Mapping[str, Frozen], dialect: Dialect) -> None:
    """Put what an inference server needs to speak the dialect into tokenizer_config.json.

    It stays there, as the key "dialect", in all policies that are trained from this one. So does
    the chat template, which a dialect may have extended by calls.
    """
    (settings,) = section.values()
    tokenizer.init_kwargs["dialect"] = dialect_kind(section).serving(settings, dialect)
    tokenizer.chat_template = getattr(dialect, "tokenizer", tokenizer).chat_template


def known_texts(material: Material, traces: Sequence[Trace]) -> Iterator[str]:
    """Yield what a tokenizer of one's own is trained on."""
    yield from (question.text for question in material.questions["train"])
    yield from (f"{document.title}\n{document.text}" for document in material.documents)
    yield from ("".join(text for text, _ in trace.parts) for trace in traces)
    yield from (talk.first_text(seen) for trace in traces for seen in trace.seen)


def _print_summary(traces: int, questions: int, dropped: Sequence[Dropped]) -> None:
    summary = f"{traces} traces for the cold start"
    if not traces:
        summary = f"{questions} questions to train on, no traces yet"
    reasons = Counter(each.reason for each in dropped)
    counts = [f"{count} {reason}" for reason, count in reasons.most_common()]
    left_out = f"; left out: {', '.join(counts)}" if counts else ""
    print(f"prepare: {summary}{left_out}")
    first = {each.reason: each for each in reversed(dropped)}
    for reason in solver.FAILURES:
        if reason in first:
            said = " ".join(first[reason].detail.split())[-300:]
            print(printable(f"prepare: the first {reason}: {first[reason].question_id}: {said}"))


def _metrics(
    questions: Mapping[str, Sequence[Question]],
    traces: Sequence[Trace],
    dropped: Sequence[Dropped],
    model: Any,
) -> dict[str, float]:
    reasons = Counter(each.reason for each in dropped)
    flawed = sum(trace.flaw != "none" for trace in traces)
    return {
        **{f"{split}_questions": len(entries) for split, entries in questions.items()},
        "traces": len(traces),
        "flawed_traces": flawed / max(1, len(traces)),
        "dropped": len(dropped),
        **{f"dropped_{reason}": count for reason, count in sorted(reasons.items())},
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }


# ---------------------------------------------------------------- records that cannot be used


def rules_of(inputs: PrepareInputs, scorers: Scorers) -> Rules:
    """Return what the records of the user's files have to satisfy."""
    tools, context = offered(inputs.tools), inputs.settings.policy.context

    def problems(question: Question) -> Iterable[Problem]:
        return unusable.far_too_long(question, inputs.dialogue, context) or question_gate.problems(
            question, scorers
        )

    return Rules(
        problems=problems,
        trace_problem=partial(
            trace_gate.trace_fault,
            tools=tools,
            world=bool(inputs.environment),
            several=_may_call_together(inputs),
        ),
        right=partial(right, scorers),
        longest_trace=context * unusable.CHARACTERS_A_TOKEN,
    )


def _long_entries(
    tokenizer: Any, dialect: Dialect, inputs: PrepareInputs, entries: Sequence[Entry]
) -> list[Fault]:
    """Return a fault for each of the entries that is too long."""
    questions = {"train": mapped(question_of, entries)}
    material = Material(questions, places=partial(places_in, entries))
    context = inputs.settings.policy.context
    return unusable.long_questions(material, tokenizer, dialect, inputs.dialogue, context)


def right(scorers: Scorers, question: Question, answer: str) -> bool:
    """Return whether ``answer`` scores 1 with the question's own scorer."""
    return scorers[question.scorer](answer, question.answers)["score"] == 1


def leave_out_faulty(
    faults: Sequence[Fault], material: Material, inputs: PrepareInputs, docs: Path
) -> list[Dropped]:
    """Return the faulty records as dropped.

    Raises ValueError with all of them, and what is too long, where the recipe stops at faulty
    records; and where no training question is left.
    """
    (docs / unusable.LISTING).unlink(missing_ok=True)
    unreadable = any(not fault.place for fault in faults)  # a file, which is never left out
    if unreadable or (faults and inputs.settings.faulty == "stop"):
        unusable.refuse([*faults, *_likely_lengths(material, inputs)], docs)
    dropped = unusable.leave_out(faults, docs)
    if not material.questions["train"]:
        reasons = Counter(each.reason for each in (*dropped, *material.dropped))
        counts = [f"{count} {reason}" for reason, count in reasons.most_common()]
        counts.append(f"{len(material.questions['validation'])} go to validation")
        raise ValueError(
            f"prepare.questions leaves none to train on ({', '.join(counts)}): name more sets, "
            "lower validation, raise overlap_words or correct the records"
        )
    return dropped


def _likely_lengths(material: Material, inputs: PrepareInputs) -> list[Fault]:
    """Return the questions that are too long, as far as a tokenizer can be had already.

    A tiny policy's own is trained later, on the traces too.
    """
    policy, dialogue = inputs.settings.policy, inputs.dialogue
    unsound = [
        question
        for question in material.unsound
        if not unusable.far_too_long(question, dialogue, policy.context)
    ]
    whole = replace(material, unsound=unsound, questions={**material.questions, "unsound": unsound})
    try:
        known = (each.text for each in chain(whole.questions["train"], whole.unsound))
        tools = offered(inputs.tools)
        specs = [ToolSpec(name, "", {"type": "object"}) for name in tools]
        tags = dialect_kind(inputs.dialect).tags(tools)
        tokenizer = first.TOKENIZERS[policy.kind](policy, known, tags)
        dialect = open_dialect(inputs.dialect, tokenizer, dialogue, specs)
        return unusable.long_questions(whole, tokenizer, dialect, dialogue, policy.context)
    except (OSError, ValueError) as error:
        print(f"prepare: lengths are not checked yet: {error}", flush=True)
        return []


def leave_out_long(
    material: Material,
    traces: Sequence[Trace],
    tokenizer: Any,
    dialect: Dialect,
    inputs: PrepareInputs,
    docs: Path,
    earlier: Sequence[Fault],
) -> tuple[Material, list[Trace], TraceTable, list[Dropped], list[Fault]]:
    """Return questions and traces that fit into the context, their table, the others, and faults.

    ``earlier`` faults stay in the list of all faults, which is returned and is in ``docs``.
    Raises ValueError with all that are too long, where the recipe stops at faulty records.
    """
    context = inputs.settings.policy.context
    of_questions = unusable.long_questions(material, tokenizer, dialect, inputs.dialogue, context)
    ids = {fault.question_id for fault in of_questions}
    rest = [trace for trace in traces if trace.question.id not in ids]
    samples = [sample for trace in rest for sample in samples_of(trace, inputs.dialogue)]
    all_traces = trace_table(samples, dialect)
    of_traces = unusable.long_traces(samples, all_traces, context)
    faults = [*of_questions, *of_traces.values()]
    if not faults:
        return material, rest, all_traces, [], [*earlier]
    if inputs.settings.faulty == "stop":
        unusable.refuse(faults, docs)
    dropped = unusable.leave_out(faults, docs, earlier)
    without = [each.question.id for each in traces if each.question.id in ids]
    dropped += [Dropped(each, "trace_of_question_left_out", "too_long") for each in without]
    questions = {
        split: where(members, np.array([question.id not in ids for question in members], bool))
        for split, members in material.questions.items()
    }
    short = [trace for trace in rest if id(trace) not in of_traces]
    left = replace(material, questions=questions)
    return left, short, all_traces.without(of_traces.keys()), dropped, [*earlier, *faults]


# ---------------------------------------------------------------- tables and checks


def save_tables(
    out: Path, material: Material, dropped: Sequence[Dropped], traces: pa.Table
) -> None:
    """Write the tables of questions, of those left out with their reasons, and of traces."""
    for split, entries in material.questions.items():
        save_questions(entries, out / "questions" / f"{split}.parquet")
    rows = [vars(each) for each in dropped]
    write_table(pa.Table.from_pylist(rows, schema=trace_tables.DROPPED), out / "dropped.parquet")
    write_table(traces, out / "traces.parquet")


def check_questions(
    material: Material,
    recipe_material: Material,
    settings: Prepare,
    scorers: Scorers,
    verdict: Path,
    docs: Path,
) -> None:
    """Run the gate of the questions; ``recipe_material`` has none of those delivered."""
    table = QuestionTables(material.questions)
    prepared = question_gate.prepare(table, scorers, settings.overlap_words)
    rows = settings.questions.rows()
    if rows:
        rows["train"] += len(material.questions["train"]) - len(recipe_material.questions["train"])
    expectations = question_gate.expectations(rows=rows)
    gate.check("questions", prepared, expectations, verdict, docs / "questions")


@dataclass(frozen=True)
class QuestionTables:
    """The questions as tables of a portion of them each, which can be gone through again."""

    questions: Mapping[str, Sequence[Question]]  # by split

    def __iter__(self) -> Iterator[pd.DataFrame]:
        for split, members in self.questions.items():
            for portion in portions(members):
                entries = [
                    {**vars(question), "answers": list(question.answers), "split": split}
                    for question in portion
                ]
                # texts that are no UTF-8 are for the gate to name, so they stay what they are
                yield pd.DataFrame(entries, dtype=object)


def _may_call_together(inputs: PrepareInputs) -> bool:
    """Return whether a turn of a written trace may make several calls; an act is a turn's only."""
    return dialect_kind(inputs.dialect).several_calls and not inputs.environment


def check_traces(
    written_traces: TraceTable,
    material: Material,
    inputs: PrepareInputs,
    tools: Sequence[str],
    verdict: Path,
    docs: Path,
) -> None:
    """Run the gate of the traces; the share of flawed ones must be near the expert's rates."""
    settings, world = inputs.settings, bool(inputs.environment)
    parts = [sample.parts for sample in written_traces.samples]
    begins = written_traces.begins
    frame = written_traces.table.to_pandas().assign(parts=parts, begins=begins)
    training = [question.id for question in material.questions["train"]]
    several = _may_call_together(inputs)
    prepared = trace_gate.prepare(frame, training, tools, world=world, several=several)
    rates = settings.expert.rates() if isinstance(settings.expert, ExpertSettings) else {}
    flawed = _expected_share(rates, sum(begins))
    expectations = trace_gate.expectations(settings.policy.context, flawed, world=world)
    gate.check("traces", prepared, expectations, verdict, docs / "traces")


def _expected_share(rates: Mapping[str, float], traces: int) -> tuple[float, float] | None:
    """Return four standard errors around the rate of flawed traces; None where it is unknown."""
    if not rates or not traces:
        return None
    share = sum(rates.values())
    slack = 4 * float(np.sqrt(share * (1 - share) / traces))
    return max(0.0, share - slack), min(1.0, share + slack)
