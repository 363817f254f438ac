import copy
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from params import schema

TINY = yaml.safe_load((schema.PARAMS / "tiny.yaml").read_text())
ENCYCLOPEDIA = {
    "source": "encyclopedia",
    "train": 40,
    "validation": 4,
    "test": 8,
    "articles": 100,
    "kinds": ["fact", "hop"],
}
READER = {
    "kind": "encyclopedia",
    "traces": 40,
    "wrong_query": 0.1,
    "wrong_fact": 0.1,
    "missing_call": 0.1,
}
SETS = {"source": "benchmarks", "train": ["gsm8k/train"], "validation": 9, "test": ["gsm8k/test"]}
CALCULATOR = {"kind": "calculator"}
WRITTEN = {
    "kind": "written",
    "file": "questions/own/traces.jsonl",
    "question": "question",
    "response": "response",
}
SEARCH = {
    "corpus": None,
    "results": 2,
    "snippet_words": 20,
    "query_characters": 200,
    "k1": 1.2,
    "b": 0.75,
}
DOCUMENTS = {**SEARCH, "corpus": "questions/own/documents.jsonl"}
ROW = {
    "hub": {
        "name": "someone/something",
        "revision": "0123456789abcdef0123456789abcdef01234567",
        "files": {"test": "data/test.parquet"},
    },
    "question": "prompt.0.content",
    "answer": "answer",
    "answer_after": "####",
    "solution": None,
    "records": None,
    "scorer": "exact",
}
RATES = ("wrong_operator", "wrong_digit", "wrong_answer", "missing_call")
REMOVED = object()


def changed(**changes):
    """The tiny recipe with other values; ``section__key=value``."""
    return edited(TINY, changes)


def edited(values, changes):
    """A copy with other values; ``REMOVED`` takes a key away."""
    values = copy.deepcopy(values)
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = values
        for section in sections:
            place = place[section]
        if value is REMOVED:
            del place[key]
        else:
            place[key] = value
    return values


def write(folder, values, name="mine"):
    """A recipe in ``folder``, beside the table of the sets."""
    shutil.copy(schema.PARAMS / "benchmarks.yaml", folder)
    (folder / f"{name}.yaml").write_text(values if isinstance(values, str) else yaml.dump(values))
    return name


def fault_of(folder, values):
    """The message of the one error that a recipe gives; it names the file on every line."""
    with pytest.raises(ValueError) as caught:
        schema.load(write(folder, values), folder)
    assert type(caught.value) is ValueError
    lines = str(caught.value).splitlines()
    assert str(folder / "mine.yaml") in lines[0]
    return str(caught.value)


def keys(values, prefix=""):
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{name}.")


def test_the_recipes_are_there_and_the_tables_beside_them_are_none():
    assert {"tiny", "tiny-search", "smoke", "gsm8k", "gsm8k-smoke"} <= set(schema.names())
    assert set(schema.TABLES).isdisjoint(schema.names())


@pytest.mark.parametrize("name", schema.names())
def test_a_recipe_keeps_the_values_of_its_file(name):
    values = yaml.safe_load((schema.PARAMS / f"{name}.yaml").read_text())
    assert schema.load(name).model_dump(mode="json") == values


@pytest.mark.parametrize(("small", "large"), [("smoke", "tiny"), ("gsm8k-smoke", "smoke")])
def test_a_small_recipe_has_the_keys_of_the_one_it_tries_in_their_order(small, large):
    def rest(name):
        values = yaml.safe_load((schema.PARAMS / f"{name}.yaml").read_text())
        if small == "gsm8k-smoke":  # other questions, and another expert
            values["prepare"] |= {"questions": None, "expert": None}
        return list(keys(values))

    assert rest(small) == rest(large)


def test_a_recipe_is_frozen():
    recipe = schema.load("smoke")
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        recipe.reinforce.rollout.leaves = 1


def test_an_unknown_recipe_is_named_with_those_that_lie_beside_it(tmp_path):
    write(tmp_path, TINY, "mine")
    with pytest.raises(ValueError) as caught:
        schema.load("other", tmp_path)
    assert "no recipe 'other'" in str(caught.value)
    assert str(tmp_path / "other.yaml") in str(caught.value)
    assert "mine" in str(caught.value)


