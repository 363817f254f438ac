"""Recipes: what loads, and what is refused with file, key, value and remedy."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from params import recipe_files
from params.schema import recipe as schema
from params.schema.addresses import SERVERS
from params.schema.algorithms import load_algorithms
from params.schema.base import PARAMS
from params.schema.benchmarks import load_benchmarks
from params.schema.defaults import defaults
from params.schema.prepare import BenchmarkQuestions
from tasks import recipes
from tasks.questions.computation import ComputationExpert
from tasks.rewards import reward_parts
from tests.params.edits import REMOVED, edited

FILES = {name: recipe_files.read(name) for name in recipe_files.names()}
TINY = FILES["tiny"]
PYTHON = TINY["tools"]
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
    "check_calls": ["python"],
}
SEARCH = {
    "corpus": None,
    "results": 2,
    "snippet_words": 20,
    "query_characters": 200,
    "k1": 1.2,
    "b": 0.75,
}
WEB = {
    "key_variable": None,
    "results": 1,
    "snippet_characters": 9,
    "query_characters": 9,
    "seconds": 1,
    "retries": 0,
    "concurrency": 1,
    "budget": None,
}
DOCUMENTS = {**SEARCH, "corpus": "data/sources/own/documents.jsonl"}
GROWING = {"prompt": "growing", "history": 2, "prompt_tokens": None}  # may be left out
RATES = ("wrong_operator", "wrong_digit", "wrong_answer", "missing_call")
CHAMPION = {"version": 3, "commit": "a" * 40, "digest": "b" * 32 + ".dir"}


def check(**changes):
    """Check the tiny recipe with other values; ``section__key=value``."""
    return recipes.check(edited(TINY, changes), "params/mine.yaml")


def fault(**changes):
    """Return the lines of the error that the tiny recipe gives with other values."""
    with pytest.raises(ValueError) as caught:
        check(**changes)
    lines = str(caught.value).splitlines()
    assert all(line.startswith("params/mine.yaml: ") for line in lines)
    return lines


def write(folder, values, name="mine"):
    """Write a recipe to ``folder``, with the tables of params/; return its name."""
    for table in schema.TABLES:
        if not (folder / f"{table}.yaml").exists():
            shutil.copy(PARAMS / f"{table}.yaml", folder)
    (folder / f"{name}.yaml").write_text(values if isinstance(values, str) else yaml.dump(values))
    return name


def refused(folder, values):
    """Return the message with which a recipe's file is refused."""
    with pytest.raises(ValueError) as caught:
        recipes.load(write(folder, values), folder)
    assert type(caught.value) is ValueError
    assert str(folder / "mine.yaml") in str(caught.value).splitlines()[0]
    return str(caught.value)


def keys(values, prefix=""):
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{name}.")


@pytest.fixture(scope="module")
def loaded():
    """All recipes of the project by name."""
    return {name: recipes.load(name) for name in FILES}


# ---------------------------------------------------------------- recipes of the project


def test_tables_are_no_recipes():
    assert {"tiny", "tiny-search", "smoke", "gsm8k", "gsm8k-smoke"} <= set(FILES)
    assert set(schema.TABLES).isdisjoint(FILES)


def test_recipes_keep_the_values_of_their_files(loaded):
    for name, recipe in loaded.items():
        values = edited(FILES[name], {})
        assert recipe.expect == values.pop("expect", None)  # is in no key either
        values["environment"] = values["environment"] or {}
        values["program"] = values.get("program") or {}
        values["dialogue"] = {**GROWING, **values["dialogue"]}
        values["reinforce"] = {"curriculum": None, **values["reinforce"]}
        values["reinforce"]["update"] = {"stop_at_kl": None, **values["reinforce"]["update"]}
        if values["prepare"]["policy"]["kind"] == "tiny":
            values["prepare"]["policy"].setdefault("rotary_base", 100.0)
        else:
            values["prepare"]["policy"].setdefault("gguf", None)
            values["prepare"]["policy"].pop("origin", None)  # is in no key
        expert = values["prepare"]["expert"]
        if expert and expert["kind"] == "solver":
            expert.setdefault("corrections", None)
        for key in ("memory", "servers", "lanes"):  # they decide nothing, and are in no key
            chosen = getattr(recipe.engine, key)
            written = values["engine"].pop(key, defaults().get(f"engine.{key}"))
            assert chosen == (tuple(written) if key == "servers" else written)
        says = recipe.model_dump(mode="json")
        # settings of an entry may be left out
        for section in ("tools", "dialect", "environment", "program"):
            for entry, settings in values[section].items():
                values[section][entry] = says[section][entry] | settings
        assert says == values


