"""The stage reward_model: what it leaves for a replay."""

import pyarrow as pa

from flows.stages.reward_model import publish_recorded
from tasks.rewards.judging import TABLE, VERDICTS, load_replies
from tasks.tools.recording import CALL_TABLE, CALLS, REPLAYED, Origin, replayed_calls
from tasks.trees.tables import write_table


def test_a_replay_finds_what_tools_and_judges_said_of_the_labelled_trees(tmp_path, monkeypatch):
    data = tmp_path / "data/toy"
    monkeypatch.setenv(REPLAYED, str(data))
    publish_recorded([], data / "calls_of_reward_model")  # a recipe without a reward model
    assert replayed_calls(Origin("reward_model", 0)) == {}

    call = {"tool": "web", "argument": "who?", "outcome": "ok", "text": "she"}
    write_table(pa.Table.from_pylist([call], schema=CALL_TABLE), tmp_path / "trees" / CALLS)
    verdict = {"text": "right", "prompt_tokens": 7, "completion_tokens": 1, "request": "a" * 32}
    write_table(pa.Table.from_pylist([verdict], schema=TABLE), tmp_path / "scored" / VERDICTS)
    places = {"trees": tmp_path / "trees", "rewards": tmp_path / "scored/rewards.parquet"}
    records = [
        {"artifacts": {name: {"path": str(place), "digest": name}}}
        for name, place in [("questions", tmp_path / "questions"), *places.items()]
    ]
    publish_recorded(records, data / "calls_of_reward_model")
    (found,) = replayed_calls(Origin("reward_model", 0)).values()
    assert found.text == "she"
    (reply,) = load_replies(data.rglob(VERDICTS)).values()
    assert reply.text == "right"