@pytest.mark.parametrize("text", ["seed: [1, 2", "a: b: c", "\tseed: 1"])
def test_what_is_not_yaml_is_named_with_its_line(tmp_path, text):
    said = fault_of(tmp_path, text)
    assert "is not YAML" in said
    assert "line 1" in said


FAULTS = [
    # an unknown key
    ({"colour": "blue"}, ["unknown key 'colour'", "remove it, or correct its spelling"]),
    ({"machine__thread": 2}, ["unknown key 'machine.thread'", "correct its spelling"]),
    ({"prepare__encyclopedia": 2}, ["unknown key 'prepare.encyclopedia'", "correct its spelling"]),
    ({"prepare__policy__tiny": 2}, ["unknown key 'prepare.policy.tiny'"]),
    ({"prepare__policy__width": 2}, ["unknown key 'prepare.policy.width'"]),
    # a missing key
    ({"seed": REMOVED}, ["missing key 'seed'", "add it"]),
    ({"reinforce__rollout__leaves": REMOVED}, ["missing key 'reinforce.rollout.leaves'"]),
    ({"prepare__questions__test": REMOVED}, ["missing key 'prepare.questions.test'"]),
    # a wrong type or range
    ({"seed": "many"}, ["'seed' = 'many'", "valid integer"]),
    ({"machine": 5}, ["'machine' = 5"]),
    ({"machine__device": "tpu"}, ["'machine.device' = 'tpu'", "'cpu' or 'cuda'"]),
    ({"cold_start__steps": 0}, ["'cold_start.steps' = 0", "greater than 0"]),
    ({"cold_start__steps": 1.5}, ["'cold_start.steps' = 1.5", "valid integer"]),
    ({"reinforce__update__learning_rate": -1}, ["'reinforce.update.learning_rate' = -1"]),
    ({"evaluate__top_p": 1.5}, ["'evaluate.top_p' = 1.5", "less than or equal to 1"]),
    ({"dialogue__tools": ["abacus"]}, ["'dialogue.tools.0' = 'abacus'", "'python' or 'search'"]),
    ({"prepare__overlap_words": 0}, ["'prepare.overlap_words' = 0", "greater than 0"]),
    ({"prepare__expert": None}, ["'prepare.expert' = None"]),
    ({"cold_start__micro_batch": 0}, ["'cold_start.micro_batch' = 0", "greater than 0"]),
    ({"reinforce__trace_every": 0}, ["'reinforce.trace_every' = 0", "greater than 0"]),
    ({"reinforce__trace_questions": -1}, ["'reinforce.trace_questions' = -1"]),
    ({"prepare__expert__missing_call": 2}, ["'prepare.expert.missing_call' = 2"]),
    ({"prepare__questions__largest_operand": 1}, ["'prepare.questions.largest_operand' = 1"]),
    ({"prepare__policy__kind": "huge"}, ["'huge'", "'kind'", "'tiny', 'pretrained'"]),
    # an impossible combination
    (
        {"reinforce__rollout__leaves": 16, "reinforce__rollout__initial": 17},
        ["initial 17 exceeds leaves 16", "lower initial"],
    ),
    (
        {"dialogue__response_tokens": 256, "prepare__policy__context": 256},
        ["response_tokens 256", "context 256", "lower"],
    ),
    (
        {"prepare__policy__hidden": 128, "prepare__policy__heads": 3},
        ["hidden 128", "heads 3", "change one"],
    ),
    (
        {"prepare__policy__heads": 4, "prepare__policy__key_value_heads": 3},
        ["heads 4", "key_value_heads 3", "change one"],
    ),
    ({"dialogue__tools": []}, ["tools is empty", "name at least one"]),
    ({"reinforce__rollout__rows": 1}, ["rows 1 cannot hold", "raise rows"]),
    ({"prepare__expert__traces": 10**6}, ["expert.traces 1000000 exceeds", "lower it"]),
    (
        {"prepare__expert": {"kind": "computation", "traces": 9, **dict.fromkeys(RATES, 0.375)}},
        ["add up to 1.5", "lower them"],
    ),
    (
        {
            "prepare__questions__largest_arithmetic_operand": 499,
            "prepare__questions__largest_test_operand": 499,
        },
        ["largest_test_operand 499 must exceed", "largest_arithmetic_operand 499"],
    ),
    (
        {"cold_start__batch": 32, "cold_start__micro_batch": 5},
        ["batch 32 is no multiple of micro_batch 5", "change one"],
    ),
    # a source of questions and an expert
    (
        {"prepare__expert": READER},
        ["source is computation and expert.kind encyclopedia", "set expert.kind to computation"],
    ),
    (
        {"prepare__questions": ENCYCLOPEDIA},
        ["source is encyclopedia and expert.kind computation", "expert.kind to encyclopedia"],
    ),
    (
        {"prepare__questions": SETS},
        ["source is benchmarks and expert.kind computation", "to calculator or written"],
    ),
    ({"prepare__expert": CALCULATOR}, ["expert.kind calculator", "expert.kind to computation"]),
    (
        {"prepare__questions": {**SETS, "train": []}, "prepare__expert": CALCULATOR},
        ["train is empty", "name at least one set, such as gsm8k/train"],
    ),
    (
        {"prepare__questions": {**SETS, "test": []}, "prepare__expert": CALCULATOR},
        ["test is empty", "name at least one set, such as gsm8k/test"],
    ),
    (
        {"prepare__questions": {**SETS, "test": ["gsm8k"]}, "prepare__expert": CALCULATOR},
        ["'prepare.questions.test.0' = 'gsm8k'", "should match pattern"],
    ),
    ({"prepare__questions__source": "files"}, ["'files'", "'source'", "'benchmarks'"]),
    ({"prepare__expert__kind": "oracle"}, ["'oracle'", "'kind'", "'calculator'", "'written'"]),
    (
        {"prepare__expert": edited(WRITTEN, {"response": REMOVED}), "prepare__questions": SETS},
        ["missing key 'prepare.expert.response'"],
    ),
    # the tool search and its section
    (
        {"dialogue__tools": ["python", "search"]},
        ["tools is ['python', 'search'] and search is null", "needs the section search"],
    ),
    ({"search": SEARCH}, ["tools is ['python'] and search is given", "sets it to null"]),
    (
        {"dialogue__tools": ["search"], "search": SEARCH},
        ["search.corpus is None", "source is computation", "a file of documents below questions/"],
    ),
    (
        {"dialogue__tools": ["search"], "search": DOCUMENTS},
        ["tools is ['search'] and expert.kind computation, who calls python", "add it to"],
    ),
    (
        {"prepare__questions": SETS, "prepare__expert": CALCULATOR}
        | {"dialogue__tools": ["search"], "search": DOCUMENTS},
        ["expert.kind calculator, who calls python", "add it to dialogue.tools"],
    ),
    (
        {"prepare__questions": ENCYCLOPEDIA, "prepare__expert": READER},
        ["tools is ['python'] and expert.kind encyclopedia, who calls search", "add it to"],
    ),
    (
        {"prepare__questions": {**ENCYCLOPEDIA, "kinds": ["fact", "riddle"]}}
        | {"prepare__expert": READER},
        ["'prepare.questions.kinds.1' = 'riddle'", "'fact', 'hop', 'age' or 'gap'"],
    ),
    (
        {"prepare__questions": {**ENCYCLOPEDIA, "kinds": []}, "prepare__expert": READER},
        ["'prepare.questions.kinds' = []", "at least 1 item"],
    ),
    ({"search": {**SEARCH, "k1": 0}}, ["'search.k1' = 0", "greater than 0"]),
    ({"search": {**SEARCH, "b": 1.1}}, ["'search.b' = 1.1", "less than or equal to 1"]),
    ({"search": {**SEARCH, "results": 0}}, ["'search.results' = 0", "greater than 0"]),
    ({"search": {**SEARCH, "engine": "a"}}, ["unknown key 'search.engine'", "correct its"]),
    ({"search": edited(SEARCH, {"b": REMOVED})}, ["missing key 'search.b'"]),
    ({"search": REMOVED}, ["missing key 'search'"]),
]


