import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from params.schema.verdict import Verdict
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.trees import panels
from tasks.trees.intervals import paired_bootstrap
from tasks.trees.tables import write_table
from tasks.verdict import VerdictInputs, judge, values, verdict

SETTINGS = Verdict(measure="success", confidence=0.95, margin=0.0, bootstrap=500)
GATES = [("questions", True), ("rewards", True)]
REIGNING = {"version": 3, "commit": "a" * 40, "digest": "b" * 32 + ".dir"}
PANEL = {"digest": "d" * 64, "tasks": 100}
HARD = [float(number % 2) for number in range(100)]
BETTER = [1.0 if number < 30 else value for number, value in enumerate(HARD)]


def answered(values, first=0):
    return {f"test-{number:05d}": value for number, value in enumerate(values, start=first)}


def judged(candidate, *, cold_start=HARD, champion=None, gates=GATES, **settings):
    """The verdict on answers; with a champion's answers, there is one."""
    found = {"cold start": answered(cold_start), "trained": answered(candidate)}
    if champion is not None:
        found["champion"] = champion if isinstance(champion, dict) else answered(champion)
    chosen = SETTINGS.model_copy(update=settings)
    return judge(found, REIGNING if champion is not None else None, gates, chosen)


def test_a_candidate_that_is_surely_better_than_the_champion_is_promoted():
    made = judged(BETTER, champion=HARD)
    expected = paired_bootstrap(np.array(BETTER), np.array(HARD), 0.95, 500)
    assert made == {
        "promote": True,
        "reason": "every gate passed, and the candidate is "
        f"15.0 points of success [{100 * expected.low:.1f}, {100 * expected.high:.1f}] above the "
        "champion",
        "against": "champion",
        "champion": REIGNING,
        "questions": 100,
        "means": {"cold start": 0.5, "trained": 0.65, "champion": 0.5},
        "difference": vars(expected),
        "chance_of_a_false_promotion": pytest.approx(0.025),
        "measure": "success",
        "confidence": 0.95,
        "margin": 0.0,
        "bootstrap": 500,
        "gates": [{"table": "questions", "passed": True}, {"table": "rewards", "passed": True}],
    }


@pytest.mark.parametrize(
    "candidate",
    [HARD, [1 - value for value in BETTER], [*HARD[:98], 1.0, 1.0]],
    ids=["equal", "worse", "one question better"],
)
def test_one_that_is_equal_worse_or_doubtful_is_not(candidate):
    made = judged(candidate, champion=HARD)
    assert not made["promote"]
    assert "the interval does not lie above the margin of 0.0" in made["reason"]


def test_graded_scores_promote_where_no_more_answers_are_wholly_right():
    rows = [
        {
            "agent": agent,
            "question": f"test-{n:05d}",
            "success": n % 2,
            "score": score,
            "sound": True,
        }
        for agent, gain in (("cold start", 0.0), ("trained", 0.2))
        for n in range(100)
        for score in [1.0 if n % 2 else 0.3 + gain]
    ]
    chosen = {name: SETTINGS.model_copy(update={"measure": name}) for name in ("success", "score")}
    made = {
        name: judge(values(rows, name), None, GATES, settings) for name, settings in chosen.items()
    }
    assert [made[name]["promote"] for name in ("success", "score")] == [False, True]
    assert "10.0 points of score" in made["score"]["reason"]
    broken = [{**row, "sound": False} for row in rows]
    assert set(values(broken, "score")["trained"].values()) == {0.0}


def test_the_margin_has_to_be_cleared_by_the_whole_interval():
    low = judged(BETTER, champion=HARD)["difference"]["low"]
    assert judged(BETTER, champion=HARD, margin=low - 0.001)["promote"]
    refused = judged(BETTER, champion=HARD, margin=low)
    assert not refused["promote"]
    assert f"margin of {100 * low:.1f}" in refused["reason"]
    assert judged(HARD, champion=HARD, margin=-0.01)["promote"], "no worse may be asked for, too"


def test_more_confidence_can_refuse_what_less_would_promote():
    close = [1.0 if number in (0, 2, 4) else value for number, value in enumerate(HARD)]
    assert judged(close, champion=HARD, confidence=0.8)["promote"]
    assert not judged(close, champion=HARD, confidence=0.99)["promote"]


