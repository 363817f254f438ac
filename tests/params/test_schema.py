import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from params import schema

TINY = yaml.safe_load((schema.PARAMS / "tiny.yaml").read_text())
FILES = {
    "source": "files",
    "train": "questions/train.jsonl",
    "validation": "questions/validation.jsonl",
    "test": "questions/own/test.jsonl",
    "question_field": "question",
    "answer_field": "answer",
    "traces": "questions/traces.jsonl",
    "response_field": "response",
}
RATES = ("wrong_operator", "wrong_digit", "wrong_answer", "missing_call")
REMOVED = object()


def changed(**changes):
    """The tiny recipe with other values; ``section__key=value``."""
    values = copy.deepcopy(TINY)
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


def test_both_recipes_load_and_have_the_same_keys():
    assert {"tiny", "smoke"} <= set(schema.names())
    assert "algorithms" not in schema.names()
    for name in schema.names():
        assert isinstance(schema.load(name), schema.Recipe)
    smoke = yaml.safe_load((schema.PARAMS / "smoke.yaml").read_text())
    assert list(keys(smoke)) == list(keys(TINY))


def test_a_recipe_keeps_the_values_of_its_file():
    assert schema.load("tiny").model_dump(mode="json") == TINY


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
    ({"dialogue__tools": ["abacus"]}, ["'dialogue.tools.0' = 'abacus'", "'python'"]),
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
    ({"prepare__expert": None}, ["questions.source is generated", "expert is null", "need"]),
    ({"prepare__questions": FILES}, ["source is files", "expert is given", "their own traces"]),
    ({"dialogue__tools": []}, ["tools is empty", "name at least one"]),
    ({"reinforce__rollout__rows": 1}, ["rows 1 cannot hold", "raise rows"]),
    ({"prepare__expert__traces": 10**6}, ["expert.traces 1000000 exceeds", "lower it"]),
    (
        {"prepare__expert": {"traces": 9, **dict.fromkeys(RATES, 0.375)}},
        ["add up to 1.5", "lower them"],
    ),
    (
        {
            "prepare__questions__largest_arithmetic_operand": 499,
            "prepare__questions__largest_test_operand": 499,
        },
        ["largest_test_operand 499 must exceed", "largest_arithmetic_operand 499"],
    ),
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


def test_questions_from_files_need_no_expert(tmp_path):
    recipe = schema.load(
        write(tmp_path, changed(prepare__questions=FILES, prepare__expert=None)), tmp_path
    )
    assert recipe.prepare.questions.files()[0] == Path("questions/train.jsonl")
    assert schema.load("tiny").prepare.questions.files() == ()


@pytest.mark.parametrize("path", ["train.jsonl", "/questions/a.jsonl", "questions/../a.jsonl"])
def test_a_file_outside_the_folder_that_dvc_knows_is_refused(tmp_path, path):
    files = changed(prepare__questions={**FILES, "train": path}, prepare__expert=None)
    said = fault_of(tmp_path, files)
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
        assert schema.Expert(traces=1, **rates).rates() == rates
    else:
        with pytest.raises(ValidationError, match="lower them"):
            schema.Expert(traces=1, **rates)


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