@pytest.mark.parametrize(("changes", "said"), FAULTS, ids=[said[0][:60] for _, said in FAULTS])
def test_a_fault_names_file_key_value_and_remedy(tmp_path, changes, said):
    message = fault_of(tmp_path, changed(**changes))
    assert len(message.splitlines()) == 1
    assert [words for words in said if words not in message] == []


def test_a_recipe_that_is_no_mapping_is_refused(tmp_path):
    fault_of(tmp_path, "")
    fault_of(tmp_path, "[1, 2]")


def test_all_faults_come_in_one_error_a_line_each(tmp_path):
    lines = fault_of(tmp_path, changed(seed=-1, colour="blue", machine__threads=0)).splitlines()
    assert len(lines) == 3
    assert all(line.startswith(str(tmp_path / "mine.yaml")) for line in lines)


def reading(**changes):
    """A recipe of the encyclopedia with both tools."""
    own = {"prepare__questions": ENCYCLOPEDIA, "prepare__expert": READER, "search": SEARCH}
    return edited(changed(**own, dialogue__tools=["search", "python"]), changes)


def test_an_encyclopedia_brings_its_corpus(tmp_path):
    assert schema.load(write(tmp_path, reading()), tmp_path).search.corpus is None
    said = fault_of(tmp_path, reading(search=DOCUMENTS))
    assert "search.corpus is questions/own/documents.jsonl" in said
    assert "an encyclopedia brings its corpus (null)" in said


