import copy
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from params.schema import algorithms, base, benchmarks
from params.schema import prepare as prepare_module
from params.schema import recipe as schema
from params.schema import reinforce as reinforce_module
from tasks.learning import learner
from tasks.learning.algorithm import assemble
from tasks.learning.estimators import Episode
from tasks.policy import checkpoint, resident
from tests.trees import credited, random_tree, small_policy

TINY = yaml.safe_load((base.PARAMS / "tiny.yaml").read_text())
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
    "file": "data/sources/own/traces.jsonl",
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
DOCUMENTS = {**SEARCH, "corpus": "data/sources/own/documents.jsonl"}
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
    """A recipe in ``folder``, beside the tables of the sets and of the algorithms."""
    for table in base.TABLES:
        if not (folder / f"{table}.yaml").exists():
            shutil.copy(base.PARAMS / f"{table}.yaml", folder)
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
    assert set(base.TABLES).isdisjoint(schema.names())


@pytest.mark.parametrize("name", schema.names())
def test_a_recipe_keeps_the_values_of_its_file(name):
    values = yaml.safe_load((base.PARAMS / f"{name}.yaml").read_text())
    recipe = schema.load(name)
    for key in ("memory", "server", "lanes"):  # decide no outcome, and are in no key
        assert getattr(recipe.engine, key) == values["engine"].pop(key)
    assert recipe.model_dump(mode="json") == values


@pytest.mark.parametrize(("small", "large"), [("smoke", "tiny"), ("gsm8k-smoke", "smoke")])
def test_a_small_recipe_has_the_keys_of_the_one_it_tries_in_their_order(small, large):
    def rest(name):
        values = yaml.safe_load((base.PARAMS / f"{name}.yaml").read_text())
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


def test_no_recipe_is_called_sources(tmp_path):
    with pytest.raises(ValueError, match=r"'sources'.*data/sources/.*rename"):
        schema.load(write(tmp_path, TINY, name="sources"), tmp_path)


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
    ({"reinforce__rollout__marks_per_rollout": REMOVED}, ["missing key", "marks_per_rollout"]),
    ({"reinforce__update__critic_learning_rate": REMOVED}, ["missing key", "critic_learning_rate"]),
    # a wrong type or range
    ({"reinforce__rollout__marks_per_rollout": 0}, ["marks_per_rollout' = 0", "greater than 0"]),
    ({"reinforce__update__critic_learning_rate": 0}, ["critic_learning_rate' = 0", "greater"]),
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
        [
            "search.corpus is None",
            "source is computation",
            "a file of documents below data/sources/",
        ],
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
    assert "search.corpus is data/sources/own/documents.jsonl" in said
    assert "an encyclopedia brings its corpus (null)" in said


def test_other_questions_are_searched_for_in_a_file_of_documents(tmp_path):
    tools = ["python", "search"]
    recipe = schema.load(
        write(tmp_path, changed(dialogue__tools=tools, search=DOCUMENTS)), tmp_path
    )
    assert recipe.search.corpus == Path("data/sources/own/documents.jsonl")


@pytest.mark.parametrize(
    ("questions", "expert"),
    [(TINY["prepare"]["questions"], TINY["prepare"]["expert"]), (ENCYCLOPEDIA, READER)],
    ids=["computation", "encyclopedia"],
)
def test_generated_questions_say_how_many_there_must_be_and_bound_the_traces(questions, expert):
    prepare = {**TINY["prepare"], "questions": questions, "expert": expert}
    rows = prepare_module.Prepare.model_validate(prepare).questions.rows()
    assert rows == {split: questions[split] for split in ("train", "validation", "test")}
    prepare["expert"] = {**expert, "traces": rows["train"] + 1}
    with pytest.raises(ValidationError, match="answers each question once; lower it"):
        prepare_module.Prepare.model_validate(prepare)


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
    "path", ["train.jsonl", "/data/sources/a.jsonl", "data/sources/../a.jsonl", ".", "data/mine/a"]
)
def test_a_file_outside_the_folder_that_dvc_knows_is_refused(tmp_path, path):
    written = changed(prepare__questions=SETS, prepare__expert={**WRITTEN, "file": path})
    searched = changed(dialogue__tools=["search"], search={**SEARCH, "corpus": path})
    for values in (written, searched):
        said = fault_of(tmp_path, values)
        assert f"{path} lies outside the folder data/sources/" in said
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
        assert (
            prepare_module.ComputationExpert(kind="computation", traces=1, **rates).rates() == rates
        )
    else:
        with pytest.raises(ValidationError, match="lower them"):
            prepare_module.ComputationExpert(kind="computation", traces=1, **rates)


