"""Algorithms side by side, and the table that comes out.

The sub-steps are the real ones on a very small policy, without Prefect and DVC; the command itself
is run in tests/flows/test_smoke.py.
"""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from flows import compare, evaluate, reinforce
from params.schema import base
from tasks.policy import resident
from tasks.settings import load as settings_of
from tasks.trees.tables import save_questions
from tasks.trees.tree import Question

ALGORITHMS = ("reinforce", "ppo")
SIZES = {
    "dialogue": {"turn_tokens": 6, "response_tokens": 24},
    "evaluate": {"questions": 4, "bootstrap": 50},
}


@pytest.fixture
def project(policy, tokenizer, tmp_path, monkeypatch):
    """A folder with a recipe, its questions and a cold start, as the stages before leave them."""
    monkeypatch.chdir(tmp_path)
    resident.POLICIES.clear()
    shutil.copytree(base.PARAMS, "params", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    recipe = yaml.safe_load(Path("params/smoke.yaml").read_text())
    for section, changes in SIZES.items():
        recipe[section] |= changes
    recipe["reinforce"]["questions"] = 2
    recipe["reinforce"]["rollout"] |= {"leaves": 4, "initial": 2, "branch": 1, "rows": 8}
    Path("params/toy.yaml").write_text(yaml.dump(recipe))
    questions = [Question(str(i), "toy", f"question {i}", ("1",)) for i in range(8)]
    for split in ("train", "test"):
        save_questions(questions, Path(f"data/toy/questions/{split}.parquet"))
    Path("data/toy/corpus").mkdir()
    policy.save_pretrained("models/toy/cold_start")
    tokenizer.save_pretrained("models/toy/cold_start")
    for flow, verbs in (
        (reinforce, ("rollout", "reward", "advantage", "update")),
        (evaluate, ("rollout", "reward")),
    ):
        for verb in verbs:
            monkeypatch.setattr(flow, verb, getattr(flow, verb).fn)
    monkeypatch.setattr(compare, "BEFORE", ())  # stages that DVC would run
    return tmp_path


def records():
    """What the ledger holds of the comparison, and when it was written."""
    places = Path(".beamline/ledger/toy/compare").rglob("record.json")
    return {str(file): file.stat().st_mtime_ns for file in places}


def test_algorithms_are_trained_from_one_cold_start_and_asked_the_same_once(project):
    compare.compare.fn("toy", ALGORITHMS, 2)
    reports = Path("reports/toy")
    names = ["algorithms.json", "algorithms.md", "algorithms.png"]
    assert sorted(path.name for path in reports.iterdir()) == names
    found = json.loads((reports / "algorithms.json").read_text())
    assert [entry["algorithm"] for entry in found] == [compare.COLD_START, *ALGORITHMS]
    assert all(0 <= entry["low"] <= entry["success"] <= entry["high"] <= 1 for entry in found)
    assert "seconds" not in found[0]
    assert all(entry["seconds"] > 0 and entry["trained_tokens"] > 0 for entry in found[1:])

    first = {}
    for name in ALGORITHMS:
        for file in Path(".beamline/ledger/toy/compare", name).glob("0000-*/record.json"):
            record = json.loads(file.read_text())
            made = {kind: entry["digest"] for kind, entry in record["artifacts"].items()}
            first[name, record["verb"]] = made
    one, other = ALGORITHMS
    assert first[one, "rollout"] == first[other, "rollout"]
    assert first[one, "update"]["policy"] != first[other, "update"]["policy"]
    assert ["critic" in first[name, "update"] for name in ALGORITHMS] == [False, True]

    before = records()
    assert len(before) == 2 + 2 * (2 * 4 + 2)
    resident.POLICIES.clear()
    compare.compare.fn("toy", ALGORITHMS, 2)
    assert records() == before, "a second call does nothing anew"
    assert resident.POLICIES.learner is None
    assert json.loads((reports / "algorithms.json").read_text()) == found


def test_a_comparison_goes_on_with_more_iterations_and_with_fewer(project):
    compare.compare.fn("toy", ["reinforce"], 2)
    before = records()
    compare.compare.fn("toy", ["reinforce"], 3)
    assert before.items() < records().items()
    assert len(records()) == len(before) + 4 + 2
    resident.POLICIES.clear()
    compare.compare.fn("toy", ["reinforce"], 1)  # whose policy has been pruned by then
    found = json.loads(Path("reports/toy/algorithms.json").read_text())
    assert [entry["algorithm"] for entry in found] == [compare.COLD_START, "reinforce"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "no recipe 'nowhere'"),
        (["toy", "--algorithms", "grpo", "magic"], "reinforce.algorithm 'magic' is no row"),
        (["toy", "--iterations", "0"], "--iterations"),
        (["toy", "--iterations", "-3"], "--iterations"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_any_work(project, capsys, arguments, said):
    try:
        status = compare.main(arguments)
    except SystemExit as refused:  # by the parser of the command line
        status = refused.code
    assert status == 2
    assert said in capsys.readouterr().err


def test_with_another_algorithm_a_recipe_is_the_same_but_for_its_name():
    recipe = settings_of("smoke")
    other = compare.with_algorithm(recipe, "dapo")
    assert other.reinforce.algorithm == "dapo"
    assert compare.with_algorithm(other, recipe.reinforce.algorithm) == recipe


def test_the_table_has_a_row_an_algorithm():
    found = [
        {"algorithm": "cold start", "success": 0.5, "low": 0.412, "high": 0.588},
        {
            **{"algorithm": "arpo", "success": 0.875, "low": 0.8, "high": 0.95},
            **{"seconds": 3.14159, "trained_tokens": 1234.0},
        },
    ]
    assert compare.markdown(found, 30).splitlines() == [
        "| algorithm | success after 30 iterations (%) | seconds an iteration "
        "| tokens trained an iteration |",
        "|---|---:|---:|---:|",
        "| cold start | 50.0 [41.2, 58.8] | | |",
        "| arpo | 87.5 [80.0, 95.0] | 3.14 | 1234 |",
    ]
    cells = {line.count("|") for line in compare.markdown(found, 30).splitlines()}
    assert cells == {5}


def test_a_report_replaces_the_one_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [{"algorithm": "cold start", "success": 0.5, "low": 0.4, "high": 0.6}]
    compare.report("toy", found, 3)
    found.append({**found[0], "algorithm": "grpo", "seconds": 1.0, "trained_tokens": 2.0})
    compare.report("toy", found, 3)
    folder = Path("reports/toy")
    names = ["algorithms.json", "algorithms.md", "algorithms.png"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert json.loads((folder / "algorithms.json").read_text()) == found
    assert (folder / "algorithms.md").read_text() == compare.markdown(found, 3)