def test_other_questions_are_searched_for_in_a_file_of_documents(tmp_path):
    tools = ["python", "search"]
    recipe = schema.load(
        write(tmp_path, changed(dialogue__tools=tools, search=DOCUMENTS)), tmp_path
    )
    assert recipe.search.corpus == Path("questions/own/documents.jsonl")


@pytest.mark.parametrize(
    ("questions", "expert"),
    [(TINY["prepare"]["questions"], TINY["prepare"]["expert"]), (ENCYCLOPEDIA, READER)],
    ids=["computation", "encyclopedia"],
)
def test_generated_questions_say_how_many_there_must_be_and_bound_the_traces(questions, expert):
    prepare = {**TINY["prepare"], "questions": questions, "expert": expert}
    rows = schema.Prepare.model_validate(prepare).questions.rows()
    assert rows == {split: questions[split] for split in ("train", "validation", "test")}
    prepare["expert"] = {**expert, "traces": rows["train"] + 1}
    with pytest.raises(ValidationError, match="answers each question once; lower it"):
        schema.Prepare.model_validate(prepare)


@pytest.mark.parametrize("expert", [CALCULATOR, WRITTEN], ids=["calculator", "written"])
def test_sets_have_as_many_questions_as_they_have_and_experts_without_flaws(tmp_path, expert):
    file = write(tmp_path, changed(prepare__questions=SETS, prepare__expert=expert))
    prepare = schema.load(file, tmp_path).prepare
    assert prepare.questions.rows() is None
    assert prepare.expert.rates() == {}


@pytest.mark.parametrize("reference", ["gsm8k", "gsm8k/", "/test", "a/b/c", "a b/test", "g/te st"])
def test_a_reference_is_a_set_and_a_split(tmp_path, reference):
    values = changed(
        prepare__questions={**SETS, "train": ["gsm8k/train", reference]},
        prepare__expert=CALCULATOR,
    )
    assert f"'prepare.questions.train.1' = {reference!r}" in fault_of(tmp_path, values)


@pytest.mark.parametrize(
    "path", ["train.jsonl", "/questions/a.jsonl", "questions/../a.jsonl", ".", "other/questions/a"]
)
def test_a_file_outside_the_folder_that_dvc_knows_is_refused(tmp_path, path):
    written = changed(prepare__questions=SETS, prepare__expert={**WRITTEN, "file": path})
    searched = changed(dialogue__tools=["search"], search={**SEARCH, "corpus": path})
    for values in (written, searched):
        said = fault_of(tmp_path, values)
        assert f"{path} lies outside the folder questions/" in said
        assert "move it there" in said


def test_a_pretrained_policy_has_keys_of_its_own(tmp_path):
    policy = {"kind": "pretrained", "name": "Qwen/Qwen2.5-3B-Instruct", "context": 8192}
    assert "missing key 'prepare.policy.revision'" in fault_of(
        tmp_path, changed(prepare__policy=policy)
    )
    recipe = schema.load(
        write(tmp_path, changed(prepare__policy={**policy, "revision": None})), tmp_path
    )
    assert recipe.prepare.policy.context == 8192


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_rates_of_flaws_are_refused_exactly_where_they_leave_no_room(a, b, c, d):
    rates = dict(zip(RATES, (a, b, c, d), strict=True))
    if a + b + c + d <= 1:
        assert schema.ComputationExpert(kind="computation", traces=1, **rates).rates() == rates
    else:
        with pytest.raises(ValidationError, match="lower them"):
            schema.ComputationExpert(kind="computation", traces=1, **rates)