def test_a_single_answer_is_one_path_at_the_temperature_of_the_evaluation():
    recipe = schema.load("tiny")
    single = recipe.single_answers()
    assert (single.leaves, single.initial, single.branch) == (1, 1, 0)
    assert single.temperature == recipe.evaluate.temperature != recipe.reinforce.rollout.temperature
    assert single.rows == recipe.reinforce.rollout.rows


def test_the_range_of_rewards_covers_what_can_be_given():
    reward = reinforce_module.Reward(broken_format=-1.0, wrong=0.0, many_tools_bonus=0.1)
    assert reward.range() == (-1.0, 1.1)
    assert reinforce_module.Reward(broken_format=0, wrong=-2, many_tools_bonus=-3).range() == (
        -2,
        1,
    )


# ---------------------------------------------------------------- the table of benchmarks


def rows_of(folder, **rows):
    write(folder, rows, "benchmarks")
    return benchmarks.load_benchmarks(folder)


def test_the_sets_that_come_with_the_project_have_their_rows():
    rows = benchmarks.load_benchmarks()
    assert {"gsm8k", "math500", "aime24", "hotpotqa", "bamboogle"} <= set(rows)
    for name in schema.names():
        questions = schema.load(name).prepare.questions
        if isinstance(questions, prepare_module.BenchmarkQuestions):
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
        benchmarks.load_benchmarks(tmp_path)


def test_a_row_that_is_no_mapping_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"benchmarks\.yaml: mine: "):
        rows_of(tmp_path, mine="gsm8k")


def test_only_the_sets_that_a_recipe_names_decide_anything(tmp_path):
    settings = {**SETS, "train": ["gsm8k/train", "aime24/test"]}
    write(tmp_path, changed(prepare__questions=settings, prepare__expert=CALCULATOR))
    recipe = schema.load("mine", tmp_path)
    assert list(schema.named_sets(recipe, tmp_path)) == ["intake", "gsm8k", "aime24"]
    assert list(schema.named_sets(schema.load("tiny"))) == ["intake"]


def test_a_recipe_that_names_a_set_without_a_row_is_refused_before_any_work(tmp_path):
    settings = {**SETS, "test": ["nowhere/test"]}
    write(tmp_path, changed(prepare__questions=settings, prepare__expert=CALCULATOR))
    with pytest.raises(ValueError) as caught:
        schema.load("mine", tmp_path)
    for words in ("nowhere/test", "params/benchmarks.yaml", "'gsm8k'", "add a row"):
        assert words in str(caught.value)


# ---------------------------------------------------------------- the table of algorithms

ALGORITHM = {
    "branching": "none",
    "marks": "none",
    "estimator": {"kind": "group_relative", "std": True},
    "ratio": "token",
    "clip": {"low": 0.1, "high": 0.3},
    "averaging": "token_mean",
}
GAE = {"kind": "gae", "gamma": 1.0, "lambda": 0.9}
CRITIC = {"backbone": "own", "value_clip": 0.5, "coefficient": 0.5}


def algorithms_of(folder, **rows):
    (folder / "algorithms.yaml").write_text(yaml.dump(rows))
    return algorithms.load_algorithms(folder)


