"""Which questions an iteration gets, and what its rollouts are made of."""

import gc
import shutil
import weakref
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from params.schema.agent import Agent, Dialogue, EngineSettings
from params.schema.algorithms import Marks
from params.schema.reinforce import Rollout
from tasks.dialects.tags import Tags
from tasks.engines.transformers import decoder
from tasks.environments.question import Questions
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy import resident
from tasks.rollout import RolloutInputs, _with_second, batch, rollout
from tasks.tools.search import Search, save_corpus
from tasks.trees import panels
from tasks.trees.tables import STORED_TREES, load_trees, save_questions
from tasks.trees.tree import TURN, Document, Observation, Question, masked_leaves
from tests.agents import questions_with
from tests.sections import MACHINE, PYTHON
from tests.trees import random_tree
from tests.verbs import call


def questions(count):
    return [Question(str(i), "toy", f"question {i}", ("1",)) for i in range(count)]


def ids(count, iteration, size, seed=0):
    """The batch of an iteration before which each one has taken a batch."""
    return attempt_ids(count, iteration * size, 0, size, seed)


def attempt_ids(count, first, attempt, size, seed=0):
    chosen = batch(questions(count), seed, first, attempt, size)
    return [question.id for question in chosen]


counts, sizes, seeds = st.integers(1, 12), st.integers(1, 15), st.integers(0, 99)


@given(count=counts, passes=st.integers(1, 3), seed=seeds)
def test_a_pass_asks_every_question_once(count, passes, seed):
    one_by_one = [ids(count, i, 1, seed)[0] for i in range(count * passes)]
    for start in range(0, len(one_by_one), count):
        assert sorted(one_by_one[start : start + count]) == sorted(map(str, range(count)))


@given(count=counts, size=sizes, seed=seeds)
def test_batches_are_cut_from_the_endless_sequence_of_passes(count, size, seed):
    """Where a batch reaches into the next pass, a question that comes twice is asked once."""
    sequence = [ids(count, i, 1, seed)[0] for i in range(4 * size)]
    for iteration in range(4):
        places = sequence[iteration * size : (iteration + 1) * size]
        chosen = ids(count, iteration, size, seed)
        assert chosen == list(dict.fromkeys(places))
        assert len(set(chosen)) == len(chosen)


def test_a_batch_does_not_depend_on_which_ones_were_asked_before():
    unbroken = [ids(10, i, 4) for i in range(6)]
    assert [ids(10, i, 4) for i in reversed(range(6))] == unbroken[::-1]


def test_passes_and_seeds_have_orders_of_their_own():
    assert ids(20, 0, 20) != ids(20, 1, 20)
    assert ids(20, 0, 20) != ids(20, 0, 20, seed=1)
    assert ids(20, 0, 20) != [str(i) for i in range(20)]


@pytest.mark.parametrize("size", [5, 8, 100])
def test_a_batch_holds_at_most_every_question(size):
    assert sorted(ids(5, 0, size)) == sorted(map(str, range(5)))


@given(count=counts, first=st.integers(0, 40), size=sizes, seed=seeds)
def test_further_batches_of_an_iteration_ask_what_it_has_not_asked(count, first, size, seed):
    """They are cut from the same sequence, at the places after those of the batches before."""
    sequence = [ids(count, i, 1, seed)[0] for i in range(first + 4 * size)]
    batches = [attempt_ids(count, first, attempt, size, seed) for attempt in range(4)]
    for attempt, chosen in enumerate(batches):
        places = sequence[first + attempt * size : first + (attempt + 1) * size]
        before = {name for earlier in batches[:attempt] for name in earlier}
        assert chosen == [name for name in dict.fromkeys(places) if name not in before]
    asked = [name for chosen in batches for name in chosen]
    assert len(asked) == len(set(asked))


def test_an_iteration_goes_on_behind_the_batches_of_the_one_before():
    """Three batches of 4 were taken: the next iteration begins at place 12 of the same pass."""
    taken = [name for attempt in range(3) for name in attempt_ids(20, 0, attempt, 4)]
    following = attempt_ids(20, 12, 0, 8)
    assert sorted(taken + following) == sorted(map(str, range(20)))