def test_servers_are_in_the_key_and_their_addresses_are_not(loaded, monkeypatch):
    """Servers of transformers sample in other batches, those of vLLM what vLLM samples here."""
    monkeypatch.delenv(SERVERS, raising=False)
    here = {name: loaded[name].engine.model_dump() for name in ("tiny", "tiny-vllm")}
    there = set()
    for addresses in ("http://gpu-1:8000", "http://gpu-2:8000,http://gpu-3:8000"):
        monkeypatch.setenv(SERVERS, addresses)
        there.add(loaded["tiny"].engine.model_dump_json())
        assert loaded["tiny"].engine.model_dump() != here["tiny"]
        assert loaded["tiny-vllm"].engine.model_dump() == here["tiny-vllm"]
    assert len(there) == 1


@pytest.mark.parametrize(("small", "large"), [("smoke", "tiny"), ("gsm8k-smoke", "smoke")])
def test_trial_recipe_has_the_same_keys(small, large):
    def rest(name):
        values = FILES[name]
        if small == "gsm8k-smoke":  # other questions, and another expert
            changes = {"prepare__questions": None, "prepare__expert": None}
            values = edited(values, changes)
        return [key for key in keys(values) if key != "expect"]

    assert rest(small) == rest(large)


def test_recipe_is_frozen(loaded):
    with pytest.raises(ValidationError, match="frozen"):
        loaded["smoke"].seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        loaded["smoke"].reinforce.rollout.leaves = 1


def test_vllm_variant_differs_in_the_engine_only(loaded):
    def rest(name):
        return loaded[name].engine.kind, loaded[name].model_copy(update={"engine": None})

    (kind, tiny), (other, variant) = rest("tiny"), rest("tiny-vllm")
    assert (kind, other) == ("transformers", "vllm")
    assert tiny == variant


def test_every_recipe_has_room_for_every_algorithm(loaded, monkeypatch):
    rows = load_algorithms()
    monkeypatch.setattr(schema, "load_algorithms", lambda folder: rows)  # read once
    once = {"epochs": 1, "mini_batches": 1}
    for recipe in loaded.values():
        for name, row in rows.items():
            steps = once if row.ratio == "none" else {}
            update = recipe.reinforce.update.model_copy(update=steps)
            chosen = with_reinforce(recipe, algorithm=name, update=update)
            parts = {part.name for part in recipe.reinforce.reward}
            refused = {
                "stands in for it: choose a row": "model" in parts and row.group_filter != "none",
                "the recipe names none: write the section teacher": row.teacher is not None,
                "divides by the mean reward": row.estimator.kind == "mean_relative"
                and reward_parts.reward_range(recipe.reinforce.reward)[0] < 0,
            }
            if reasons := [reason for reason, applies in refused.items() if applies]:
                with pytest.raises(ValueError, match=reasons[0]):
                    schema.algorithm_of(chosen)
            else:
                assert schema.algorithm_of(chosen) == row


def with_reinforce(recipe, **changes):
    reinforce = recipe.reinforce.model_copy(update=changes)
    return recipe.model_copy(update={"reinforce": reinforce})


# ---------------------------------------------------------------- files


def test_recipe_cannot_be_called_sources(tmp_path):
    with pytest.raises(ValueError, match=r"'sources'.*data/sources/.*rename"):
        recipes.load(write(tmp_path, TINY, name="sources"), tmp_path)


def test_unknown_recipe_names_the_others(tmp_path):
    write(tmp_path, TINY)
    with pytest.raises(ValueError) as caught:
        recipes.load("other", tmp_path)
    for part in ("no recipe 'other'", str(tmp_path / "other.yaml"), "['mine']"):
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["seed: [1, 2", "a: b: c", "\tseed: 1"])
def test_invalid_yaml_is_named_with_its_line(tmp_path, text):
    message = refused(tmp_path, text)
    assert "is not valid YAML" in message
    assert "line 1" in message


@pytest.mark.parametrize("text", ["", "[1, 2]", "text"])
def test_recipe_must_be_a_mapping(tmp_path, text):
    refused(tmp_path, text)


