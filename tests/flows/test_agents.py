"""The command that tries agents: a real server on loopback, real tools, real files."""

import json
import shutil
from pathlib import Path

import pytest

from flows.commands import agents
from flows.tracking import store
from tasks.tools.search import save_corpus
from tasks.trees.tree import Document
from tests.chat_server import open_chat_server, refused, said
from tests.tasks.tools.web_server import Reply, as_json, serving

ROOT = Path.cwd()
DOCUMENTS = [Document("Tower", "The tower was built by Ada."), Document("Bridge", "Bo built it.")]
WANTED = ("--agents", "direct", "rag", "search_o1", "--sets", "hotpotqa/test", "bamboogle/test")


@pytest.fixture
def checkout(tmp_path, monkeypatch, data, empty_store):
    """A folder with the recipes, two benchmarks, and a corpus; nothing was trained."""
    shutil.copytree(ROOT / "params", tmp_path / "params")
    for name in ("hotpotqa", "bamboogle"):
        place = tmp_path / "data/sources" / name / "test.jsonl"
        place.parent.mkdir(parents=True)
        lines = (data / name / "test.jsonl").read_text().splitlines()[:4]
        place.write_text("\n".join(lines))
    (tmp_path / ".beamline").mkdir()
    (tmp_path / ".beamline/mlflow.db").write_bytes(empty_store)
    (tmp_path / "data/tiny-search/corpus").mkdir(parents=True)
    save_corpus(DOCUMENTS, tmp_path / "data/tiny-search/corpus")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def golds(checkout):
    """Return question -> gold answer of all sets."""
    files = sorted((checkout / "data/sources").glob("*/test.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {row["question"]: row["answer"][0] for row in rows}


class Knowing:
    """Answers every second question with its gold answer, the others wrongly."""

    def __init__(self, known):
        self.known = list(known.items())
        self.refuses = False

    def __call__(self, asked, number):
        if self.refuses:
            return refused(401)
        whole = "\n".join(message["content"] for message in asked["messages"])
        (number,) = [n for n, (text, _) in enumerate(self.known) if text in whole]
        answer = self.known[number][1] if number % 2 == 0 else "nobody"
        if "Words that were searched for" in whole:
            return said(f"it is {answer}", 50, 7)
        if "<search>" in whole and len(asked["messages"]) == 1:
            return said("I look. <search>tower", 50, 7)
        return said(f"<answer>\\boxed{{{answer}}}", 50, 7)


def ask(server, *more):
    given = ("--model", server.url, "--name", "knowing", "--retries", "0")
    return agents.main(["tiny-search", *given, *(more or WANTED)])


def table(checkout, recipe="tiny-search"):
    return json.loads((checkout / f"reports/{recipe}/agents.json").read_text())["rows"]


def logged(checkout):
    """Return the metrics of the only run of agents in MLflow."""
    client = store.connect(f"sqlite:///{checkout}/.beamline/mlflow.db")
    experiment = client.get_experiment_by_name(store.EXPERIMENT).experiment_id
    (run,) = client.search_runs([experiment], "tags.stage = 'agents'")
    return run.data.metrics


def test_the_table_of_agents_over_a_server(checkout, capsys):
    with open_chat_server(Knowing(golds(checkout))) as server:
        assert ask(server) == 0
        page = (checkout / "reports/tiny-search/agents.md").read_text()
        assert page in capsys.readouterr().out
        assert "Model: knowing." in page
        rows = {(row["agent"], row["set"]): row for row in table(checkout)}
        assert len(rows) == 3 * 3
        for (agent, of_set), row in rows.items():
            assert row["questions"] == (8 if of_set == "all" else 4)
            assert row["success"]["mean"] == 0.5
            assert row["success"]["low"] < 0.5 < row["success"]["high"]
            assert row["score"]["mean"] >= 0.5
            calls = {"direct": 0, "rag": 1, "search_o1": 1}[agent]
            requests = {"direct": 1, "rag": 1, "search_o1": 3}[agent]
            assert (row["tool_calls"], row["model_calls"]) == (calls, requests)
            assert (row["prompt_tokens"], row["completion_tokens"]) == (
                50 * requests,
                7 * requests,
            )
        assert logged(checkout)["success_all/rag"] == 0.5
        asked = len(server.requests)
        assert ask(server) == 0
        assert len(server.requests) == asked, "what is known is not asked again"


def test_several_models_stand_one_below_the_other(checkout):
    known = golds(checkout)

    def answer(asked, number):
        if asked["model"] == "knowing":
            return Knowing(known)(asked, number)
        return said("<answer>\\boxed{nobody}", 50, 7)

    with open_chat_server(answer) as server:
        models = [f"{server.url}#{name}" for name in ("ignorant", "knowing")]
        more = ["--agents", "direct", "rag", "--sets", "hotpotqa/test", "--retries", "0"]
        assert agents.main(["tiny-search", "--model", *models, *more]) == 0
        asked = [one["model"] for one in server.requests]
    assert asked == ["ignorant"] * 8 + ["knowing"] * 8, "each model is asked all before the next"
    assert [(row["agent"], row["success"]["mean"]) for row in table(checkout)] == [
        ("direct, ignorant", 0),
        ("direct, knowing", 0.5),
        ("rag, ignorant", 0),
        ("rag, knowing", 0.5),
    ]
    assert "Model: ignorant, knowing." in (checkout / "reports/tiny-search/agents.md").read_text()


def test_values_of_the_recipe_change_for_the_call(checkout, capsys):
    with open_chat_server(Knowing(golds(checkout))) as server:
        more = ["--agents", "direct", "--sets", "hotpotqa/test"]
        for tokens in (77, 78):
            assert ask(server, *more, "--set", f"dialogue.turn_tokens={tokens}") == 0
        assert [one["max_tokens"] for one in server.requests] == [77] * 4 + [78] * 4
        assert ask(server, *more, "--set", "dialogue.turn_token=9") == 2
    assert "dialogue.turn_token=9" in capsys.readouterr().err
    assert "77" not in (checkout / "params/tiny-search.yaml").read_text()


def test_one_name_for_two_models_is_refused(checkout, capsys):
    assert agents.main(["tiny-search", "--model", "initial", "trained", "--name", "both"]) == 2
    assert "--name both: it names one model; of several, write URL#NAME" in capsys.readouterr().err


def test_an_interrupted_call_resumes(checkout, capsys):
    answers = Knowing(golds(checkout))
    with open_chat_server(answers) as server:
        assert ask(server, "--agents", "direct", "--sets", "hotpotqa/test") == 0
        answers.refuses = True
        assert ask(server) == 2
        assert "401" in capsys.readouterr().err
        done = [(row["agent"], row["set"]) for row in table(checkout)]
        assert done == [("direct", "hotpotqa/test")]
        answers.refuses, server.requests = False, []
        assert ask(server, "--agents", "direct", "--sets", "hotpotqa/test", "bamboogle/test") == 0
        assert len(server.requests) == 4, "the set that was done is not asked again"


WEB = """tools:
  http_search:
    url: {url}/search
    key_variable: null
    results: 2
    snippet_characters: 100
    query_characters: 400
    seconds: 10.0
    retries: 0
    concurrency: 4
    budget: null
  browser:
    characters: 100
    passage_words: 40
    seconds: 10.0
    retries: 0
    redirects: 1
    bytes: 100000
    delay_seconds: 0.01
    concurrency: 4
    budget: null
    contact: null
    private_hosts: ["{host}"]
    condense: null
"""
PAGE = "The page tells that the tower was built by Ada. " * 9 + "This is its last word."


@pytest.fixture
def web():
    """A web with a search engine that finds one page."""

    def answer(path, body):
        if path == "/search":
            link = f"{server.url}/tower"
            return as_json({"organic": [{"title": "Tower", "link": link, "snippet": "a snippet"}]})
        if path == "/tower":
            html = f"<html><body><article><p>{PAGE}</p></article></body></html>"
            return Reply(html.encode(), headers={"Content-Type": "text/html"})
        return Reply(status=404)

    with serving(answer) as server:
        yield server


def test_pages_as_snippets_in_full_and_condensed_by_either_model(checkout, web):
    recipe = checkout / "params/smoke.yaml"
    tools = WEB.format(url=web.url, host=web.host)
    recipe.write_text(recipe.read_text().replace("tools: #", f"{tools}  # "))

    def answer(asked, number):
        text = asked["messages"][0]["content"]
        return said("It was ADA." if "Report what the page says" in text else "\\boxed{Ada}")

    with open_chat_server(answer) as server:
        given = ["--model", server.url, "--name", "small", "--agents", "rag", "--questions", "1"]
        ways = ["--pages", "snippets", "full", "condensed"]
        condensers = ["--condensers", "policy", f"{server.url}#large"]
        sets = ["--sets", "bamboogle/test"]
        assert agents.main(["smoke", *given, *sets, *ways, *condensers]) == 0
        asked = [(one["model"], one["messages"][0]["content"]) for one in server.requests]
    labels = [row["agent"] for row in table(checkout, "smoke")]
    assert labels == [
        "rag",
        "rag, pages in full",
        "rag, pages condensed by small",
        "rag, pages condensed by large",
    ]
    assert [model for model, _ in asked] == ["small", "small", "small", "small", "large"]
    snippets, full, page, condensed, page_of_large = [text for _, text in asked]
    assert page == page_of_large
    assert [PAGE in text for text in (snippets, full, page, condensed)] == [0, 1, 1, 0]
    assert ["a snippet" in text for text in (snippets, full, condensed)] == [1, 1, 1]
    assert "It was ADA." in condensed
    calls = [row["tool_calls"] for row in table(checkout, "smoke")]
    assert calls == [1, 2, 2, 2]


def test_all_faults_are_named_before_anything_starts(checkout, capsys):
    (checkout / "params/prompts/agents/rag.txt").write_text("$documents")
    wrong = ["--agents", "rag", "--sets", "none/test", "fact", "--trials", "0", "--pages", "full"]
    assert agents.main(["tiny-search", *wrong, "--model", "models/none"]) == 2
    lines = capsys.readouterr().err
    for words in (
        "--trials 0: give a number above 0",
        "add tools.browser to params/tiny-search.yaml",
        "params/prompts/agents/rag.txt: $question is missing",
        "no row 'none'",
        "tiny-search has no test questions here: run `make run RECIPE=tiny-search`",
        "models/none holds no policy",
    ):
        assert words in lines
    assert not (checkout / "reports").exists()


@pytest.mark.parametrize(
    ("recipe", "agent", "words"),
    [
        ("smoke", "rag", "the recipe's tools have no search"),
        ("shop", "rag", "cannot act in a world"),
    ],
)
def test_an_agent_that_does_not_fit_the_recipe_is_refused(checkout, capsys, recipe, agent, words):
    assert agents.main([recipe, "--agents", agent]) == 2
    assert words in capsys.readouterr().err


def test_bare_is_for_the_dialect_of_tags(checkout, capsys):
    (checkout / "params/mine.yaml").write_text(
        "base: smoke\ndialect: {native: {renderer: default}}\n"
    )
    assert agents.main(["mine", "--agents", "bare"]) == 2
    words = "--agents bare: it calls tools in tags, and the recipe's dialect has none"
    assert words in capsys.readouterr().err