def test_a_failed_gate_or_none_at_all_refuses_the_best_candidate():
    failed = judged(BETTER, champion=HARD, gates=[("questions", True), ("rewards", False)])
    assert not failed["promote"]
    assert failed["reason"] == "the gate of the table rewards failed"
    unknown = judged(BETTER, champion=HARD, gates=[])
    assert (unknown["promote"], unknown["reason"]) == (False, "the run has no gate's verdict")


def test_answers_to_other_questions_are_not_compared():
    made = judged(BETTER, champion=answered(HARD, first=5))
    assert not made["promote"]
    assert made["difference"] is None
    assert made["reason"] == (
        "the questions are not the same: the candidate answered 100, the champion 100, of which "
        "95 are shared"
    )


def test_the_order_of_the_answers_does_not_matter():
    turned = dict(reversed(answered(HARD).items()))
    assert judged(BETTER, champion=turned) == judged(BETTER, champion=HARD)


def test_without_a_champion_the_own_cold_start_has_to_be_beaten():
    made = judged(BETTER)
    assert made["promote"]
    assert (made["against"], made["champion"]) == ("cold start", None)
    assert made["reason"].endswith("above the cold start")
    assert not judged(HARD)["promote"]
    assert not judged(BETTER, gates=[("rewards", False)])["promote"]


def test_a_champion_is_what_counts_where_there_is_one():
    assert not judged(BETTER, cold_start=[0.0] * 100, champion=BETTER)["promote"]
    assert judged(BETTER, cold_start=[1.0] * 100, champion=HARD)["promote"]


def test_several_answers_to_a_question_count_as_their_mean():
    rows = [
        {"agent": "trained", "question": question, "success": right, "score": score, "sound": sound}
        for question, right, score, sound in [
            *[("one", True, 1.0, True), ("one", False, 0.5, True), ("one", False, 0.5, False)],
            *[("two", True, 1.0, True)] * 3,
        ]
    ]
    assert values(rows, "success") == {"trained": {"one": pytest.approx(1 / 3), "two": 1.0}}
    assert values(rows, "score") == {"trained": {"one": 0.5, "two": 1.0}}


# ---------------------------------------------------------------- the verb


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The outs of the stages before, as the working folder."""
    monkeypatch.chdir(tmp_path)
    agents = {"cold start": HARD, "trained": BETTER, "champion": HARD}
    rows = [
        {"agent": agent, "question": question, "success": bool(value)}
        for agent, values in agents.items()
        for question, value in answered(values).items()
    ]
    table = pa.Table.from_pylist(rows)
    said = {panels.METADATA: json.dumps(PANEL)}
    write_table(table.replace_schema_metadata(said), Path("evaluation.parquet"))
    write_gate("prepare", "questions", True)
    write_gate("reinforce", "rewards", True)
    Path("champion").mkdir()
    Path("champion/champion.json").write_text(json.dumps(REIGNING))
    return tmp_path


def write_gate(stage, table, passed):
    file = Path("gates", stage, f"{table}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"table": table, "rows": 3, "passed": passed, "expectations": []}))


def decided():
    inputs = VerdictInputs(
        answers=Artifact.at(Path("evaluation.parquet")),
        champion=Artifact.at(Path("champion")),
        gates=[Artifact.at(Path("gates", name)) for name in ("prepare", "reinforce")],
        settings=SETTINGS,
    )
    made = verdict(SubStep("toy", "verdict", 0, 7), inputs)
    return Path(artifacts.output(made, "verdict").path)


def test_the_verdict_is_a_file_with_every_figure(folder):
    said = json.loads(decided().read_text())
    assert said == {**judged(BETTER, champion=HARD), "panel": PANEL}


def test_equal_inputs_give_equal_bytes_and_another_champion_another_verdict(folder):
    first = decided()
    text = first.read_bytes()
    (first.parent / "record.json").unlink()
    assert decided().read_bytes() == text
    Path("champion/champion.json").write_text(json.dumps({**REIGNING, "digest": "c" * 32}))
    assert decided() != first


def test_a_gate_of_either_stage_that_failed_is_found(folder):
    for stage in ("prepare", "reinforce"):
        write_gate(stage, "more", False)
        assert json.loads(decided().read_text())["reason"] == "the gate of the table more failed"
        write_gate(stage, "more", True)