# ---------------------------------------------------------------- the whole verb

ENGINE = EngineSettings(kind="transformers", memory=1.0, servers=(), lanes=1)
BUDGET = Rollout(
    leaves=2,
    initial=2,
    branch=0,
    marks_per_rollout=1,
    entropy_window=2,
    base_probability=0.5,
    entropy_weight=0.2,
    threshold=0.5,
    draw=False,
    temperature=1.0,
    rows=8,
)
DIALOGUE = Dialogue(
    system="",
    turn_tokens=4,
    result_tokens=8,
    response_tokens=16,
    tool_calls=1,
)
SEARCH = Search(corpus=None, results=1, snippet_words=20, query_characters=200, k1=1.2, b=0.75)
AGENT = Agent(
    dialogue=DIALOGUE,
    tools={"python": PYTHON, "search": SEARCH},
    environment={},
    dialect={"tags": Tags()},
    sources={},
    engine=ENGINE,
    machine=MACHINE,
)


def equipped(**tools):
    """The agent with other tools."""
    return AGENT.model_copy(update={"tools": tools})


def poet(texts):
    return [Observation("ok", "a poet") for _ in texts]


@pytest.fixture
def arguments(policy, tokenizer, tmp_path, monkeypatch):
    """What a rollout of two questions is handed, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    resident.POLICIES.clear()
    policy.save_pretrained("policy")
    tokenizer.save_pretrained("policy")
    save_questions(questions(3), Path("questions.parquet"))
    save_corpus([Document("Ada", "a poet")], Path("corpus"))
    return {
        "step": SubStep("toy", "reinforce", 0, 7),
        "policy": Artifact.at(Path("policy")),
        "questions": Artifact.at(Path("questions.parquet")),
        "size": 2,
        "first": 0,
        "attempt": 0,
        "branching": "none",
        "marks": Marks(kind="none"),
        "budget": BUDGET,
        "top_p": 1.0,
        "agent": AGENT,
        "corpus": Artifact.at(Path("corpus")),
        "environment": questions_with({"python": poet, "search": poet}),
    }


def run(arguments, **changes):
    return call(rollout, RolloutInputs, **{**arguments, **changes})


def test_a_rollout_is_a_tree_a_question_and_is_done_once(arguments):
    finished = []
    made = run(arguments, advance=finished.append)
    trees = load_trees(Path(artifacts.output(made, "trees").path))
    assert [tree.question.id for tree in trees] == [
        question.id for question in batch(questions(3), arguments["step"].seed, 0, 0, 2)
    ]
    assert {len(tree.leaves) for tree in trees} == {2}
    assert sum(finished) == 2
    assert set(made["seconds"]) == {"sampling", "tools"}
    assert run(arguments, advance=finished.append) == made
    assert sum(finished) == 2, "what is finished is not done again"


def test_a_panel_is_asked_in_its_order_whatever_the_seed_and_whatever_is_asked_beside(arguments):
    panels.save(panels.panel_of(questions(3), "test", "toy", seed=5), Path("panel.json"))
    arguments["panel"] = Artifact.at(Path("panel.json"))
    order = [task["id"] for task in panels.load(Path("panel.json")).tasks]
    grown = {}
    for seed, first, size in ((7, 0, 3), (8, 0, 3), (7, 1, 2), (7, 2, 9)):
        step = SubStep("toy", "evaluate", 0, seed)
        made = run(arguments, step=step, first=first, size=size)
        assert made["questions"] == order[first : first + size]
        trees = load_trees(Path(artifacts.output(made, "trees").path))
        turns = {tree.question.id: [node.text for node in tree.nodes] for tree in trees}
        assert list(turns) == made["questions"]
        grown[seed, first] = turns
    assert grown[7, 0] != grown[8, 0], "samples have the seed of the step"
    for first in (1, 2):
        assert grown[7, first].items() <= grown[7, 0].items(), "and depend on nothing beside them"


def test_a_panel_of_other_questions_is_refused_before_the_policy_is_loaded(arguments):
    panels.save(panels.panel_of(questions(4), "test", "toy", seed=5), Path("panel.json"))
    arguments |= {"panel": Artifact.at(Path("panel.json")), "size": 4}
    with pytest.raises(ValueError, match=r"panel\.json.*: 1 missing here: 3\."):
        run(arguments, acting=lambda *_: pytest.fail("loaded"))


def test_what_the_tools_are_made_of_decides_the_outcome(arguments):
    save_corpus([Document("Ada", "a baker")], Path("other"))
    changes = [
        {},
        {"agent": equipped(python=PYTHON, search=SEARCH.model_copy(update={"results": 2}))},
        {"agent": equipped(python=PYTHON)},
        {"corpus": Artifact.at(Path("other"))},
        {"agent": equipped(python=PYTHON.model_copy(update={"cpu_seconds": 2}), search=SEARCH)},
        {"agent": AGENT.model_copy(update={"sources": {"python": "another file"}})},
    ]
    made = [run({**arguments, **change}) for change in changes]
    assert len({artifacts.output(record, "trees").path for record in made}) == len(changes)


def grown(arguments, **changes):
    made = run({**arguments, **changes})
    return made, load_trees(Path(artifacts.output(made, "trees").path))


def test_where_an_iteration_begins_and_which_batch_it_takes_decide_the_questions(arguments):
    for first, attempt in ((0, 0), (0, 1), (1, 0), (2, 0)):
        _, trees = grown(arguments, first=first, attempt=attempt)
        expected = batch(questions(3), arguments["step"].seed, first, attempt, 2)
        assert [tree.question for tree in trees] == expected


def test_a_further_batch_draws_from_seeds_of_its_own(arguments):
    def tokens(trees):
        (tree,) = [tree for tree in trees if tree.question.id == last]
        return [tree.nodes[leaf].tokens.tolist() for leaf in tree.leaves]

    (question,) = batch(questions(3), arguments["step"].seed, 0, 1, 2)
    last = question.id
    by_first = tokens(grown(arguments, first=2, attempt=0)[1])
    by_attempt = tokens(grown(arguments, first=0, attempt=1)[1])
    assert by_first != by_attempt


@pytest.mark.parametrize("first", range(6))
def test_a_batch_says_whether_questions_are_left_for_another_one(arguments, first):
    """Of 4 questions by 2: a batch across the end of a pass may have asked what comes next."""
    save_questions(questions(4), Path("four.parquet"))
    arguments = {**arguments, "questions": Artifact.at(Path("four.parquet")), "first": first}
    for attempt in range(3):
        made, trees = grown(arguments, attempt=attempt)
        following = batch(questions(4), arguments["step"].seed, first, attempt + 1, 2)
        assert made["another_batch"] == bool(following)
        assert trees, "no batch is empty"
        if not made["another_batch"]:
            break
    assert not made["another_batch"], "questions run out"


WIDE = BUDGET.model_copy(update={"leaves": 5, "initial": 2, "branch": 2, "threshold": -2.0})


FAILED = ("world_failed",)


class Flaky(Questions):
    """Questions, of which the first episodes that are opened have failed."""

    def __init__(self, failing):
        super().__init__(lambda calls: [Observation("ok", "") for _ in calls])
        self.failing = failing

    def open(self, tasks):
        opened = super().open(tasks)
        good, bad = Observation("ok", "a door"), Observation("world_failed", "", truncated=True)
        return [(handle, bad if handle in self.failing else good) for handle, _ in opened]


def flaky(arguments, *failing):
    session = Flaky(failing)
    environment = replace(arguments["environment"], session=lambda: nullcontext(session))
    return grown(arguments, environment=environment, again=("world_failed",))[1]


def contents(tree):
    return [(node.text, node.tokens.tolist()) for node in tree.nodes]


def test_a_task_that_the_infrastructure_failed_is_asked_once_more(arguments):
    """Episodes 0 and 1 are of the first task, 2 and 3 of the second; then come those asked anew."""
    whole = flaky(arguments)
    for failing, lost in (((0, 1), []), ((2, 3), []), ((0, 1, 4, 5), [0])):
        resident.POLICIES.clear()
        shutil.rmtree(artifacts.ROOT)
        trees = flaky(arguments, *failing)
        failed = failing[0] // 2
        assert contents(trees[1 - failed]) == contents(whole[1 - failed])
        assert contents(trees[failed]) != contents(whole[failed]), "it has seeds of its own"
        assert [len(tree.leaves) for tree in trees] == [2, 2]
        assert [i for i, tree in enumerate(trees) if any(masked_leaves(tree, FAILED))] == lost
        assert [i for i, tree in enumerate(trees) if "a door" not in tree.nodes[0].text] == lost


def test_trajectories_of_a_second_attempt_stand_in_place_of_those_that_failed():
    def attempt(*outcomes):
        tree = random_tree(0, 1)
        root, leaves = tree.nodes[0], []
        tree.nodes = [root]
        for outcome in outcomes:
            turn = replace(random_tree(len(tree.nodes), 1).nodes[1], kind=TURN)
            tree.nodes += [replace(turn, parent=0, outcome="call")]
            tree.nodes += [replace(turn, parent=len(tree.nodes) - 1, outcome=outcome)]
            leaves.append(len(tree.nodes) - 1)
        return replace(tree, leaves=leaves)

    one, two = attempt("answer", "world_failed", "cut"), attempt("cut", "answer", "world_failed")
    (mixed,) = _with_second([one], [two], FAILED)
    outcomes = [[node.outcome for node in path[1:]] for path in mixed.trajectories()]
    assert outcomes == [["answer"], ["answer"], ["cut"]], "turns in two parts each"
    assert len(mixed.nodes) == 7, "nothing is left of what has failed"
    assert _with_second([one], [], FAILED) == [one]


def test_without_branching_every_path_begins_at_the_prompt(arguments):
    _, trees = grown(arguments, budget=WIDE)
    for tree in trees:
        assert tree.decisions == []
        assert len(tree.leaves) == 5
        assert len({tree.path(leaf)[1] for leaf in tree.leaves}) == 5


def test_a_row_that_branches_at_marks_branches_at_its_own_marks(arguments):
    _, trees = grown(arguments, budget=WIDE, branching="marks", marks=Marks(kind="every_token"))
    for tree in trees:
        assert len(tree.leaves) == 5
        assert {decision.kind for decision in tree.decisions} == {"mark"}
        assert [decision.added for decision in tree.decisions] == [2, 1], "what the budget allows"
        first = [tree.nodes[decision.node] for decision in tree.decisions]
        assert [len(node.tokens) for node in first] == [1, 1], "after the first sampled token"
    _, trees = grown(arguments, budget=WIDE, branching="marks", marks=Marks(kind="paragraph"))
    for tree in trees:
        assert len(tree.leaves) == 5
        assert sum(decision.added for decision in tree.decisions) < 3, "other marks, other branches"


def test_the_choices_of_a_row_are_part_of_the_key(arguments):
    names = {entry.name for entry in fields(RolloutInputs)}
    given = {name: value for name, value in arguments.items() if name in names}
    places = {
        arguments["step"].place(rollout, RolloutInputs(**{**given, **change}))
        for change in (
            {},
            {"first": 1},
            {"attempt": 1},
            {"panel": Artifact("panel.json", "of one")},
            {"panel": Artifact("panel.json", "of another")},
            {"branching": "entropy"},
            {"branching": "marks"},
            {"marks": Marks(kind="tool_call")},
            {"budget": BUDGET.model_copy(update={"marks_per_rollout": 2})},
            {"told": '[{"name": "add", "description": "in other words"}]'},
        )
    }
    assert len(places) == 10


def test_stored_trees_of_the_iteration_stand_for_what_would_be_sampled(
    arguments, tmp_path, monkeypatch
):
    """They come from tables of all iterations, as the stage's out has them, byte for byte."""
    made = [
        run({**arguments, "step": SubStep("toy", "reinforce", number, 7)}) for number in range(2)
    ]
    (tmp_path / "stored").mkdir()
    for name in ("questions", "nodes", "leaves", "decisions"):
        tables = [
            pq.read_table(Path(artifacts.output(record, "trees").path) / f"{name}.parquet")
            for record in made
        ]
        numbered = [
            table.add_column(0, "iteration", pa.array([number] * len(table), pa.int32()))
            for number, table in enumerate(tables)
        ]
        pq.write_table(pa.concat_tables(numbered), tmp_path / f"stored/{name}.parquet")

    def again(**changes):
        shutil.rmtree(artifacts.ROOT, ignore_errors=True)
        return run({**arguments, **changes})

    monkeypatch.setenv(STORED_TREES["reinforce"], str(tmp_path / "stored"))
    other = {"budget": BUDGET.model_copy(update={"temperature": 0.5})}  # sampled, they would differ
    for number in range(2):
        found = again(step=SubStep("toy", "reinforce", number, 7), **other)
        assert set(found["artifacts"]) == {"trees"}
        digests = [artifacts.output(each, "trees").digest for each in (found, made[number])]
        assert digests[0] == digests[1]
    with pytest.raises(ValueError, match=r"has no tree for question \d in iteration 2"):
        again(step=SubStep("toy", "reinforce", 2, 7))
    asked = again(step=SubStep("toy", "evaluate/trained", 0, 8), **other)
    assert artifacts.output(asked, "trees").digest != artifacts.output(made[0], "trees").digest


