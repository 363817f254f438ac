"""Suites of params/suites.yaml: their variants on a recipe, what is refused, and the page."""

import shutil

import pytest
import yaml

from flows.commands import compare
from params.schema.base import PARAMS
from params.schema.suites import load_suites
from tasks.comparison import suites
from tasks.environments.alfworld.problems import TYPES


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(PARAMS, "params", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return tmp_path


@pytest.mark.parametrize("name", list(load_suites()))
def test_every_variant_holds_on_a_recipe_and_changes_what_it_says(project, name):
    suite = suites.suite_of(name)
    found = suites.variants_of("tiny", suite)
    assert set(found) == set(suite.variants)
    if name == "gpg":
        kinds = {label.split(",")[0]: one.algorithm.marks.kind for label, one in found.items()}
        assert kinds == {
            "one segment (GRPO)": "none",
            "tool call": "tool_call",
            "paragraph": "paragraph",
            "think tag": "think",
            "entropy": "entropy",
            "every token": "every_token",
        }
        ks = {one.recipe.reinforce.rollout.marks_per_rollout for one in found.values()}
        assert ks == {1, 2, 3}


def test_sizes_are_products_with_the_leaves_of_a_recipe():
    assert suites.sized("a={M/4} b={M} c={M*2}", 8) == "a=2 b=8 c=16"
    assert suites.sized("a={M/4}", 2) == "a=1"


def test_all_faults_of_a_table_of_suites_are_named_at_once(project):
    table = yaml.safe_load((project / "params/suites.yaml").read_text())
    table["gpg"]["baseline"] = "nothing"
    table["arpo"]["parts"]["credit"]["variants"]["ARPO"]["row"] = ""
    (project / "params/suites.yaml").write_text(yaml.dump(table))
    with pytest.raises(ValueError) as raised:
        load_suites(project / "params")
    assert "baseline 'nothing' is no variant" in str(raised.value)
    assert "row arpo" in str(raised.value)
    table["gpg"]["baseline"] = "one segment (GRPO)"
    table["arpo"]["parts"]["credit"]["variants"] = {"ARPO": {"row": "magic"}}
    del table["arpo"]["parts"]["table-1"]["variants"]["ARPO"]
    (project / "params/suites.yaml").write_text(yaml.dump(table))
    with pytest.raises(ValueError, match="'magic' is no row of"):
        load_suites(project / "params")


@pytest.mark.parametrize(
    ("column", "number", "said"),
    [
        ({"sets": ["hotpot"]}, 1.0, "is about 'hotpot', which is no row of"),
        ({"kinds": ["pick"]}, 1.0, "name sets, or a world"),
        ({"sets": ["gaia"], "world": "shop"}, 1.0, "name sets, or a world"),
        ({"sets": ["gaia"]}, "64.8 +3.5", "such as 64.8 ±3.5"),
    ],
)
def test_faults_of_a_papers_table_are_named(project, column, number, said):
    table = yaml.safe_load((project / "params/suites.yaml").read_text())
    printed = table["arpo"]["published"][1]
    printed["columns"] = {"GAIA": column}
    printed["models"] = {"Qwen3-8B": {"ARPO": [number]}}
    (project / "params/suites.yaml").write_text(yaml.dump(table, allow_unicode=True))
    with pytest.raises(ValueError, match=said):
        load_suites(project / "params")
    printed["columns"] = {"GAIA": {"sets": ["gaia"]}}
    printed["models"] = {"Qwen3-8B": {"ARPO": [1.0, 2.0], "prompting": [1.0]}}
    (project / "params/suites.yaml").write_text(yaml.dump(table, allow_unicode=True))
    with pytest.raises(ValueError, match="Qwen3-8B, ARPO has 2 numbers, and there are 1 columns"):
        load_suites(project / "params")


def test_means_of_the_papers_table_are_those_of_its_sets():
    """But for one row, whose printed mean differs: so each number stands below its own set."""
    (table,) = [one for one in load_suites()["arpo"].published if one.of == "table 1"]
    assert [*table.columns][-1] == "mean" and len(table.columns) == 11
    odd = {
        (model, method)
        for model, rows in table.models.items()
        for method, (*sets, mean) in rows.items()
        if abs(sum(one.mean for one in sets) / 10 - mean.mean) > 0.061
    }
    assert odd == {("Llama3.1-8B-Instruct", "direct")}
    assert [one for column in table.columns.values() for one in column.sets] == [
        *("aime24", "aime25", "math500", "math500-hub", "gsm8k", "math", "webwalkerqa"),
        *("hotpotqa", "2wikimultihopqa", "musique", "bamboogle", "bamboogle-hub"),
    ]


def test_columns_of_worlds_are_about_their_kinds_of_tasks():
    worlds = {
        (column.world, kind)
        for suite in load_suites().values()
        for table in suite.published
        for column in table.columns.values()
        for kind in column.kinds
    }
    assert worlds == {("household", kind) for kind in TYPES.values()}
    (table,) = load_suites()["gagpo"].published
    assert [*table.models] == [
        *("Qwen2.5-1.5B-Instruct", "Qwen2.5-7B-Instruct", "GPT-4o", "Gemini-2.5-Pro")
    ]
    assert table.methods == [
        *("prompting", "ReAct", "Reflexion", "PPO", "RLOO", "GRPO", "GiGPO", "GAGPO")
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--suite", "magic"], "has no such row: choose one of ['arpo', 'gpg', 'gagpo']"),
        (["--suite", "gpg", "--part", "table-9"], "has no such part: choose of ['marks'"),
        (["--suite", "gpg", "--algorithms", "grpo"], "--algorithms: a suite chooses its rows"),
        (["--suite", "gpg"], "--budget is missing: write kind=amount"),
        (["--suite", "gpg", "--committed"], "has no result of this suite's variants"),
        (["--committed"], "--part and --committed are for a suite"),
    ],
)
def test_what_a_suite_cannot_do_is_refused(project, capsys, given, said):
    assert compare.main(["tiny", *given]) == 2
    assert said in capsys.readouterr().err