IMPOSSIBLE = [
    # what one choice asks of another
    ({"critic": CRITIC}, ["critic is given", "group_relative uses none", "set critic to null"]),
    ({"estimator": GAE}, ["the estimator gae needs the section critic"]),
    ({"branching": "marks"}, ["branching at marks needs marks", "other than none"]),
    ({"branching": "entropy"}, ["judged after tool results", "marks is none", "to tool_call"]),
    ({"branching": "entropy", "marks": "step"}, ["marks is step", "set it to tool_call"]),
    ({"ratio": "none"}, ["ratio is none and clip is given", "nothing to clip"]),
    ({"clip": None}, ["ratio is token and clip is null", "needs its clip range"]),
    ({"ratio": "segment"}, ["a ratio of segments needs marks", "or the ratio sequence"]),
    ({"averaging": "unit_mean"}, ["units of the ratio, which is token", "average by token_mean"]),
    (
        {"averaging": "unit_mean", "ratio": "none", "clip": None},
        ["units of the ratio, which is none"],
    ),
    (
        {"estimator": {"kind": "two_level", "omega": 1, "gamma": 1}},
        ["two_level credits environment steps, and marks is none", "set it to step"],
    ),
    (
        {"estimator": {"kind": "grouped_gae", "gamma": 1, "lambda": 1}, "marks": "tool_call"},
        ["grouped_gae credits environment steps, and marks is tool_call"],
    ),
    # a choice that is none
    ({"colour": "blue"}, ["unknown key 'colour'", "remove it"]),
    ({"ratio": REMOVED}, ["missing key 'ratio'", "add it"]),
    ({"clip": REMOVED}, ["missing key 'clip'"]),
    ({"branching": "magic"}, ["'branching' = 'magic'", "'none', 'marks' or 'entropy'"]),
    ({"marks": "magic"}, ["'marks.kind' = 'magic'", "'tool_call'", "'step'"]),
    ({"estimator": "magic"}, ["'magic'", "'kind'", "'group_relative'", "'prefix_calibrated'"]),
    ({"ratio": "magic"}, ["'ratio' = 'magic'", "'segment' or 'sequence'"]),
    ({"averaging": "magic"}, ["'averaging' = 'magic'", "'unit_mean' or 'constant_length'"]),
    ({"group_filter": "magic"}, ["'group_filter' = 'magic'", "'none' or 'spread'"]),
    # settings of a choice
    ({"marks": "entropy"}, ["entropy marks with neither", "either quantile or threshold"]),
    (
        {"marks": {"kind": "entropy", "quantile": 0.9, "threshold": 0.5}},
        ["entropy marks with quantile and threshold"],
    ),
    ({"marks": {"kind": "step", "threshold": 0.5}}, ["step marks with threshold", "none of them"]),
    ({"marks": {"kind": "entropy", "quantile": 1}}, ["'marks.quantile' = 1", "less than 1"]),
    ({"marks": {"kind": "entropy", "threshold": 2}}, ["'marks.threshold' = 2"]),
    ({"estimator": {"kind": "batch_whitened"}}, ["missing key 'estimator.baseline'"]),
    ({"estimator": {"kind": "gae", "gamma": 1}}, ["missing key 'estimator.lambda'"]),
    ({"estimator": {**GAE, "gamma": 1.5}, "critic": CRITIC}, ["'estimator.gamma' = 1.5"]),
    ({"estimator": {"kind": "return", "std": True}}, ["unknown key 'estimator.std'"]),
    (
        {"estimator": {"kind": "prefix_calibrated", "key": "text"}},
        ["'estimator.key' = 'text'", "'lineage' or 'token_ids'"],
    ),
    ({"clip": {"low": 0.2}}, ["missing key 'clip.high'"]),
    ({"clip": {"low": "wide", "high": 0.2}}, ["'clip.low' = 'wide'"]),
    ({"clip": {"low": -0.2, "high": 0.2}}, ["'clip.low' = -0.2", "greater than 0"]),
    ({"clip": {"low": 0.2, "high": 0.2, "dual": 1}}, ["'clip.dual' = 1", "greater than 1"]),
    (
        {"kl": {"place": "loss", "estimator": "k1", "coefficient": 0.1}},
        ["k1 in the loss has an on-policy gradient of mean zero", "k2 or k3"],
    ),
    (
        {"kl": {"place": "reward", "estimator": "k3", "coefficient": 0.1}},
        ["k3 in the reward: only k1 is defined there"],
    ),
    (
        {"kl": {"place": "loss", "estimator": "k3", "coefficient": 0}},
        ["'kl.coefficient' = 0", "greater than 0"],
    ),
    (
        {"kl": {"place": "loss", "estimator": "k3", "coefficient": 1, "refresh": 0}},
        ["'kl.refresh' = 0"],
    ),
    ({"overlong": {"buffer": 0, "factor": 1}}, ["'overlong.buffer' = 0"]),
    ({"overlong": {"buffer": 1.5, "factor": 1}}, ["'overlong.buffer' = 1.5"]),
    (
        {"estimator": GAE, "critic": {**CRITIC, "backbone": "borrowed"}},
        ["'critic.backbone' = 'borrowed'", "'own' or 'shared'"],
    ),
    ({"entropy_bonus": -1}, ["'entropy_bonus' = -1"]),
    ({"importance_cap": 0}, ["'importance_cap' = 0", "greater than 0"]),
]


