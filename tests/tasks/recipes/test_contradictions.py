"""Contradictions: what sections say of each other is found before any work, with a remedy."""

import json
import re

import pytest

from params import recipe_files
from tasks import recipes
from tasks.recipes import contradictions
from tests.params.edits import edited

TINY, GSM8K, LAKE = (recipe_files.read(name) for name in ("tiny", "gsm8k", "tiny-lake"))
PYTHON = GSM8K["tools"]
SEARCH = {
    **{"corpus": "data/sources/own/documents.jsonl", "results": 1, "snippet_words": 9},
    **{"query_characters": 99, "k1": 1.2, "b": 0.75},
}
UNTAUGHT = {"cold_start": None, "prepare__expert": None}
NATIVE = {"dialect": {"native": {}}}
HUB = GSM8K["prepare"]["policy"]
OWN = '''
def look_up(item: str) -> str:
    """Look up the price of an item.

    item: its name
    """
    return "3"


def think(text: str) -> str:
    """Think about a text.

    text: what is thought about
    """
    return text


def python(code: str) -> str:
    """Run code.

    code: in Python
    """
    return code
'''


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """A checkout with a user's tools, and without files of questions and policies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "shelf.py").write_text(OWN)
    return tmp_path


def found(values, **changes):
    """Return what contradicts in a recipe with changes."""
    return contradictions.faults(recipes.check(edited(values, changes), "params/mine.yaml"))


@pytest.mark.parametrize("name", recipe_files.names())
def test_recipes_of_the_project_contradict_nothing(name, monkeypatch):
    monkeypatch.chdir(recipes.__file__.partition("/tasks/")[0])
    assert contradictions.faults(recipes.load(name)) == []


def test_prompt_that_shows_another_tool(own):
    """A copy of gsm8k with another tool, whose prompt still has the agent write Python."""
    foreign, untold = found(GSM8K, tools={"own/shelf.py:look_up": {}}, **UNTAUGHT)
    assert "'dialogue.system' shows the tags <python>" in foreign
    assert "called by <look_up>: correct the system message, or add the tool" in foreign
    assert "shows no <look_up>" in untold


@pytest.mark.parametrize(
    ("system", "foreign"),
    [
        ("Write <python>code</python>.", []),
        ("Write <search>words</search>.", ["search"]),
        ("Close it with </search>.", ["search"]),  # one tag, of a tool that there is elsewhere
        ("Write <tool_call>{}</tool_call>.", ["tool_call"]),
        ("Write <pyhton>code</pyhton>.", ["pyhton"]),
        ("<think>so</think> <answer>\\boxed{<number>}</answer> <result>3</result>", []),
        ("", []),
    ],
)
def test_tags_that_call_nothing(system, foreign):
    lines = found(TINY, dialogue__system=system)
    shown = [re.search(r"tags (.*), which", line)[1] for line in lines]
    assert shown == [", ".join(f"<{name}>" for name in foreign)] * bool(foreign)
    assert all("did you mean 'python'?" in line for line in lines if "pyhton" in line)


def test_native_calls_are_written_without_tags():
    tags = "Write <python>code</python>, and think in <think>...</think>."
    [line] = found(GSM8K, **NATIVE, dialogue__system=tags)
    assert "the tags <python>, and 'dialect' is native" in line
    assert found(GSM8K, **NATIVE, dialogue__system="Use the tool. End with \\boxed{}.") == []


@pytest.mark.parametrize(
    ("changes", "untold"),
    [
        ({"dialogue__system": ""}, "is empty"),
        ({"dialogue__system": "Compute with Python."}, "shows no <python>"),
        ({"tools": {**PYTHON, "own/shelf.py:look_up": {}}}, "shows no <look_up>"),
        ({"dialogue__system": "You have tools.\n{tools}"}, ""),
        ({}, ""),  # it shows how Python is called
        ({"dialogue__system": "", **NATIVE}, ""),  # the template says so
        ({"dialogue__system": "", "start": "champion"}, ""),  # which has learned it
    ],
)
def test_untaught_policy_is_told_how_to_call(changes, untold):
    lines = found(GSM8K, **{**UNTAUGHT, **changes})
    assert [untold in line and "write {tools} into" in line for line in lines] == [True] * bool(
        untold
    )


def test_taught_policy_need_not_be_told():
    assert found(GSM8K, dialogue__system="") == []
    assert found(TINY, dialogue__system="", **UNTAUGHT) == []  # it learns from nothing anyway


def test_acts_of_a_world_are_calls():
    assert found(LAKE, dialogue__system="Write <move>left</move>.") == []
    [line] = found(LAKE, dialogue__system="Write <act>left</act>.")
    assert "its tools are called by <move>" in line


def test_agent_that_may_not_call():
    [line] = found(TINY, dialogue__tool_calls=0)
    assert "'dialogue.tool_calls' = 0, and the agent has python" in line


def test_prompt_that_does_not_fit_is_counted_without_a_tokenizer():
    """Four bytes a token: 2,000 of a system message beside 6144 in 6144 + 400."""
    room = {"prepare__policy__context": 6144 + 400, "dialogue__response_tokens": 6144}
    [line] = found(GSM8K, **room, dialogue__system="<python> " + "word " * 400)
    assert "leave 400 tokens for a prompt" in line
    assert "some 502 (its 2,010 bytes, 4 a token)" in line
    assert f"raise prepare.policy.context to at least {6144 + 502}" in line
    assert found(GSM8K, **room, dialogue__system="<python> " + "word " * 300) == []


def test_longest_question_counts_where_its_file_is_here(own):
    folder = own / "data" / "sources" / "gsm8k"
    folder.mkdir(parents=True)
    rows = [{"question": "a" * size, "answer": "#### 1"} for size in (10, 4000, 20)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    room = {"prepare__policy__context": 6144 + 800}
    [line] = found(GSM8K, **room)
    assert "and the longest question that is here has some 1" in line
    (folder / "test.jsonl").write_text(json.dumps(rows[0]))
    assert found(GSM8K, **room) == []


def test_tokens_are_exact_where_the_tokenizer_is_here(own):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"word": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    (own / "policy").mkdir()
    tokenizer.save(str(own / "policy" / "tokenizer.json"))
    policy = {**HUB, "name": "policy", "revision": None, "context": 6144 + 400}
    changes = {"prepare__policy": policy, "dialogue__system": "word " * 401}
    [line] = found(GSM8K, **changes)
    assert "has 401: raise prepare.policy.context to at least 6545" in line
    assert found(GSM8K, **{**changes, "dialogue__system": "word " * 400}) == []


@pytest.mark.parametrize("revision", [None, "main", "aa8e725"])
def test_policy_of_the_hub_is_named_with_a_commit(revision):
    [line] = found(GSM8K, prepare__policy__revision=revision)
    assert f"'prepare.policy.revision' = {revision!r} is no commit" in line
    assert f"git ls-remote https://huggingface.co/{HUB['name']} HEAD" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prepare__policy__heads": 8, "prepare__policy__key_value_heads": 8}, "have 16 numbers"),
        ({"evaluate__temperature": 2.5}, "'evaluate.temperature' = 2.5"),
        ({"prepare__policy__heads": 4}, ""),
    ],
)
def test_what_vllm_does_not_sample(changes, words):
    engine = {**TINY["engine"], "kind": "vllm"}
    lines = found(TINY, engine=engine, **changes)
    assert [words in line and "to transformers" in line for line in lines] == [True] * bool(words)
    assert found(TINY, **changes) == []


def test_reward_of_a_world_that_is_not_there():
    [line] = found(TINY, reinforce__reward=[{"answer": {}}, {"steps": {}}])
    assert "'environment' is null, so that it is always 0" in line
    assert found(LAKE) == []


def test_corpus_that_is_not_here(own):
    documents = own / "data" / "sources" / "own"
    documents.mkdir(parents=True)
    (documents / "document.jsonl").touch()
    searching = edited(TINY, {"tools": {**TINY["tools"], "search": SEARCH}})
    [line] = contradictions.missing_files(recipes.check(searching, "mine"))
    assert "'tools.search.corpus' = 'data/sources/own/documents.jsonl'" in line
    assert "did you mean 'data/sources/own/document.jsonl'?" in line
    (documents / "documents.jsonl").touch()
    assert [*contradictions.missing_files(recipes.check(searching, "mine"))] == []


# ---------------------------------------------------------------- what load refuses


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({"own/shelf.py:think": {}}, "called think, and in the dialect tags <think>"),
        ({**TINY["tools"], "own/shelf.py:python": {}}, "several tools called python"),
        ({"own/shelf.py:look_upp": {}}, "did you mean 'look_up'?"),
        ({"own/shelv.py:look_up": {}}, "did you mean 'own/shelf.py'?"),
    ],
)
def test_tools_that_cannot_work_are_refused(tools, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        recipes.check(edited(TINY, {"tools": tools}), "params/mine.yaml")


@pytest.mark.parametrize(("context", "lower"), [(4, False), (144, True)])
def test_context_without_room_has_a_remedy_that_helps(context, lower):
    changes = {"prepare__policy__context": context, "dialogue__response_tokens": 144}
    with pytest.raises(ValueError, match="raise the latter to more than the former") as caught:
        recipes.check(edited(TINY, {**changes, "seed": 0}), "params/mine.yaml")
    assert ("or lower the former" in str(caught.value)) is lower