def test_a_single_answer_is_one_path_at_the_temperature_of_the_evaluation():
    recipe = schema.load("tiny")
    single = recipe.single_answers()
    assert (single.leaves, single.initial, single.branch) == (1, 1, 0)
    assert single.temperature == recipe.evaluate.temperature != recipe.reinforce.rollout.temperature
    assert single.rows == recipe.reinforce.rollout.rows


def test_the_range_of_rewards_covers_what_can_be_given():
    reward = schema.Reward(broken_format=-1.0, wrong=0.0, many_tools_bonus=0.1)
    assert reward.range() == (-1.0, 1.1)
    assert schema.Reward(broken_format=0, wrong=-2, many_tools_bonus=-3).range() == (-2, 1)


# ---------------------------------------------------------------- the table of benchmarks


def rows_of(folder, **rows):
    write(folder, rows, "benchmarks")
    return schema.load_benchmarks(folder)


def test_the_sets_that_come_with_the_project_have_their_rows():
    rows = schema.load_benchmarks()
    assert {"gsm8k", "math500", "aime24", "hotpotqa", "bamboogle"} <= set(rows)
    for name in schema.names():
        questions = schema.load(name).prepare.questions
        if isinstance(questions, schema.BenchmarkQuestions):
            references = (*questions.train, *questions.test)
            assert {reference.partition("/")[0] for reference in references} <= set(rows)


def test_a_row_keeps_its_values_and_may_have_no_hub(tmp_path):
    rows = rows_of(tmp_path, mine=ROW, own={**ROW, "hub": None, "scorer": "f1"})
    assert list(rows) == ["mine", "own"]
    assert rows["mine"].model_dump(mode="json") == ROW
    assert (rows["own"].hub, rows["own"].scorer) == (None, "f1")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"colour": "blue"}, ["unknown key 'colour'", "remove it, or correct its spelling"]),
        ({"answer": REMOVED}, ["missing key 'answer'", "add it"]),
        ({"hub__revision": REMOVED}, ["missing key 'hub.revision'", "add it"]),
        ({"hub__branch": "main"}, ["unknown key 'hub.branch'"]),
        ({"hub__revision": "main"}, ["'hub.revision' = 'main'", "pattern '^[0-9a-f]{40}$'"]),
        ({"hub__revision": ROW["hub"]["revision"][1:]}, ["'hub.revision' = '12345"]),
        ({"scorer": "bleu"}, ["'scorer' = 'bleu'", "'exact', 'maths' or 'f1'"]),
        ({"question": 5}, ["'question' = 5", "valid string"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_fault_in_a_row_names_file_row_key_and_value(tmp_path, changes, said):
    with pytest.raises(ValueError) as caught:
        rows_of(tmp_path, good=ROW, mine=edited(ROW, changes))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'benchmarks.yaml'}: mine: ")
    assert len(message.splitlines()) == 1
    assert [words for words in said if words not in message] == []


@pytest.mark.parametrize("text", ["", "- gsm8k", None])
def test_a_table_that_is_missing_or_none_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "benchmarks.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"benchmarks\.yaml is missing or holds no rows"):
        schema.load_benchmarks(tmp_path)


def test_a_row_that_is_no_mapping_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"benchmarks\.yaml: mine: "):
        rows_of(tmp_path, mine="gsm8k")


def test_only_the_sets_that_a_recipe_names_decide_anything(tmp_path):
    settings = {**SETS, "train": ["gsm8k/train", "aime24/test"]}
    write(tmp_path, changed(prepare__questions=settings, prepare__expert=CALCULATOR))
    recipe = schema.load("mine", tmp_path)
    assert list(schema.named_sets(recipe, tmp_path)) == ["gsm8k", "aime24"]
    assert schema.named_sets(schema.load("tiny")) == {}


def test_a_recipe_that_names_a_set_without_a_row_is_refused_before_any_work(tmp_path):
    settings = {**SETS, "test": ["nowhere/test"]}
    write(tmp_path, changed(prepare__questions=settings, prepare__expert=CALCULATOR))
    with pytest.raises(ValueError) as caught:
        schema.load("mine", tmp_path)
    for words in ("nowhere/test", "params/benchmarks.yaml", "'gsm8k'", "add a row"):
        assert words in str(caught.value)
