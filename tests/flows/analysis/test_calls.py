"""Turns of several calls in frames, pages, messages and traces; and tables without them."""

import shutil
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from flows.analysis import chat, frames, trajectories
from flows.pages import forest
from flows.tracking import traces
from tasks.ledger.substeps import SubStep
from tasks.trees.tables import write_table
from tasks.trees.tree import CallResult
from tests import made_run
from tests.checkout import ROOT
from tests.tasks.rollouts.test_several_calls import (
    ANSWER,
    PYTHON,
    QWEN3,
    calling,
    grown,
    layout,
    script,
    speaking,
)

BOTH = (
    CallResult("call_0", "python", "ok", "2+2", "four"),
    CallResult("call_1", "search", "no_results", "cats", "nothing"),
)
LAST = (CallResult("call_2", "python", "error"),)
FOUND = ["tool", "argument", "outcome", "result", "number", "answered"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer):
    """A run of one tree: a turn makes two calls, and another one a call that nobody read."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(ROOT / "params", folder / "params")
    random = np.random.default_rng(0)
    tree = made_run.tree(lambda text: tokenizer.encode(text, add_special_tokens=False), random, "q")
    tree.nodes[1] = replace(tree.nodes[1], results=BOTH)
    text = "<think>so</think><python>1</python>"
    tree.nodes[3] = replace(tree.nodes[3], text=text, results=LAST)
    made_run.write(folder, "tiny", [[tree]], tokenizer)
    return folder, tree


def test_frames_have_a_row_for_each_call(run):
    folder, _ = run
    calls = frames.calls("tiny", project=folder)
    assert calls[FOUND].values.tolist() == [
        ["python", "2+2", "ok", "four", 1, 2],
        ["search", "cats", "no_results", "nothing", 2, 2],
        ["python", "1", "error", "", 1, -1],
    ]
    assert calls["ok"].tolist() == [True, False, False]


def test_a_page_shows_each_call(run, monkeypatch):
    folder, _ = run
    monkeypatch.chdir(folder)
    tables = {
        name: pq.read_table(folder / "data/tiny/trees" / f"{name}.parquet")
        for name in ("questions", "nodes", "leaves", "decisions", "rewards", "advantages")
    }
    (question,) = forest.iteration("tiny", tables, 0, {})["questions"]
    assert question["nodes"][2]["calls"] == [
        ["python", "2+2", "ok", "four"],
        ["search", "cats", "no_results", "nothing"],
    ]


def test_tables_of_earlier_releases_are_shown(run, tmp_path, monkeypatch):
    folder, _ = run
    shutil.copytree(folder, tmp_path / "run")
    file = tmp_path / "run/data/tiny/trees/nodes.parquet"
    write_table(pq.read_table(file).drop_columns(["results"]), file)
    calls = frames.calls("tiny", project=tmp_path / "run")
    shown = "<result>let us see</result>"
    assert calls[FOUND].values.tolist() == [["python", "2+2", "ok", shown, 1, 2]]
    (one,) = trajectories.training("tiny", None, tmp_path / "run")
    assert [node.results for node in one.tree.nodes] == [()] * len(one.tree.nodes)


def test_streamed_trees_have_the_results(run):
    folder, tree = run
    (one,) = trajectories.training("tiny", None, folder)
    assert [node.results for node in one.tree.nodes] == [node.results for node in tree.nodes]


def test_each_call_has_a_span_of_its_own(run):
    _, tree = run
    score = made_run.scores(tree)[0] | {"response_tokens": 1, "sampled_tokens": 1}
    step = SubStep("tiny", "reinforce", 0, 0)
    made = traces.trace(tree, 0, score, step, key="ab" * 16, began=0)
    _, first, *calls, last = made.spans
    assert (first.name, last.name) == ("turn 1", "turn 2")
    assert [(c.kind, c.name, c.inputs["call"], c.outputs["result"], c.outcome) for c in calls] == [
        ("TOOL", "python", "2+2", "four", "ok"),
        ("TOOL", "search", "cats", "nothing", "no_results"),
    ]
    assert [call.attributes["call_id"] for call in calls] == ["call_0", "call_1"]


def test_exported_messages_render_to_what_was_sampled():
    turns = (calling("70", "8"), calling("71"), calling("72", "73"), ANSWER)
    tree = grown(script(*turns))
    specs = [PYTHON]
    spoken = chat.Chat(speaking(layout(), specs), specs, "", QWEN3, objects=True)
    (messages,) = chat.conversations(tree, spoken)
    assert [each["role"] for each in messages] == [
        *("user", "assistant", "tool", "tool", "assistant", "tool"),
        *("assistant", "tool", "tool", "assistant"),
    ]
    made = [call["id"] for each in messages for call in each.get("tool_calls", ())]
    answered = [each["tool_call_id"] for each in messages if each["role"] == "tool"]
    assert made == answered == [f"call_{number}" for number in range(1, 6)]
    rendered = QWEN3.apply_chat_template(messages, tools=chat.tools(spoken), tokenize=False)
    whole = QWEN3.decode(np.concatenate([node.tokens for node in tree.nodes]))
    # a policy that has said no thought is not given an empty one
    assert rendered.replace("<think>\n\n</think>\n\n", "").strip() == whole.strip()


def test_a_turn_with_too_many_calls_is_exported_with_all_of_them():
    tree = grown(script(calling("70", "71", "72")), layout(tool_calls=2))
    spoken = chat.Chat(speaking(layout(), [PYTHON]), [PYTHON], "", QWEN3)
    (messages,) = chat.conversations(tree, spoken)
    assert len(messages) == 2 and len(messages[1]["tool_calls"]) == 3