# ---------------------------------------------------------------- faults

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
    ({"prepare__overlap_words": 0}, ["'prepare.overlap_words' = 0", "greater than 0"]),
    ({"prepare__expert": 5}, ["'prepare.expert' = 5"]),
    ({"dialect": {}}, ["dialect names []", "name exactly one"]),
    ({"dialogue__prompt": "fresh", "dialogue__prompt_tokens": 9}, ["fresh", "set it to growing"]),
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
    ({"reinforce__rollout__rows": 1}, ["rows 1 cannot hold", "raise rows"]),
    ({"prepare__expert__traces": 10**6}, ["expert.traces 1000000 exceeds", "lower expert.traces"]),
    (
        {"prepare__expert": {"kind": "computation", "traces": 9, **dict.fromkeys(RATES, 0.375)}},
        ["'prepare.expert': the error rates add up to 1.5", "lower them"],
    ),
    (
        {
            "prepare__questions__largest_arithmetic_operand": 499,
            "prepare__questions__largest_test_operand": 499,
        },
        [
            "largest_test_operand 499 must exceed",
            "largest_arithmetic_operand 499",
            "lower the latter",
        ],
    ),
    (
        {"cold_start__batch": 32, "cold_start__micro_batch": 5},
        ["'cold_start': batch 32 is not a multiple of micro_batch 5", "change one"],
    ),
    # a source of questions and an expert
    (
        {"prepare__expert": READER, "tools": {**PYTHON, "search": DOCUMENTS}},
        ["source is computation and expert.kind is encyclopedia", "expert.kind to computation"],
    ),
    (
        {"prepare__questions": {**ENCYCLOPEDIA, "train": 4000}},
        ["source is encyclopedia and expert.kind is computation", "kind to encyclopedia"],
    ),
    (
        {"prepare__questions": SETS},
        ["source is benchmarks and expert.kind is computation", "to calculator", "or written"],
    ),
    ({"prepare__expert": CALCULATOR}, ["expert.kind is calculator", "expert.kind to computation"]),
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
    ({"prepare__expert__kind": "oracle"}, ["kind' = 'oracle'", "calculator", "written"]),
    (
        {
            "prepare__expert": {**WRITTEN, "check_calls": ["search", "python"]},
            "prepare__questions": SETS,
        },
        ["prepare.expert.check_calls names search, and tools has ['python']", "name only tools"],
    ),
    ({"prepare__faulty": "skip"}, ["'prepare.faulty' = 'skip'", "'stop' or 'drop'"]),
    (
        {"prepare__expert": edited(WRITTEN, {"response": REMOVED}), "prepare__questions": SETS},
        ["missing key 'prepare.expert.response'"],
    ),
    # tools
    ({"tools": REMOVED}, ["missing key 'tools'"]),
    ({"tools__abacus": {"beads": 10}}, ["'tools.abacus'", "choose one of", "python", "own/"]),
    ({"tools": {"search": DOCUMENTS}}, ["['search']", "computation", "calls python: add tools.py"]),
    (
        {"tools": {"search": DOCUMENTS}, "prepare__questions": SETS, "prepare__expert": CALCULATOR},
        ["['search']", "calculator", "calls python: add tools.python"],
    ),
    (
        {"prepare__questions": ENCYCLOPEDIA, "prepare__expert": READER},
        ["['python']", "encyclopedia", "calls search: add tools.search"],
    ),
    (
        {
            "tools": {},
            "prepare__questions": SETS,
            "prepare__expert": {**WRITTEN, "check_calls": []},
        },
        ["tools is empty: give at least one of", "python", "search", "or an environment"],
    ),
    (
        {"tools": {**PYTHON, "search": SEARCH}},
        ["tools.search.corpus is None", "source is computation", "a file of documents below data/"],
    ),
    (
        {"tools": {**PYTHON, "search": DOCUMENTS}}
        | {"prepare__questions": ENCYCLOPEDIA, "prepare__expert": READER},
        ["corpus is data/sources/own/documents.jsonl", "an encyclopedia brings its corpus (null)"],
    ),
    ({"tools__python__cpu_seconds": 0}, ["'tools.python.cpu_seconds' = 0", "greater than 0"]),
    ({"tools__python__sandbox": "box"}, ["'tools.python.sandbox' = 'box'", "'auto'"]),
    ({"tools__python__memory": 1}, ["unknown key 'tools.python.memory'"]),
    ({"tools__python__file_mib": REMOVED}, ["missing key 'tools.python.file_mib'"]),
    (
        {"prepare__questions": {**ENCYCLOPEDIA, "kinds": ["fact", "riddle"]}}
        | {"prepare__expert": READER},
        ["'prepare.questions.kinds.1' = 'riddle'", "'fact', 'hop', 'age' or 'gap'"],
    ),
    (
        {"prepare__questions": {**ENCYCLOPEDIA, "kinds": []}, "prepare__expert": READER},
        ["'prepare.questions.kinds' = []", "at least 1 item"],
    ),
    ({"tools__search": {**SEARCH, "k1": 0}}, ["'tools.search.k1' = 0", "greater than 0"]),
    (
        {"tools__search": {**SEARCH, "b": 1.1}},
        ["'tools.search.b' = 1.1", "less than or equal to 1"],
    ),
    ({"tools__search": {**SEARCH, "results": 0}}, ["'tools.search.results' = 0", "greater than 0"]),
    ({"tools__search": {**SEARCH, "engine": "a"}}, ["unknown key 'tools.search.engine'"]),
    ({"tools__search": edited(SEARCH, {"b": REMOVED})}, ["missing key 'tools.search.b'"]),
    # engine
    (
        {"engine__kind": "vllm", "engine__servers": ["gpu:8000"]},
        ["'engine': servers: ", "'gpu:8000'"],
    ),
    (
        {"engine__servers": ["http://gpu:8000", "http://GPU:8000/"]},
        ["'engine': servers: names the server http://gpu:8000 twice"],
    ),
    ({"engine__memory": 0}, ["'engine.memory' = 0"]),
    ({"engine__lanes": 0}, ["'engine.lanes' = 0"]),
    ({"engine__kind": "sglang"}, ["'engine.kind' = 'sglang'", "'transformers' or 'vllm'"]),
    # champion, verdict and intake
    ({"champion": {**CHAMPION, "version": 0}}, ["'champion.version' = 0"]),
    ({"champion": {**CHAMPION, "commit": "main"}}, ["'champion.commit' = 'main'"]),
    ({"champion": {**CHAMPION, "digest": "b" * 32}}, ["'champion.digest' = 'bbb"]),
    ({"champion": edited(CHAMPION, {"commit": REMOVED})}, ["missing key 'champion.commit'"]),
    ({"start": "best"}, ["'start' = 'best'", "'scratch' or 'champion'"]),
    ({"verdict__confidence": 1.0}, ["'verdict.confidence' = 1.0", "less than 1"]),
    ({"verdict__margin": 2.0}, ["'verdict.margin' = 2.0"]),
    (
        {"prepare__intake": {"folder": "intake", "set": "intake"}},
        ["'prepare.intake': intake is outside the folder data/sources/", "move it there"],
    ),
    (
        {"prepare__intake": {"folder": "data/sources/intake"}},
        ["missing key 'prepare.intake.set'"],
    ),
]