@pytest.mark.parametrize(
    ("changes", "said"), IMPOSSIBLE, ids=[said[0][:60] for _, said in IMPOSSIBLE]
)
def test_a_row_that_asks_for_the_impossible_is_refused_with_file_row_and_reason(
    tmp_path, changes, said
):
    with pytest.raises(ValueError) as caught:
        algorithms_of(tmp_path, good=ALGORITHM, mine=edited(ALGORITHM, changes))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'algorithms.yaml'}, row mine: ")
    assert len(message.splitlines()) == 1
    assert [words for words in said if words not in message] == []


def test_all_that_a_row_asks_in_vain_is_said_at_once(tmp_path):
    with pytest.raises(ValueError) as caught:
        algorithms_of(tmp_path, mine={**ALGORITHM, "critic": CRITIC, "clip": None})
    assert "critic is given" in str(caught.value)
    assert "clip is null" in str(caught.value)


@pytest.mark.parametrize("row", [None, "grpo", [1]])
def test_a_row_of_algorithms_that_is_no_mapping_is_named(tmp_path, row):
    with pytest.raises(ValueError, match=r"algorithms\.yaml, row mine: "):
        algorithms_of(tmp_path, mine=row)


@pytest.mark.parametrize("text", ["", "- grpo", None])
def test_a_table_of_algorithms_that_is_missing_or_none_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "algorithms.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"algorithms\.yaml is missing or holds no rows"):
        algorithms.load_algorithms(tmp_path)


def test_a_choice_without_settings_may_be_written_as_its_kind(tmp_path):
    short = {**ALGORITHM, "estimator": "leave_one_out", "marks": "step"}
    long = {**ALGORITHM, "estimator": {"kind": "leave_one_out"}, "marks": {"kind": "step"}}
    rows = algorithms_of(tmp_path, short=short, long=long)
    assert rows["short"] == rows["long"]
    assert rows["short"].estimator == algorithms.LeaveOneOut(kind="leave_one_out")


def test_what_a_row_leaves_out_has_its_usual_value(tmp_path):
    row = algorithms_of(tmp_path, mine=ALGORITHM)["mine"]
    assert (row.group_filter, row.overlong, row.kl, row.critic) == ("none", None, None, None)
    assert (row.entropy_bonus, row.importance_cap) == (0.0, 2.0)
    other = {**ALGORITHM, "importance_cap": None, "estimator": {"kind": "prefix_calibrated"}}
    row = algorithms_of(tmp_path, mine=other)["mine"]
    assert row.importance_cap is None
    assert row.estimator == algorithms.PrefixCalibrated(kind="prefix_calibrated", key="lineage")


