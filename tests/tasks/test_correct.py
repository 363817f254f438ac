"""What a solver says of the states that a policy has reached, and how it is learned."""

from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from params.schema.agent import Agent, Dialogue, EngineSettings
from params.schema.cold_start import ColdStart
from tasks.correct import CORRECTED, CorrectInputs, correct, corrected, solved
from tasks.dialects.tags import Tags, open_tags
from tasks.environments.contract import OpenEnvironment
from tasks.environments.episodes import open_worlds
from tasks.environments.frozen_lake import ENVIRONMENT, FrozenLake
from tasks.environments.record import seed_of
from tasks.learning import fine_tuning
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.questions import trace_tables
from tasks.questions.solver import written
from tasks.trees import dialogue as talk
from tasks.trees.tables import read_rows, save_trees, write_table
from tasks.trees.tree import TURN
from tests.sections import MACHINE
from tests.tasks.rollouts import test_worlds
from tests.tasks.rollouts.test_worlds import FORMS, LAKE, grown

SPECS = [*ENVIRONMENT.specs(LAKE)]
OLD = {
    "question_id": "train-00000",
    "split": "train",
    "kind": "4x4",
    "flaw": "none",
    "text": "",
    "tokens": [5, 6, 7],
    "trained": [False, True, True],
}

lakes = test_worlds.lakes  # a fixture


def dialogue_of(form):
    limits = {"turn_tokens": 60, "result_tokens": 300, "response_tokens": 3000, "tool_calls": 20}
    return Dialogue(system="", **limits, **FORMS[form])


def environment_of(lakes):
    return OpenEnvironment(SPECS, lakes.forked.session)


def leaves_of(lakes, form):
    """Walks of a random agent, a tree each; some stop walking before the goal."""
    walks = [
        tree.with_leaves([leaf])
        for tree in grown(lakes, "forked", form, "none")
        for leaf in range(len(tree.leaves))
    ]
    tasks = [replace(walk.question, id=f"train-{n:05d}") for n, walk in enumerate(walks)]
    return [replace(walk, question=task) for walk, task in zip(walks, tasks, strict=True)]


def slowly(tree, dialect):
    """The solver's act before each turn of a tree, by a world of its own."""
    lake = FrozenLake(LAKE)
    lake.start(tree.question, seed_of(tree.question))
    for node in next(iter(tree.trajectories())):
        if node.kind == TURN:
            yield lake.solve()
            for call in dialect.calls(node.text):
                lake.act(call)


@pytest.mark.parametrize("form", list(FORMS))
def test_each_state_has_the_solvers_act_after_what_the_policy_has_seen(lakes, form):
    tokenizer = lakes.tokenizer
    dialect = open_tags(Tags(), tokenizer, dialogue_of(form), SPECS)
    trees = leaves_of(lakes, form)
    acts = solved(trees, environment_of(lakes), dialect)
    agreements = []
    for tree, found in zip(trees, acts, strict=True):
        assert found == [*slowly(tree, dialect)]
        rows = [*corrected(tree, found, dialect, fresh=form == "fresh")]
        contexts = [[tree.nodes[i] for i in context] for context in tree.contexts(tree.leaves[0])]
        states = [
            ([one.tokens for one in nodes[:place]], node)
            for nodes in contexts
            for place, node in enumerate(nodes)
            if node.kind == TURN
        ]
        for (row, agrees), (before, turn), act in zip_longest(rows, states, found):
            end = [tokenizer.eos_token_id] if form == "fresh" else []
            label = [*talk.encode(tokenizer, written(act)), *end]
            assert row["tokens"].tolist() == [*np.concatenate(before), *label]
            assert row["trained"].tolist() == [False] * sum(map(len, before)) + [True] * len(label)
            assert agrees == (turn.text.strip() == written(act)) and row["flaw"] == CORRECTED
            agreements.append(agrees)
    assert 0.1 < np.mean(agreements) < 0.9 and len(agreements) > 2 * len(trees)


@pytest.fixture
def corrections(lakes, tmp_path, monkeypatch):
    """Run the verb on some trees and traces; return its record and the rows of its table."""
    monkeypatch.chdir(tmp_path)
    lakes.tokenizer.save_pretrained("policy")
    agent = Agent(
        dialogue=dialogue_of("growing"),
        tools={},
        environment={"frozen_lake": LAKE},
        dialect={"tags": Tags()},
        sources={},
        engine=EngineSettings(kind="transformers", memory=1.0, servers=(), lanes=1),
        machine=MACHINE,
    )

    def run(trees, traces, number, environment=None, context=1000):
        save_trees(trees, Path(f"trees-{number}"))
        inputs = CorrectInputs(
            *(Artifact.at(Path(name)) for name in (f"trees-{number}", traces, "policy")),
            agent,
            context,
        )
        step = SubStep("toy", "cold_start", number, 5)
        record = correct(step, inputs, environment=environment or environment_of(lakes))
        table = Path(artifacts.output(record, "traces").path)
        return record, [*read_rows(table)], table

    write_table(pa.Table.from_pylist([OLD] * 3, schema=trace_tables.TRACES), Path("traces.parquet"))
    return run


def test_rounds_add_up_and_an_episode_is_learned_from_at_once(lakes, corrections):
    trees = leaves_of(lakes, "growing")
    first, rows, table = corrections(trees[:6], "traces.parquet", 1)
    assert rows[:3] == [OLD | {"episode": None}] * 3
    assert {row["episode"] for row in rows[3:]} == {*range(1, 7)}
    assert first["metrics"]["corrections"] == len(rows) - 3
    _, more, table = corrections(trees[6:], table, 2)
    assert more[: len(rows)] == rows
    assert {row["episode"] for row in more[len(rows) :]} == {*range(7, len(trees) + 1)}
    settings = ColdStart(
        steps=1,
        batch=4,
        micro_batch=4,
        learning_rate=1e-2,
        warmup_steps=0,
        weight_decay=0.0,
        save_every=1,
    )
    units = fine_tuning.FineTuning(table, settings, 0, MACHINE).units
    assert sorted(chain(*units)) == [*range(len(more))] and len(units) == 3 + len(trees)
    assert all(len({more[index]["episode"] for index in unit}) == 1 for unit in units)


def test_rows_that_do_not_fit_are_left_out(lakes, corrections):
    trees = leaves_of(lakes, "growing")[:6]
    _, every, _ = corrections(trees, "traces.parquet", 1)
    longest = max(len(row["tokens"]) for row in every)
    _, fitting, _ = corrections(trees, "traces.parquet", 2, context=longest - 1)
    assert 3 < len(fitting) < len(every)
    assert max(len(row["tokens"]) for row in fitting) < longest


def test_a_world_whose_solver_knows_nothing_is_an_error(lakes, corrections):
    kind = type(ENVIRONMENT)(
        type(LAKE),
        "tests/tasks/rollouts/lakes_of_a_user.py:Silent",
        ENVIRONMENT.specs,
        ENVIRONMENT.tasks,
    )
    trees = leaves_of(lakes, "growing")[:2]
    with open_worlds(kind, LAKE, 1, 20.0) as silent:
        environment = OpenEnvironment(SPECS, silent.session)
        with pytest.raises(ValueError, match=r"prepare\.expert\.corrections: .* set corrections"):
            corrections(trees, "traces.parquet", 1, environment)
