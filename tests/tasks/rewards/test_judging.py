"""Rewards of answers that a judge scores: over a scripted server, replayed, and by protocol."""

import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from params.schema.agent import Dialogue
from params.schema.benchmarks import load_benchmarks
from params.schema.judge import Judge, JudgePolicy
from tasks import recipes
from tasks.chat import FOLDER, attempts
from tasks.engines.chat import PolicyModel
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.ledger.artifacts import Artifact, output
from tasks.ledger.substeps import Ledger, SubStep
from tasks.reward import RewardInputs, reward
from tasks.rewards import judging
from tasks.rewards.scoring import score_trees
from tasks.tools.recording import REPLAYED
from tasks.trees.tables import read_rows, save_trees
from tasks.trees.tree import PROMPT, TURN, Node, Question, Tree
from tests.chat_server import Response, open_chat_server, refused, said
from tests.judges import TEMPLATE, honest, settings
from tests.reward_parts import usual

ROOT = Path(__file__).parents[3]
DIALOGUE = Dialogue(system="", turn_tokens=8, result_tokens=20, response_tokens=64, tool_calls=3)
SHORT = "{question}{accepted}{answer}"  # for a policy with a small context


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "FIRST_WAIT", 0.01)
    monkeypatch.setenv(FOLDER, str(tmp_path / "chat"))
    monkeypatch.delenv(REPLAYED, raising=False)
    return tmp_path / "chat"


def tree(number, *answers, kind="toy", scorer="judge"):
    """A tree whose leaves give these answers to the question with the gold answer ``number``."""
    question = Question(f"q{number}", kind, f"What is {number}?", (str(number),), scorer)
    nodes = [node(-1, PROMPT, "?")]
    nodes += [node(0, TURN, f"<think>t</think><answer>\\boxed{{{a}}}</answer>") for a in answers]
    return Tree(question, nodes, list(range(1, len(nodes))))


def node(parent, kind, text):
    tokens = np.arange(len(text), dtype=np.int32)
    scores = np.zeros(len(tokens) if kind == TURN else 0, np.float32)
    return Node(parent, kind, "answer" if kind == TURN else "", text, tokens, scores, scores)


TREES = [tree(number, number, number, number + 1) for number in range(6)]


def scored(chosen, trees=TREES):
    with judging.open_judge(chosen, TEMPLATE, "toy") as judge:
        rows = score_trees(trees, usual(), judge=judge)
    return [row["score"] for row in rows], rows


def test_judge_scores_the_answers_of_a_batch():
    with open_chat_server(honest) as server:
        scores, rows = scored(settings(server, votes=2))
        assert scores == [1, 1, 0] * 6
        assert len(server.requests) == 6 * 2 * 2  # equal answers once, two votes each
    assert rows[0]["breakdown"] == {"score": 1, "right": 2, "votes": 2, "without_verdict": 0}
    assert rows[0]["success"]
    assert rows[0]["scorer"] == "judge"


def test_no_sample_is_lost_in_a_storm():
    """Refusals, time-outs and texts without verdicts end in the same scores."""
    faults = [
        refused(429, headers={"Retry-After": "0.05"}),
        refused(500),
        said("late", after=5.0),
        said("no verdict at all"),
        said(None),
    ]

    def script(asked, number):
        return faults[number % 7] if number % 7 < len(faults) else honest(asked, number)

    with open_chat_server(script) as server:
        chosen = settings(server, retries=8, timeout_seconds=1.0, ask_again=8)
        assert scored(chosen)[0] == [1, 1, 0] * 6


@pytest.mark.parametrize("body", ["<html>", '{"error": {"message": "busy"}}', '{"choices": []}'])
def test_a_server_without_answers_ends_the_run(body):
    answered = pytest.raises(RuntimeError, match=r"have no answer \(malformed\)")
    with open_chat_server(lambda asked, number: Response(body=body)) as server, answered:
        scored(settings(server, retries=0))


def test_budget_ends_the_run_and_a_larger_one_finishes_it():
    with open_chat_server(honest) as server:
        with pytest.raises(RuntimeError, match=r"judge\.budget\.calls = 7"):
            scored(settings(server, budget={"calls": 7, "tokens": None}))
        assert len(server.requests) == 7
        assert scored(settings(server, budget={"calls": 12, "tokens": None}))[0] == [1, 1, 0] * 6
        assert len(server.requests) == 12  # 12 different answers: none was asked twice


