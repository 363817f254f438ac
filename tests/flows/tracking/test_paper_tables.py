"""Tables that papers print, with results of ours in the columns that are about their tasks."""

import pytest

from flows.tracking import paper_tables
from params.schema.suites import PaperTable, load_suites

GAGPO, ARPO = (load_suites()[name] for name in ("gagpo", "arpo"))
TABLES = {"gagpo": GAGPO.published[0], "arpo": ARPO.published[0]}
SETS = ["aime24", "aime25", "math500-hub", "gsm8k", "math", "webwalkerqa", "hotpotqa"]
SETS += ["2wikimultihopqa", "musique", "bamboogle"]


def result(kinds, right, source, scores=None):
    panel = {"source": source}
    return {"kinds": kinds, "right": right, "scores": scores or right, "panel": panel}


def rows_of(text):
    """The rows of a table by method and run, without its head."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return {(method, run): rest for method, run, *rest in cells[1:]}


def means(cells):
    return [cell.partition(" ")[0] for cell in cells]


def test_kinds_of_a_worlds_tasks_stand_below_the_papers():
    kinds = ["pick", "pick", "two", "look"]
    seeds = [
        result(kinds, right, "environment household") for right in ([1, 0, 0, 1], [1, 1, 0, 0])
    ]
    text = paper_tables.section(TABLES["gagpo"], {"GRPO": seeds, "lambda 0": seeds[:1]}, 50)
    rows = rows_of(text)
    assert means(rows["GRPO", "here"]) == ["75.0", "50.0", "", "", "", "0.0", "50.0", "", ""]
    assert means(rows["lambda 0", "here"])[0] == "50.0", "a variant that the paper's table lacks"
    assert rows["GRPO", "Qwen2.5-1.5B-Instruct"][:2] == ["73.1 ± 3.4", "66.7 ± 10.1"]
    assert rows["GiGPO", "Qwen2.5-1.5B-Instruct"][-3] == "88.1 ± 1.95", "as it is printed"
    assert rows["prompting", "GPT-4o"][-1] == "23.7"
    assert ("PPO", "here") not in rows
    assert "Nothing here is about Clean, Heat, Cool, Score, Success." in text
    assert "[" in rows["GRPO", "here"][0], "an interval"


def test_a_shop_has_score_and_success():
    bought = result(["fashion", "beauty"], [1, 0], "environment shop", [1.0, 0.5])
    rows = rows_of(paper_tables.section(TABLES["gagpo"], {"cold start": [bought]}, 50))
    assert means(rows["cold start", "here"]) == ["", "", "", "", "", "", "", "75.0", "50.0"]
    assert next(iter(rows)) == ("cold start", "here")


def test_a_set_has_its_own_measure_and_the_mean_is_of_all_sets():
    right = [1] * 5 + [0] * 5
    scores = [1.0] * 5 + [0.5] * 5
    whole = result(SETS, right, "benchmarks", scores)
    rows = rows_of(paper_tables.section(TABLES["arpo"], {"ARPO": [whole]}, 50))
    assert means(rows["ARPO", "here"]) == ["100.0"] * 5 + ["50.0"] * 5 + ["75.0"]
    some = result(SETS[:-1], right[:-1], "benchmarks", scores[:-1])
    rows = rows_of(paper_tables.section(TABLES["arpo"], {"ARPO": [some]}, 50))
    assert means(rows["ARPO", "here"])[-2:] == ["", ""], "no mean where a set is missing"


@pytest.mark.parametrize("name", TABLES)
def test_nothing_stands_beside_columns_of_other_tasks(name):
    """A kind of another world is none of theirs, though it has the name of one."""
    strange = result(["pick", "story"], [1, 0], "environment other")
    text = paper_tables.section(TABLES[name], {"GRPO": [strange]}, 50)
    assert "No column is about the tasks of this recipe" in text
    assert not any(run == "here" for _, run in rows_of(text))


def test_kinds_that_no_column_has_are_not_covered():
    def covered(name, kinds, source):
        return paper_tables.covers([TABLES[name]], [result(kinds, [1] * len(kinds), source)])

    assert covered("gagpo", ["pick", "two"], "environment household")
    assert not covered("gagpo", ["fashion", "beauty"], "environment shop")
    assert covered("arpo", ["gsm8k", "bamboogle-hub"], "benchmarks")
    assert not covered("arpo", ["gsm8k", "own"], "benchmarks")


def test_some_columns_stand_beside_our_results():
    heads = paper_tables.beside(GAGPO)
    assert heads[:3] == [
        "paper: ALFWorld, Qwen2.5-1.5B-Instruct (%)",
        "paper: WebShop's score, Qwen2.5-1.5B-Instruct (%)",
        "paper: WebShop, Qwen2.5-1.5B-Instruct (%)",
    ]
    assert len(heads) == 6, "models that were only prompted have none"
    assert paper_tables.beside(GAGPO, "GRPO")[:3] == ["70.3 ± 3.6", "80.5 ± 2.0", "66.4 ± 4.4"]
    assert paper_tables.beside(GAGPO, "lambda 0") == [""] * 6
    assert paper_tables.beside(ARPO, "ARPO") == ["52.8", "55.3", "58.3", "38.8", "43.7"]


def test_a_number_is_read_with_its_deviation():
    about = {"of": "table 9", "source": "a paper", "unit": "%", "columns": {"all": {}}}
    table = PaperTable(**about, models={"m": {"a": ["64.8 ±3.5"], "b": ["64.8±3.5"], "c": [7]}})
    written = [paper_tables.number(numbers[0]) for numbers in table.models["m"].values()]
    assert written == ["64.8 ± 3.5", "64.8 ± 3.5", "7.0"]
