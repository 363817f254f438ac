"""Suites of params/suites.yaml: their variants on a recipe, what is refused, and the page."""

import shutil

import pytest
import yaml

from flows.commands import compare
from params.schema.base import PARAMS
from params.schema.suites import load_suites
from tasks.comparison import suites


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
    assert "| 72.8 |" in row, "the paper's"
    assert "10,315 |" in row, "ours"
    assert "whatever their keys: of the commits" in page
    assert "advantages: no result has histograms" in page
    figure = project / "reports/household/suite-gagpo-table-1-success_by_update.png"
    assert figure.stat().st_size > 5000