def test_question_without_a_judge_is_refused():
    with pytest.raises(ValueError, match="18 answers are to be scored by a judge"):
        score_trees(TREES, usual())


# ---------------------------------------------------------------- the sub-step


def sub_step(
    tmp_path, chosen, trees=TREES, name="a", template=TEMPLATE, open_policy=None, **others
):
    save_trees(trees, tmp_path / "trees")
    inputs = RewardInputs(
        trees=Artifact.at(tmp_path / "trees"),
        settings=usual(),
        overlong=None,
        response_tokens=100,
        judge=chosen,
        prompt=template,
        **others,
    )
    step = SubStep("toy", f"evaluate/{name}", 0, 0, Ledger())
    return reward(step, inputs, open_policy=open_policy)


def test_replay_repeats_the_verdicts_without_a_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_chat_server(honest) as server:
        made = sub_step(tmp_path, chosen := settings(server, votes=2))
    assert made["metrics"]["without_verdict"] == 0
    verdicts = Path(output(made, "verdicts").path)
    rows = read_rows(verdicts)
    assert {(row["answer"], row["verdict"]) for row in rows if row["question"] == "What is 3?"} == {
        ("3", "right"),
        ("4", "wrong"),
    }
    assert rows[0]["text"].startswith("compared\nVerdict: ")
    judging.publish_verdicts([verdicts], tmp_path / "data" / "calls" / judging.VERDICTS)
    monkeypatch.setenv(REPLAYED, str(tmp_path / "data"))
    again = sub_step(tmp_path, chosen, name="b")
    for artifact in ("rewards", "verdicts"):
        assert output(again, artifact).digest == output(made, artifact).digest
    unknown = sub_step(tmp_path, chosen, [*TREES, tree(9, 9)], name="c")
    assert unknown["metrics"]["without_verdict"] == pytest.approx(1 / 19)
    assert output(unknown, "verdicts").digest == output(made, "verdicts").digest


def test_policy_of_this_machine_judges(tmp_path, monkeypatch, policy, tokenizer):
    """A policy of this machine judges beside a server; its verdicts are replayed without it."""
    monkeypatch.chdir(tmp_path)
    engine = TransformersEngine(policy, tokenizer)
    opened = []

    @contextmanager
    def open_policy(folder):
        opened.append(folder.as_posix())
        yield PolicyModel(folder.as_posix(), engine, tokenizer, DIALOGUE, True, 256, rows=4)

    with open_chat_server(lambda asked, number: said("Verdict: right")) as server:
        alone = settings(server, ask_again=0)
        own = JudgePolicy(kind="policy", name="models/other/trained")
        both = alone.model_copy(update={"models": (own, *alone.models), "max_tokens": 8})
        with pytest.raises(ValueError, match=r"models/other/trained, which is not open"):
            sub_step(tmp_path, both)
        made = sub_step(tmp_path, both, template=SHORT, open_policy=open_policy)
    assert opened == ["models/other/trained"]
    file = Path(output(made, "verdicts").path)
    rows = read_rows(file)
    assert {row["judge"] for row in rows} == {own.name, *(one.name for one in alone.models)}
    assert all(row["text"] for row in rows if row["judge"] == own.name)
    assert {row["score"] for row in read_rows(Path(output(made, "rewards").path))} == {0}, "a tie"
    judging.publish_verdicts([file], tmp_path / "data" / "calls" / judging.VERDICTS)
    monkeypatch.setenv(REPLAYED, str(tmp_path / "data"))
    again = sub_step(tmp_path, both, name="b", template=SHORT)
    assert output(again, "rewards").digest == output(made, "rewards").digest