@pytest.mark.parametrize("name", schema.names())
@pytest.mark.parametrize("algorithm", algorithms.load_algorithms())
def test_every_recipe_has_room_for_every_algorithm(name, algorithm):
    recipe = schema.load(name)
    reinforce = recipe.reinforce.model_copy(update={"algorithm": algorithm})
    chosen = recipe.model_copy(update={"reinforce": reinforce})
    assert schema.algorithm_of(chosen) == algorithms.load_algorithms()[algorithm]


def test_an_algorithm_without_a_row_is_refused_with_those_that_there_are(tmp_path):
    write(tmp_path, changed(reinforce__algorithm="magic"))
    with pytest.raises(ValueError) as caught:
        schema.load("mine", tmp_path)
    assert f"'magic' is no row of {tmp_path / 'algorithms.yaml'}" in str(caught.value)
    for words in ("reinforce.algorithm", "'grpo'", "'arpo_hard'", "or add a row"):
        assert words in str(caught.value)


@pytest.mark.parametrize("algorithm", ["arpo", "arpo_hard", "gpg"])
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("initial", 8, "initial 8, leaves 8"), ("branch", 0, "branch 0")],
)
def test_beaming_without_room_is_refused(tmp_path, algorithm, key, value, said):
    changes = {"reinforce__algorithm": algorithm, f"reinforce__rollout__{key}": value}
    write(tmp_path, changed(**changes))
    with pytest.raises(ValueError) as caught:
        schema.load("mine", tmp_path)
    message = str(caught.value)
    for words in (f"reinforce.algorithm '{algorithm}' branches", said, "raise leaves"):
        assert words in message
    write(tmp_path, changed(**{**changes, "reinforce__algorithm": "grpo"}))
    assert schema.load("mine", tmp_path), "without branching nothing needs room"


# A user's own algorithm: choices that no shipped row has together.
OWN = """
mine:
  branching: marks
  marks: {kind: entropy, quantile: 0.8}
  estimator: {kind: prefix_calibrated, key: token_ids}
  ratio: segment
  clip: {low: 0.1, high: 0.3, dual: 3.0}
  averaging: unit_mean
  kl: {place: loss, estimator: k2, coefficient: 0.02, refresh: 5}
  entropy_bonus: 0.01
  importance_cap: null
"""


def test_a_row_of_the_users_own_loads_and_trains_without_any_code(tmp_path):
    shutil.copy(base.PARAMS / "algorithms.yaml", tmp_path)
    with (tmp_path / "algorithms.yaml").open("a") as table:
        table.write(OWN)
    write(tmp_path, changed(reinforce__algorithm="mine"))
    recipe = schema.load("mine", tmp_path)
    row = schema.algorithm_of(recipe, tmp_path)
    assert row.marks == algorithms.Marks(kind="entropy", quantile=0.8)
    algorithm = assemble(row, recipe.dialogue.response_tokens)
    episodes = [
        Episode(float(leaf), np.zeros(4), np.arange(4), np.zeros(4, np.int64), ("",))
        for leaf in range(3)
    ]
    assert [leaf.shape for leaf in algorithm.estimator([episodes])[0]] == [(4,)] * 3

    learning = resident.Learner(tmp_path / "policy", small_policy(), None)
    checkpoint.prepare_critic(learning, row.critic, recipe.machine)
    checkpoint.prepare_optimizer(learning, recipe.reinforce.update)
    trees = [credited(random_tree(seed), seed) for seed in range(2)]
    known = learner.node_logprobs(
        small_policy(seed=1), trees, 1.0, recipe.reinforce.update, recipe.machine
    )
    trees = [
        replace(tree, reference_logprobs=logp) for tree, logp in zip(trees, known, strict=True)
    ]
    before = [weight.detach().clone() for weight in learning.model.parameters()]
    metrics = learner.optimize(
        learning, trees, algorithm.loss, recipe.reinforce.update, 1.0, recipe.machine, 0
    )
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["kl_reference"] > 0
    moved = zip(before, learning.model.parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in moved)