@pytest.mark.parametrize(("changes", "parts"), FAULTS, ids=[parts[0] for _, parts in FAULTS])
def test_fault_names_key_value_and_remedy(changes, parts):
    (line,) = fault(**changes)
    assert [part for part in parts if part not in line] == []


def test_all_faults_at_once_with_the_file(tmp_path):
    tools = {"abacus": {}, "python": {**PYTHON["python"], "cpu_seconds": 0, "beads": 1}}
    changes = {"seed": -1, "colour": "blue", "machine__threads": 0, "tools": tools}
    lines = refused(tmp_path, edited(TINY, changes)).splitlines()
    assert all(line.startswith(f"{tmp_path / 'mine.yaml'}: ") for line in lines)
    named = ["seed", "colour", "machine.threads"]
    named += ["tools.abacus", "tools.python.cpu_seconds", "tools.python.beads"]
    assert sorted(line.split("'")[1] for line in lines) == sorted(named)


# ---------------------------------------------------------------- older forms


def older(*tools, **sections):
    """Return a recipe with tools as they were before they had the section ``tools``."""
    return {**edited(TINY, {"tools": REMOVED, "dialogue__tools": list(tools)}), **sections}


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        (
            older("python", python=PYTHON["python"], search=None),
            ["dialogue", "move python", "search"],
        ),
        (
            older("search", python=PYTHON["python"], search=SEARCH),
            ["dialogue", "python", "move search"],
        ),
        (
            older("python", "search", **PYTHON, search=SEARCH),
            ["dialogue", "move python", "move search"],
        ),
        (edited(TINY, {"search": None}), ["search"]),
        (edited(TINY, {"reinforce__reward": {"broken_format": -2, "wrong": 0}}), ["reward"]),
        (edited(TINY, {"dialogue__tools": None}), ["dialogue"]),
        (edited(TINY, {"dialogue__tools": 5}), ["dialogue"]),
    ],
)
def test_older_form_is_refused_with_each_change(tmp_path, values, changes):
    first, *lines = refused(tmp_path, values).splitlines()
    assert "older form" in first
    expected = {
        "dialogue": "remove 'dialogue.tools'",
        "python": "remove the section 'python'",
        "reward": "write 'reinforce.reward' as a list: reward: [answer: {weight: 1.0, wrong: 0},",
        "search": "remove the section 'search'",
        "move python": "move the section 'python' into 'tools'",
        "move search": "move the section 'search' into 'tools'",
    }
    assert len(lines) == len(changes)
    for line, change in zip(lines, changes, strict=True):
        assert line.startswith(f"{tmp_path / 'mine.yaml'}: {expected[change]}")