def test_stored_trees_of_the_reward_model_stand_for_what_would_be_sampled(
    arguments, tmp_path, monkeypatch
):
    """They come from a folder without iterations, as the stage's out has them."""
    labelled = {**arguments, "step": SubStep("toy", "reward_model", 0, 7)}
    made = artifacts.output(run(labelled), "trees")
    shutil.copytree(made.path, tmp_path / "stored")
    shutil.rmtree(artifacts.ROOT)
    monkeypatch.setenv(STORED_TREES["reward_model"], str(tmp_path / "stored"))
    other = {"budget": BUDGET.model_copy(update={"temperature": 0.5})}  # sampled, they would differ
    assert artifacts.output(run({**labelled, **other}), "trees").digest == made.digest
    trained = run({**arguments, **other, "step": SubStep("toy", "reinforce", 0, 7)})
    assert artifacts.output(trained, "trees").digest != made.digest


@pytest.mark.parametrize("threads", [1, 2])
def test_in_bf16_a_copy_samples_and_is_given_up_at_once(arguments, monkeypatch, threads):
    """At once, not when Python next looks for cycles: on a GPU its memory is wanted."""
    copies = []

    def to_sample(model, machine):
        made = make(model, machine)
        copies.append(weakref.ref(made))
        assert made is not model
        assert made.dtype is torch.bfloat16
        return made

    make = resident.to_sample
    monkeypatch.setattr(resident, "to_sample", to_sample)
    monkeypatch.setattr(decoder, "ARCHITECTURES", ())  # whose weights are cast one by one
    half = MACHINE.model_copy(update={"precision": "bfloat16", "threads": threads})
    torch.set_num_threads(threads)
    gc.disable()
    try:
        made = run({**arguments, "agent": AGENT.model_copy(update={"machine": half})})
        assert [copy() for copy in copies] == [None]
    finally:
        gc.enable()
        torch.set_num_threads(MACHINE.threads)
    learning = resident.POLICIES.learner
    assert learning.model.dtype is torch.float32
    trees = load_trees(Path(artifacts.output(made, "trees").path))
    assert all(len(tree.leaves) == BUDGET.leaves for tree in trees)