# ---------------------------------------------------------------- champion, verdict and intake

CHAMPION = {"version": 3, "commit": "a" * 40, "digest": "b" * 32 + ".dir"}


def test_a_recipe_names_its_champion_by_version_commit_and_digest():
    recipe = schema.check(changed(champion=CHAMPION, start="champion"), Path("mine.yaml"))
    assert recipe.champion.model_dump() == CHAMPION
    assert (
        schema.check(
            changed(champion={**CHAMPION, "commit": None}), Path("mine.yaml")
        ).champion.version
        == 3
    )


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("champion", {**CHAMPION, "version": 0}, "champion.version"),
        ("champion", {**CHAMPION, "commit": "main"}, "champion.commit"),
        ("champion", {**CHAMPION, "digest": "b" * 32}, "champion.digest"),
        ("champion", {"version": 3}, "missing key 'champion.commit'"),
        ("start", "best", "'start' = 'best'"),
        ("verdict__confidence", 1.0, "verdict.confidence"),
        ("verdict__margin", 2.0, "verdict.margin"),
        (
            "prepare__intake",
            {"folder": "intake", "set": "intake"},
            "outside the folder data/sources/",
        ),
        ("prepare__intake", {"folder": "data/sources/intake"}, "missing key 'prepare.intake.set'"),
    ],
)
def test_what_cannot_be_promoted_by_is_refused_by_name(path, value, said):
    with pytest.raises(ValueError) as caught:
        schema.check(changed(**{path: value}), Path("mine.yaml"))
    assert said in str(caught.value)


def test_an_intake_whose_set_has_no_row_is_refused_before_any_work(tmp_path):
    intake = {"folder": "data/sources/intake/mine", "set": "nowhere"}
    write(tmp_path, changed(prepare__intake=intake))
    with pytest.raises(ValueError, match=r"benchmarks\.yaml has no row 'nowhere'"):
        schema.load("mine", tmp_path)


def test_a_recipe_of_another_engine_differs_in_nothing_else():
    def rest(name):
        recipe = schema.load(name)
        return recipe.engine.kind, recipe.model_copy(update={"engine": None})

    (kind, tiny), (other, variant) = rest("tiny"), rest("tiny-vllm")
    assert (kind, other) == ("transformers", "vllm")
    assert tiny == variant


def test_sampling_ahead_needs_a_cap_on_the_weight_of_what_an_older_policy_sampled(tmp_path):
    rows = yaml.safe_load((base.PARAMS / "algorithms.yaml").read_text())
    rows["grpo"]["importance_cap"] = None
    (tmp_path / "algorithms.yaml").write_text(yaml.safe_dump(rows))
    recipe = schema.load("smoke")
    reinforce = recipe.reinforce.model_copy(update={"algorithm": "grpo", "ahead": 1})
    chosen = recipe.model_copy(update={"reinforce": reinforce})
    assert schema.algorithm_of(chosen).importance_cap
    with pytest.raises(ValueError, match=r"ahead is 1.*'grpo' has no importance_cap.*ahead to 0"):
        schema.algorithm_of(chosen, tmp_path)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"kind": "transformers", "server": "http://gpu:8000"}, "kind to vllm"),
        ({"kind": "vllm", "server": "gpu:8000"}, "engine.server"),
        ({"kind": "vllm", "memory": 0}, "engine.memory"),
        ({"kind": "vllm", "lanes": 0}, "engine.lanes"),
        ({"kind": "sglang"}, "engine.kind"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(tmp_path, engine, said):
    values = yaml.safe_load((base.PARAMS / "smoke.yaml").read_text())
    values["engine"] |= engine
    with pytest.raises(ValueError, match=said):
        schema.check(values, tmp_path / "mine.yaml")