def test_recipe_with_the_changes_loads(tmp_path):
    values = older("python", "search", **PYTHON, search=DOCUMENTS)
    assert len(schema.older_form(values)) == 3
    moved = {"tools": {"python": values.pop("python"), "search": values.pop("search")}}
    del values["dialogue"]["tools"]
    assert schema.older_form({**values, **moved}) == []
    assert list(recipes.load(write(tmp_path, {**values, **moved}), tmp_path).tools) == [
        "python",
        "search",
    ]


# ---------------------------------------------------------------- tools


ABACUS = """
from contextlib import contextmanager

from params.schema.base import Frozen, Positive
from tasks.tools.contract import OpenTool, ToolKind


class Beads(Frozen):
    beads: Positive


@contextmanager
def opened(chosen, opening):
    yield OpenTool([], lambda calls: [])


def faults(chosen, source):
    return [f"no {source}"] if chosen.beads == 13 else []


ABACUS = ToolKind(Beads, opened, faults)
"""


@pytest.fixture
def abacus(tmp_path, monkeypatch):
    """The name of a user's tool, in a working folder of its own."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/abacus.py").write_text(ABACUS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own/abacus.py:ABACUS"
    for name in [name for name in sys.modules if name.split(".")[0] == "own"]:
        del sys.modules[name]


def test_added_tool_gets_its_section(abacus):
    def with_beads(beads):
        return check(tools={**PYTHON, abacus: {"beads": beads}})

    recipe = with_beads(10)
    assert recipe.tools[abacus].beads == 10
    agent = recipes.agent_of(recipe)
    assert agent.model_dump()["tools"][abacus] == {"beads": 10}
    file = Path("own/abacus.py")
    file.write_text(file.read_text() + "MORE = 1\n")
    assert agent.sources[abacus] != recipes.agent_of(recipe).sources[abacus]
    with pytest.raises(ValueError, match=r"mine.yaml: 'tools.own.*beads' = 0: .*greater than 0"):
        with_beads(0)
    with pytest.raises(ValueError, match="no computation"):
        with_beads(13)


def test_added_tool_leaves_other_recipes_as_they_are(abacus):
    before = recipes.agent_of(check())
    check(tools={**PYTHON, abacus: {"beads": 10}})
    assert recipes.agent_of(check()) == before


def test_corpus_of_each_source():
    reading = {"prepare__questions": ENCYCLOPEDIA, "prepare__expert": READER}
    recipe = check(**reading, tools={**PYTHON, "search": SEARCH})
    assert recipe.tools["search"].corpus is None
    recipe = check(tools={**PYTHON, "search": DOCUMENTS})
    assert recipe.tools["search"].corpus == Path("data/sources/own/documents.jsonl")


# ---------------------------------------------------------------- prepare


@pytest.mark.parametrize(
    ("questions", "expert", "tools"),
    [
        (TINY["prepare"]["questions"], TINY["prepare"]["expert"], PYTHON),
        (ENCYCLOPEDIA, READER, {**PYTHON, "search": SEARCH}),
    ],
    ids=["computation", "encyclopedia"],
)
def test_generated_questions_bound_the_traces(questions, expert, tools):
    changes = {"prepare__questions": questions, "tools": tools}
    rows = check(**changes, prepare__expert=expert).prepare.questions.rows()
    assert rows == {split: questions[split] for split in ("train", "validation", "test")}
    (line,) = fault(**changes, prepare__expert={**expert, "traces": rows["train"] + 1})
    assert f"traces {rows['train'] + 1} exceeds" in line


@pytest.mark.parametrize("expert", [CALCULATOR, WRITTEN], ids=["calculator", "written"])
def test_sets_do_not_bound_the_traces(expert):
    prepare = check(prepare__questions=SETS, prepare__expert=expert).prepare
    assert prepare.questions.rows() is None
    assert prepare.expert.rates() == {}


@pytest.mark.parametrize("reference", ["gsm8k", "gsm8k/", "/test", "a/b/c", "a b/test", "g/te st"])
def test_reference_is_a_set_and_a_split(reference):
    questions = {**SETS, "train": ["gsm8k/train", reference]}
    (line,) = fault(prepare__questions=questions, prepare__expert=CALCULATOR)
    assert f"'prepare.questions.train.1' = {reference!r}" in line


@pytest.mark.parametrize(
    "path", ["train.jsonl", "/data/sources/a.jsonl", "data/sources/../a.jsonl", ".", "data/mine/a"]
)
def test_file_outside_data_sources_is_refused(path):
    written = {"prepare__questions": SETS, "prepare__expert": {**WRITTEN, "file": path}}
    searched = {"tools__search": {**SEARCH, "corpus": path}}
    for changes, key in ((written, "prepare.expert"), (searched, "tools.search")):
        (line,) = fault(**changes)
        assert f"'{key}': {path} is outside the folder data/sources/" in line
        assert "move it there" in line


def test_pretrained_policy_has_its_own_keys():
    policy = {"kind": "pretrained", "name": "Qwen/Qwen2.5-3B-Instruct", "context": 8192}
    assert "missing key 'prepare.policy.revision'" in fault(prepare__policy=policy)[0]
    recipe = check(prepare__policy={**policy, "revision": None})
    assert recipe.prepare.policy.context == 8192


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_error_rates_sum_to_at_most_one(a, b, c, d):
    rates = dict(zip(RATES, (a, b, c, d), strict=True))
    if a + b + c + d <= 1:
        assert ComputationExpert(kind="computation", traces=1, **rates).rates() == rates
    else:
        with pytest.raises(ValidationError, match="lower them"):
            ComputationExpert(kind="computation", traces=1, **rates)


# ---------------------------------------------------------------- rows that a recipe names


def test_sets_that_recipes_name_have_rows(loaded):
    rows = load_benchmarks()
    assert {"gsm8k", "math500", "aime24", "hotpotqa", "bamboogle"} <= set(rows)
    for recipe in loaded.values():
        questions = recipe.prepare.questions
        if isinstance(questions, BenchmarkQuestions):
            references = (*questions.train, *questions.test)
            assert {reference.partition("/")[0] for reference in references} <= set(rows)


def test_named_sets_are_those_of_the_recipe(loaded):
    references = ["gsm8k/train", "aime24/test"]
    recipe = check(prepare__questions={**SETS, "train": references}, prepare__expert=CALCULATOR)
    assert list(schema.named_sets(recipe)) == ["intake", "gsm8k", "aime24"]
    assert list(schema.named_sets(loaded["tiny"])) == ["intake"]


@pytest.mark.parametrize(
    "changes",
    [
        {
            "prepare__questions": {**SETS, "test": ["nowhere/test"]},
            "prepare__expert": CALCULATOR,
        },
        {"prepare__intake": {"folder": "data/sources/intake/mine", "set": "nowhere"}},
    ],
    ids=["questions", "intake"],
)
def test_set_without_a_row_is_refused(tmp_path, changes):
    with pytest.raises(ValueError) as caught:
        recipes.load(write(tmp_path, edited(TINY, changes)), tmp_path)
    for part in ("benchmarks.yaml has no row 'nowhere'", "'gsm8k'", "add a row"):
        assert part in str(caught.value)


def test_algorithm_without_a_row_is_refused(tmp_path):
    with pytest.raises(ValueError) as caught:
        recipes.load(write(tmp_path, edited(TINY, {"reinforce__algorithm": "magic"})), tmp_path)
    table = tmp_path / "algorithms.yaml"
    for part in ("reinforce.algorithm", f"'magic' is no row of {table}", "'grpo'", "add a row"):
        assert part in str(caught.value)


@pytest.mark.parametrize("algorithm", ["arpo", "arpo_hard", "gpg", "tree_value"])
@pytest.mark.parametrize(
    ("key", "value", "part"),
    [("initial", 8, "initial 8, leaves 8"), ("branch", 0, "branch 0")],
)
def test_branching_needs_room(loaded, algorithm, key, value, part):
    budget = loaded["tiny"].reinforce.rollout.model_copy(update={key: value})
    recipe = with_reinforce(loaded["tiny"], algorithm=algorithm, rollout=budget)
    with pytest.raises(ValueError) as caught:
        schema.algorithm_of(recipe)
    for text in (f"reinforce.algorithm '{algorithm}' branches", part, "raise leaves"):
        assert text in str(caught.value)
    assert schema.algorithm_of(with_reinforce(recipe, algorithm="grpo"))


def test_branching_without_room_does_not_load(tmp_path):
    changes = {"reinforce__algorithm": "arpo", "reinforce__rollout__branch": 0}
    with pytest.raises(ValueError, match="'arpo' branches"):
        recipes.load(write(tmp_path, edited(TINY, changes)), tmp_path)


@pytest.mark.parametrize(
    ("update", "ahead", "said"),
    [
        ({"epochs": 2}, 0, r"'reinforce' has the ratio none.*2 optimizer steps.*set both to 1"),
        ({"mini_batches": 4}, 0, r"4 optimizer steps a batch"),
        ({}, 1, r"ahead is 1.*set ahead to 0"),
    ],
)
def test_a_row_without_a_ratio_takes_one_step_on_fresh_samples(loaded, update, ahead, said):
    chosen = loaded["smoke"].reinforce.update.model_copy(
        update={"epochs": 1, "mini_batches": 1} | update
    )
    recipe = with_reinforce(loaded["smoke"], algorithm="reinforce", update=chosen, ahead=ahead)
    with pytest.raises(ValueError, match=said):
        schema.algorithm_of(recipe)
    assert schema.algorithm_of(with_reinforce(recipe, algorithm="grpo"))


@pytest.mark.parametrize("ahead", [0, 1])
def test_policies_share_rollouts_only_where_several_sample_ahead(ahead):
    (line,) = fault(reinforce__turns_per_policy=2, reinforce__ahead=ahead)
    assert re.search(rf"turns_per_policy is 2 and ahead is {ahead}, .* set ahead to 2", line)


def test_a_group_filter_does_not_share_rollouts(loaded):
    recipe = with_reinforce(loaded["tiny"], algorithm="dapo", ahead=2, turns_per_policy=1)
    with pytest.raises(ValueError, match=r"group_filter .*turns_per_policy 1.*to null"):
        schema.algorithm_of(recipe)
    assert schema.algorithm_of(with_reinforce(recipe, turns_per_policy=None))


def test_rewards_that_are_not_negative_may_be_divided_by_their_mean(loaded):
    tiny = loaded["tiny"]
    answer = tiny.reinforce.reward[:1]
    assert schema.algorithm_of(with_reinforce(tiny, algorithm="maxrl", reward=answer))
    with pytest.raises(ValueError, match=r"below 0 \(format\.broken -1\.0\): set that to 0"):
        schema.algorithm_of(with_reinforce(tiny, algorithm="maxrl"))


def test_weights_are_of_parts_that_the_reward_has(loaded, monkeypatch):
    rows, parts = load_algorithms(), {"format": 2.0, "formt": 2.0}
    estimator = rows["gdpo"].estimator.model_copy(update={"weights": parts})
    rows["gdpo"] = rows["gdpo"].model_copy(update={"estimator": estimator})
    monkeypatch.setattr(schema, "load_algorithms", lambda folder: rows)
    with pytest.raises(ValueError, match=r"does not have \(formt\): name some of answer, format"):
        schema.algorithm_of(with_reinforce(loaded["tiny"], algorithm="gdpo"))


def test_what_is_left_over_is_known_and_has_estimates(loaded, monkeypatch):
    rows = {"mine": load_algorithms()["dapo"].model_copy(update={"surplus": "next"})}
    monkeypatch.setattr(schema, "load_algorithms", lambda folder: rows)
    assert schema.algorithm_of(with_reinforce(loaded["tiny"], algorithm="mine"))
    with pytest.raises(ValueError, match="set ahead to 0, or surplus to wasted"):
        schema.algorithm_of(with_reinforce(loaded["tiny"], algorithm="mine", ahead=2))
    learned, parts = loaded["tiny-reward-model"], loaded["tiny"].reinforce.reward
    with pytest.raises(ValueError, match="estimates of groups that are carried"):
        schema.algorithm_of(with_reinforce(learned, algorithm="mine", reward=parts))


def test_a_server_teaches_at_temperature_1(loaded):
    server = {"kind": "server", "url": "http://127.0.0.1:8000/v1", "name": "a"}
    taught = with_reinforce(check(teacher=server), algorithm="distil")
    assert schema.algorithm_of(taught).teacher
    cool = taught.reinforce.rollout.model_copy(update={"temperature": 0.7})
    with pytest.raises(
        ValueError, match=r"at temperature 1, and .*temperature is 0\.7: set it to 1"
    ):
        schema.algorithm_of(with_reinforce(taught, rollout=cool))
    with pytest.raises(ValueError, match="plain text: use https"):
        check(teacher={**server, "url": "http://far.org/v1", "key_variable": "KEY"})


def test_a_row_with_a_teacher_needs_one(loaded):
    named = {"kind": "run", "recipe": "tiny", "commit": "a" * 40, "digest": "b" * 32 + ".dir"}
    taught = check(teacher=named)
    assert schema.algorithm_of(with_reinforce(taught, algorithm="distil")).teacher
    assert schema.algorithm_of(with_reinforce(taught, algorithm="grpo")), "it is not asked"


def test_a_curriculum_needs_finished_groups():
    shared = {"reinforce__turns_per_policy": 1, "reinforce__ahead": 2}
    (line,) = fault(reinforce__curriculum={"rest": 1}, **shared)
    assert "turns_per_policy 1 leaves some unfinished" in line


def test_tools_that_are_not_repeatable_do_not_share_rollouts():
    shared = {"reinforce__turns_per_policy": 2, "reinforce__ahead": 2}
    assert check(**shared).reinforce.samplers == 2
    (line,) = fault(**shared, tools={"python": TINY["tools"]["python"], "http_search": WEB})
    assert re.search(r"tools\.http_search is not repeatable, .*turns_per_policy 2 .*to null", line)


# ---------------------------------------------------------------- other sections


def test_an_evaluation_has_paths_of_its_own_number_and_temperature(loaded):
    recipe = loaded["tiny"]
    single = recipe.evaluation_budget()
    assert (single.leaves, single.initial, single.branch) == (1, 1, 0)
    several = recipe.evaluation_budget(samples=5)
    assert several == single.model_copy(update={"leaves": 5, "initial": 5})
    assert single.temperature == recipe.evaluate.temperature != recipe.reinforce.rollout.temperature
    assert single.rows == recipe.reinforce.rollout.rows


def test_champion_keeps_its_values():
    recipe = check(champion=CHAMPION, start="champion")
    assert recipe.champion.model_dump() == CHAMPION
    assert check(champion={**CHAMPION, "commit": None}).champion.commit is None


def test_labels_suffice_where_no_other_answers_are_scored():
    learned = FILES["tiny-reward-model"]
    assert recipes.check(edited(learned, {"reward_model__scored": "all"}), "x").reward_model
    only = edited(learned, {"reward_model__scored": "labelled"})
    with pytest.raises(
        ValueError, match=r"questions 32 times .*labels 0\.1 is below 8.* raise one"
    ):
        recipes.check(only, "x")
    only = edited(only, {"reward_model__labels": 0.25})
    assert recipes.check(only, "x").reward_model.scored == "labelled"
    only["reinforce"]["reward"].append({"answer": {"weight": 1.0, "wrong": 0.0}})
    with pytest.raises(ValueError, match=r"has answer, which needs.*set scored to all"):
        recipes.check(only, "x")
    only["reinforce"] |= {"reward": [{"format": {"broken": -1.0}}], "algorithm": "dapo"}
    with pytest.raises(ValueError, match=r"group_filter spread.*scored is labelled"):
        schema.algorithm_of(recipes.check(only, "x"))


@pytest.mark.parametrize("text", ["one line\nand another", "\x1b[2J", "a" * 500])
def test_what_is_expected_is_one_printable_line(text):
    with pytest.raises(ValueError, match=r"'expect' .*printed as one line"):
        recipes.check({**FILES["smoke"], "expect": text}, "it")