def test_committed_results_are_reported_with_the_papers_columns(project, capsys):
    source = PARAMS.parent / "reports/household/comparison"
    for name in ("cold_start", "gagpo", "grpo"):
        shutil.copytree(source / name, f"reports/household/comparison/{name}")
    given = ["household", "--suite", "gagpo", "--part", "table-1", "--committed"]
    assert compare.main(given) == 0
    page = (project / "reports/household/suite-gagpo.md").read_text()
    assert page in capsys.readouterr().out
    (row,) = [line for line in page.splitlines() if line.startswith("| table-1 | GRPO")]
    assert "| 70.3 ± 3.6 | 80.5 ± 2.0 | 66.4 ± 4.4 |" in row, "the paper's"
    assert "10,315 |" in row, "ours"
    of_kinds = [line for line in page.splitlines() if line.startswith("| GRPO |")][:3]
    assert [line.split(" | ")[1] for line in of_kinds] == [
        *("Qwen2.5-1.5B-Instruct", "Qwen2.5-7B-Instruct", "here")
    ]
    assert of_kinds[0].count(" ± ") == 9, "six kinds of tasks, all, and two of WebShop"
    assert of_kinds[2].count("[") == 7, "ours have the kinds, and nothing of WebShop"
    assert of_kinds[2].endswith("| 30.6 [22.8, 38.6] | | |")
    assert "at 1.5B GRPO is above GiGPO on WebShop" in page
    assert "summaries" not in page
    assert "whatever their keys: of the commits" in page
    assert "advantages: no result has histograms" in page
    figure = project / "reports/household/suite-gagpo-table-1-success_by_update.png"
    assert figure.stat().st_size > 5000
