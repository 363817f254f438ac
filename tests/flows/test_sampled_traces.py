"""Traces by rejection sampling from a policy that has learned a little, called without Prefect."""

import copy
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from flows.stages.prepare import sample_traces
from tasks.dialects import open_dialect
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy import resident
from tasks.policy.machine import use_machine
from tasks.questions import trace_tables
from tasks.questions.sampled import Sampled
from tasks.recipes import load
from tasks.trees.tables import read_rows, save_questions, write_table
from tasks.trees.tree import Question

QUESTIONS = [Question(str(n), "toy", f"What is {n} plus 1?", (str(n + 1),)) for n in range(6)]
EXPERT = Sampled(
    kind="sampled",
    policy=None,
    questions=5,
    attempts=4,
    most=2,
    temperature=1.0,
    top_p=1.0,
    rows=4,
)
SMOKE = load("smoke")
RECIPE = SMOKE.model_copy(
    update={
        "prepare": SMOKE.prepare.model_copy(update={"expert": EXPERT, "intake": None}),
        "dialogue": SMOKE.dialogue.model_copy(update={"turn_tokens": 40, "response_tokens": 60}),
    }
)


def learn(policy, tokenizer, steps=150):
    """Teach the policy, in seconds, to write an answer from 1 to 3 to every question."""
    dialect = open_dialect(RECIPE.dialect, tokenizer, RECIPE.dialogue, [])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3)
    for step in range(steps):
        text = f"<think>add</think><answer>\\boxed{{{step % 3 + 1}}}</answer>"
        ((tokens, own),) = dialect.trace(QUESTIONS[step % 3], [(text, True)])
        labels = np.where(own, tokens, -100)
        batch = [torch.tensor(np.asarray(each, np.int64))[None] for each in (tokens, labels)]
        policy(input_ids=batch[0], labels=batch[1]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def taught(policy, tokenizer, tmp_path_factory):
    """A folder with a policy that is right now and then."""
    use_machine(RECIPE.machine)
    folder = tmp_path_factory.mktemp("taught")
    own = copy.deepcopy(policy).float()
    learn(own, tokenizer)
    own.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def made(taught, tmp_path, monkeypatch):
    """The record of a preparation whose first policy is that one."""
    monkeypatch.chdir(tmp_path)
    use_machine(RECIPE.machine)
    resident.POLICIES.clear()
    shutil.copytree(taught, "initial")
    save_questions(QUESTIONS, Path("questions/train.parquet"))
    write_table(pa.Table.from_pylist([], schema=trace_tables.DROPPED), Path("dropped.parquet"))
    for folder in ("corpus", "gates"):
        Path(folder).mkdir()
    paths = {name: name for name in ("initial", "questions", "corpus", "gates")}
    paths["dropped"] = "dropped.parquet"
    return {"artifacts": {name: vars(Artifact.at(Path(path))) for name, path in paths.items()}}


def traces(record):
    return read_rows(Path(artifacts.output(record, "traces").path))


def test_a_policy_that_is_right_now_and_then_teaches_itself(made):
    records = sample_traces(SubStep("toy", "prepare", 0, 7), RECIPE, made)
    assert [record["verb"] for record in records] == ["rollout", "rollout", "select_traces"]
    found = traces(records[-1])
    counts = {row["question_id"]: 0 for row in found}
    answers = {question.id: question.answers[0] for question in QUESTIONS}
    for row in found:
        counts[row["question_id"]] += 1
        assert f"\\boxed{{{answers[row['question_id']]}}}" in row["text"]
    assert 0 < max(counts.values()) <= EXPERT.most
    dropped = read_rows(Path(artifacts.output(records[-1], "dropped").path))
    assert len(found) + len(dropped) == EXPERT.questions * EXPERT.attempts
    assert "wrong_answer" in {row["reason"] for row in dropped}

    again = sample_traces(SubStep("other", "prepare", 0, 7), RECIPE, made)
    assert traces(again[-1]) == found, "the same seed gives the same traces"
    other = sample_traces(SubStep("seed", "prepare", 0, 8), RECIPE, made)
    assert traces(other[-1]) != found


def test_a_teacher_is_a_folder_or_pinned(made):
    teacher = {"name": "no/such-teacher", "revision": None}
    expert = Sampled.model_validate({**EXPERT.model_dump(), "policy": teacher})
    settings = RECIPE.prepare.model_copy(update={"expert": expert})
    with pytest.raises(ValueError, match="is no folder of a policy here, and revision is null"):
        sample_traces(
            SubStep("toy", "prepare", 0, 7), RECIPE.model_copy(update={"prepare": settings}), made
        )