def test_protocol_of_the_papers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trees = [
        tree(1, "uno", kind="gsm8k", scorer="maths"),  # judged
        tree(2, "2", kind="hotpotqa", scorer="exact"),  # F1 in the papers
        tree(3, "3", kind="own", scorer="f1"),  # a knowledge set by its scorer
        tree(4, "four", kind="own", scorer="exact"),  # judged
    ]
    with open_chat_server(lambda asked, number: said("Verdict: right")) as server:
        papers = {"gsm8k": "judge", "hotpotqa": "f1"}
        made = sub_step(tmp_path, settings(server), trees, papers=papers)
        assert len(server.requests) == 2
        rows = read_rows(Path(output(made, "rewards").path))
        assert [row["scorer"] for row in rows] == ["judge", "f1", "f1", "judge"]
        assert [row["score"] for row in rows] == [1, 1, 1, 1]
        verified = sub_step(tmp_path, None, trees, name="b")
        assert len(server.requests) == 2
    assert [row["score"] for row in read_rows(Path(output(verified, "rewards").path))] == [
        0,
        1,
        1,
        0,
    ]


def test_webwalker_has_f1_in_the_papers():
    """GPG, section 5.1, counts it among the knowledge sets, which 5.3 grades by F1."""
    of_sets = {name: row.papers_scorer for name, row in load_benchmarks(ROOT / "params").items()}
    asked = {
        kind: judging.as_in_papers(tree(0, "1", kind=kind, scorer="exact").question, of_sets).scorer
        for kind in ("webwalkerqa", "musique", "gaia", "math500")
    }
    assert asked == {"webwalkerqa": "f1", "musique": "f1", "gaia": "judge", "math500": "judge"}


# ---------------------------------------------------------------- recipes


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Write the recipe ``smoke`` with changes to a copy of params, and load it."""
    monkeypatch.chdir(ROOT)

    def load(judge, *changes, name="smoke"):
        with recipes.changed(name, changes, ROOT / "params") as folder:
            text = (folder / f"{name}.yaml").read_text()
            written = f"judge: {json.dumps(judge)}\n"
            lines = [line for line in text.splitlines(keepends=True) if line[:7] != "judge: "]
            (folder / f"{name}.yaml").write_text("".join(lines) + "\n" + written)
            return recipes.load(name, folder)

    return load


def section(**changes):
    model = {"kind": "endpoint", "url": "http://127.0.0.1:9/v1", "name": "m", "key_variable": None}
    chosen = {name: changes.pop(name) for name in list(changes) if name in model}
    return {
        **{"models": [model | chosen], "prompt": "prompts/judge.txt", "votes": 1},
        **{"temperature": 0.6, "max_tokens": 300, "ask_again": 2, "own_policy": False},
        **{"concurrency": 8, "timeout_seconds": 60.0, "retries": 5},
        **{"budget": {"calls": None, "tokens": None}},
        **changes,
    }


def test_recipe_with_a_judge(recipe):
    chosen = recipe(section(), "evaluate.protocol=papers")
    assert isinstance(chosen.judge, Judge)
    assert judging.inputs(chosen, ROOT / "params", evaluation=False) == {}
    asked = judging.inputs(chosen, ROOT / "params", evaluation=True)
    assert (asked["judge"], asked["papers"]) == (chosen.judge, {})
    assert "{answer}" in asked["prompt"]
    assert judging.inputs(recipe(section()), ROOT / "params", evaluation=True) == {}


@pytest.mark.parametrize(
    ("remedy", "judge", "changes"),
    [
        ("judge is null", None, ["evaluate.protocol=papers"]),
        ("would grade itself", section(name="models/smoke/trained"), []),
        (r"judge\.models\.0\.name = models/none holds no policy",
         section(models=[{"kind": "policy", "name": "models/none"}]),
         ["evaluate.protocol=papers"]),
        ("cannot be read", section(prompt="prompts/none.txt"), []),
        (r"judge\.models\.0\.key_variable.*NO_SUCH_KEY is not set",
         section(key_variable="NO_SUCH_KEY"), ["evaluate.protocol=papers"]),
    ],
)  # fmt: skip
def test_fault_of_a_recipe_comes_before_any_work(recipe, remedy, judge, changes):
    with pytest.raises(ValueError, match=remedy):
        recipe(judge, *changes)


def test_own_policy_judges_where_the_recipe_says_so(recipe):
    own = {"name": "models/smoke/trained", "own_policy": True}
    assert recipe(section(**own)).judge.models[0].name == "models/smoke/trained"
    name = recipe(section(), name="gsm8k").prepare.policy.name
    with pytest.raises(ValueError, match="would grade itself"):
        recipe(section(name=name), name="gsm8k")
