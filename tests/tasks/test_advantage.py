"""Credit of whole batches: what the estimators are handed, and the table that comes out."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from starlette.applications import Starlette

from params.schema import algorithms
from params.schema.algorithms import Algorithm, load_algorithms
from params.schema.teacher import ServerTeacher
from tasks import reward
from tasks.advantage import TABLE, AdvantageInputs, advantage
from tasks.chat import teacher_scores
from tasks.engines.transformers import openai_protocol
from tasks.engines.transformers.transformers_engine import TransformersEngine
from tasks.learning.credit import episodes_of
from tasks.ledger import artifacts
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tasks.policy import checkpoint, resident
from tasks.policy.machine import use_machine
from tasks.recipes import load as settings_of
from tasks.tools.recording import REPLAYED
from tasks.trees.outcomes import CAUSES, INFRASTRUCTURE, Cause, Outcome
from tasks.trees.tables import read_rows, save_trees, write_table
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Question, Tree, sampled
from tests.sampling_server import listening
from tests.sections import MACHINE
from tests.trees import lengths, random_tree, world_tree
from tests.verbs import call

ROWS = load_algorithms()
QUESTIONS = 3  # an iteration
SETTINGS = settings_of("smoke").reinforce.model_copy(
    update={
        "questions": QUESTIONS,
        "rollout": settings_of("smoke").reinforce.rollout.model_copy(update={"temperature": 0.7}),
    }
)
NOTHING = np.zeros(0, np.float32)


@pytest.fixture(scope="module")
def initial(policy, tokenizer, tmp_path_factory):
    """The folder of a very small policy."""
    use_machine(MACHINE)
    folder = tmp_path_factory.mktemp("policy") / "initial"
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cold_start(initial, tmp_path_factory):
    """The folder of a policy whose log-probabilities differ from the initial one's."""
    folder = tmp_path_factory.mktemp("reference") / "policy"
    model = checkpoint.load_policy(initial, MACHINE)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(9.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resident.POLICIES.clear()


def grown(rewards, seed=0):
    """A random tree for each list of rewards, with as many leaves."""
    return [random_tree(seed + i, len(values), name=f"q{i}") for i, values in enumerate(rewards)]


def run(initial, trees, rewards, row, penalties=None, name="batch", **changes):
    """The verb on the trees, each in a batch of its own; its record and its table's rows."""
    batches: dict[str, list[artifacts.Artifact]] = {"trees": [], "rewards": []}
    for i, (tree, values) in enumerate(zip(trees, rewards, strict=True)):
        rows = [
            {
                "question": tree.question.id,
                "leaf": leaf,
                "reward": value,
                "length_penalty": penalties[i][leaf] if penalties else 0.0,
                "score": max(0.0, value),
            }
            for leaf, value in enumerate(values)
        ]
        place = Path(f"{name}-{i}")
        save_trees([tree], place / "trees")
        write_table(pa.Table.from_pylist(rows, schema=reward.TABLE), place / "rewards.parquet")
        batches["trees"].append(Artifact.at(place / "trees"))
        batches["rewards"].append(Artifact.at(place / "rewards.parquet"))
    made = call(advantage, AdvantageInputs, **arguments(initial, batches, row, **changes))
    return made, read_rows(Path(artifacts.output(made, "advantages").path))


def arguments(initial, batches, row, **changes) -> dict[str, Any]:
    return {
        "step": SubStep("toy", "reinforce", 0, 7),
        "policy": Artifact.at(initial),
        "samplers": {0: Artifact.at(initial)},
        "critic": None,
        "reference": None,
        **batches,
        "algorithm": row,
        "questions": SETTINGS.questions,
        "settings": SETTINGS.update,
        "temperature": SETTINGS.rollout.temperature,
        "response_tokens": 200,
        "machine": MACHINE,
        **changes,
    }


def group_relative(rewards):
    spread = np.std(rewards, ddof=1)
    return [(value - np.mean(rewards)) / (spread + 1e-6) for value in rewards]


# ---------------------------------------------------------------- the table


def test_each_leaf_has_a_row_with_a_number_for_each_of_its_sampled_tokens(initial):
    rewards = [[1.0, 0.0, 0.5, -1.0], [0.0, 1.0, 1.0]]
    trees = grown(rewards)
    made, rows = run(initial, trees, rewards, ROWS["grpo"])
    assert pq.read_schema(Path(artifacts.output(made, "advantages").path)).equals(TABLE)
    assert [(row["question"], row["leaf"]) for row in rows] == [
        (tree.question.id, leaf) for tree in trees for leaf in range(len(tree.leaves))
    ]
    expected = [a for values in rewards for a in group_relative(values)]
    sampled = [count for tree in trees for count in lengths(tree)]
    for row, credit, count in zip(rows, expected, sampled, strict=True):
        assert row["kept"]
        assert row["advantage"] == pytest.approx(credit)
        assert row["advantages"] == pytest.approx([credit] * count)
        assert row["segments"] == [0] * count
        assert row["returns"] is None and row["values"] is None
    assert made["metrics"]["advantage_spread"] == pytest.approx(np.std(expected))
    assert made["metrics"]["groups_kept"] == 1
    assert set(made["seconds"]) == {"advantage"}


def test_the_length_penalty_is_part_of_the_reward(initial):
    rewards, penalties = [[1.0, 1.0, 0.0]], [[0.0, -0.5, -1.0]]
    _, rows = run(initial, grown(rewards), rewards, ROWS["dapo"], penalties)
    expected = group_relative([1.0, 0.5, -1.0])
    assert [row["advantage"] for row in rows] == pytest.approx(expected)


def test_a_row_is_done_once_and_another_choice_anew(initial):
    rewards = [[1.0, 0.0]]
    trees = grown(rewards)
    first, _ = run(initial, trees, rewards, ROWS["grpo"])
    resident.POLICIES.clear()
    assert run(initial, trees, rewards, ROWS["grpo"])[0] == first
    assert resident.POLICIES.learner is None, "no policy was loaded"
    paths = {
        artifacts.output(run(initial, trees, rewards, ROWS[name])[0], "advantages").path
        for name in ("grpo", "dr_grpo", "gspo")
    }
    assert len(paths) == 3


@pytest.mark.parametrize("name", ["grpo", "arpo_hard", "gagpo"])
def test_spread_is_over_what_gets_an_advantage_of_its_own(initial, name):
    rewards = [[1.0, 0.0, 0.5, -1.0], [0.0, 1.0, 1.0]]
    trees = grown(rewards)
    made, rows = run(initial, trees, rewards, ROWS[name])
    kinds = {"grpo": "leaf", "arpo_hard": "token", "gagpo": "step"}
    values = []
    for row, steps in zip(rows, (s for tree in trees for s in steps_of(tree)), strict=True):
        starts = {
            "leaf": [0],
            "token": range(len(steps)),
            "step": [steps.index(s) for s in set(steps)],
        }
        values += [row["advantages"][place] for place in starts[kinds[name]]]
    metrics = made["metrics"]
    assert metrics["advantage_spread"] == pytest.approx(np.std(values), abs=1e-6)
    quarter = np.quantile(values, 0.75) - np.quantile(values, 0.25)
    assert metrics["advantage_interquartile_range"] == pytest.approx(quarter, abs=1e-6)
    above = sum(abs(value) > 1 for value in values) / len(values)
    assert metrics["advantage_share_above_1"] == pytest.approx(above)
    extrema = (metrics["advantage_min"], metrics["advantage_max"])
    assert extrema == pytest.approx((min(values), max(values)), abs=1e-6)
    assert sum(made["state_groups"].values()) == (len(values) if name == "gagpo" else 0)
    assert len(values) > len(rows) or name == "grpo"


def steps_of(tree):
    """The turn of each sampled token, leaf by leaf."""
    for trajectory in tree.trajectories():
        turns = sampled(trajectory)
        yield [number for number, turn in enumerate(turns) for _ in turn.tokens]


# ---------------------------------------------------------------- the group filter


SPREAD = [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, -1.0], [0.5, 1.0]]


def test_the_filter_keeps_as_many_groups_with_spread_as_an_iteration_has_questions(initial):
    made, rows = run(initial, grown(SPREAD), SPREAD, ROWS["dapo"])
    assert len(rows) == 2 * len(SPREAD), "dropped groups stay in the table"
    kept = sorted({row["question"] for row in rows if row["kept"]})
    assert kept == ["q1", "q3", "q4"], "the first ones, in the order of their batches"
    for row in rows:
        if not row["kept"]:
            nothing = dict.fromkeys(("advantages", "segments", "returns", "values"))
            key = {name: row[name] for name in ("question", "leaf")}
            assert row == {**key, "kept": False, "advantage": 0.0, **nothing}
    assert made["metrics"]["groups_kept"] == 0.5
    assert made["metrics"]["groups_wasted"] == pytest.approx(1 / 6), "q5 has spread, too"


def test_groups_that_differ_in_length_or_format_alone_are_dropped(initial):
    rewards = [[1.0, 1.0], [0.0, -1.0], [1.0, -1.0]]
    penalties = [[0.0, -0.1], [0.0, 0.0], [-1.0, -1.0]]
    _, rows = run(initial, grown(rewards), rewards, ROWS["dapo"], penalties)
    assert {row["question"] for row in rows if row["kept"]} == {"q2"}


@pytest.mark.parametrize("name", ["dapo", "ppo", "gigpo", "reinforce_pp"])
def test_where_no_group_has_a_spread_nothing_is_left_and_nothing_breaks(initial, cold_start, name):
    rewards = [[1.0, 1.0], [0.0, 0.0]]
    row = ROWS[name].model_copy(update={"group_filter": "spread"})
    in_reward = row.kl and row.kl.place == "reward"
    reference = Artifact.at(cold_start) if in_reward else None
    made, rows = run(initial, grown(rewards), rewards, row, reference=reference)
    assert [row["kept"] for row in rows] == [False] * 4
    measures = ("spread", "interquartile_range", "share_above_1", "min", "max")
    spread = dict.fromkeys(measures, 0.0)
    expected = {f"advantage_{measure}": nothing for measure, nothing in spread.items()}
    shares = dict.fromkeys(("groups_kept", "groups_wasted", "masked_share"), 0.0)
    assert made["metrics"] == {**expected, **shares}


def test_without_a_filter_groups_without_spread_are_kept_and_get_nothing(initial):
    made, rows = run(initial, grown(SPREAD), SPREAD, ROWS["grpo"])
    assert all(row["kept"] for row in rows)
    assert made["metrics"]["groups_kept"] == 1
    assert rows[0]["advantages"] == [0.0] * len(rows[0]["advantages"])


# ---------------------------------------------------------------- KL in the reward


def plain_logprobs(folder, nodes, temperature):
    """Log-probabilities of a path's sampled tokens, from the model's own logits."""
    model = checkpoint.load_policy(folder, MACHINE).eval()
    tokens = np.concatenate([node.tokens for node in nodes]).astype(np.int64)
    with torch.no_grad():
        logits = model(torch.tensor(tokens)[None]).logits[0] / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    own = np.concatenate([np.full(len(node.tokens), node.kind == TURN) for node in nodes])
    return np.array([float(logprobs[i - 1, tokens[i]]) for i in range(1, len(tokens)) if own[i]])


def slow_penalties(policy, reference, tree, coefficient):
    """-coefficient * k1 of each sampled token, leaf by leaf."""
    found = []
    for leaf in tree.leaves:
        nodes = [tree.nodes[n] for n in tree.path(leaf)]
        own, other = (
            plain_logprobs(folder, nodes, SETTINGS.rollout.temperature)
            for folder in (policy, reference)
        )
        found.append(-coefficient * np.clip(own - other, -10, 10))
    return found


REWARDS = [[1.0, 0.0, 1.0], [0.5, 0.5]]


def test_kl_in_the_reward_of_a_trajectory_is_its_sum_over_the_sampled_tokens(initial, cold_start):
    """RLOO: r - coefficient * sum of k1, before the baseline; against a slow loop."""
    row, trees = ROWS["rloo"], grown(REWARDS)
    assert row.kl
    made, rows = run(initial, trees, REWARDS, row, reference=Artifact.at(cold_start))
    given = iter(rows)
    views = []
    for tree, rewards in zip(trees, REWARDS, strict=True):
        penalties = slow_penalties(initial, cold_start, tree, row.kl.coefficient)
        shaped = [r + p.sum() for r, p in zip(rewards, penalties, strict=True)]
        views += penalties
        for i, own in enumerate(shaped):
            others = [value for j, value in enumerate(shaped) if j != i]
            assert next(given)["advantage"] == pytest.approx(own - np.mean(others), abs=1e-4)
    k1 = -np.concatenate(views) / row.kl.coefficient
    assert np.abs(k1).max() == pytest.approx(10), "one that is clipped"
    assert made["metrics"]["kl_reference"] == pytest.approx(k1.mean(), abs=1e-3)


def test_kl_in_the_reward_of_a_token_counts_from_there_on(initial, cold_start):
    """REINFORCE++: returns whitened over all sampled tokens; against a slow loop."""
    row, trees = ROWS["reinforce_pp"], grown(REWARDS)
    assert row.kl
    _, rows = run(initial, trees, REWARDS, row, reference=Artifact.at(cold_start))
    returns = []
    for tree, rewards in zip(trees, REWARDS, strict=True):
        penalties = slow_penalties(initial, cold_start, tree, row.kl.coefficient)
        for value, penalty in zip(rewards, penalties, strict=True):
            returns.append([value + penalty[t:].sum() for t in range(len(penalty))])
    every = np.concatenate(returns)
    for found, leaf in zip(rows, returns, strict=True):
        expected = (np.array(leaf) - every.mean()) / (every.std(ddof=1) + 1e-6)
        assert found["advantages"] == pytest.approx(expected, abs=1e-3)


def test_there_is_no_penalty_where_the_policy_is_the_reference(initial):
    """Also where the engine's log-probabilities differ from the trainer's."""
    row, rewards = ROWS["reinforce_pp"], [[1.0, 0.0, 1.0], [0.5, 0.0]]
    made, rows = run(initial, grown(rewards), rewards, row, reference=Artifact.at(initial))
    _, plain = run(initial, grown(rewards), rewards, row.model_copy(update={"kl": None}))
    assert rows == plain
    assert made["metrics"]["kl_reference"] == 0


def test_the_penalty_is_of_the_policy_that_sampled(initial, cold_start):
    """Where that was an earlier one, which sampled ahead."""
    row, rewards = ROWS["rloo"], [[1.0, 0.0, 1.0], [0.5, 0.0]]
    there = Artifact.at(cold_start)
    made, _ = run(initial, grown(rewards), rewards, row, reference=there, samplers={0: there})
    assert made["metrics"]["kl_reference"] == 0


# ---------------------------------------------------------------- a teacher


@pytest.mark.parametrize(("estimator", "weight"), [("none", 1.0), ("group_relative", 0.5)])
def test_a_teacher_gives_each_token_its_log_ratio(initial, cold_start, estimator, weight):
    """weight * (log teacher - log pi), alone or beside an estimator's; against a slow loop."""
    given = ROWS["distil"].model_dump() | {"estimator": {"kind": estimator}}
    row = Algorithm.model_validate(given | {"teacher": {"weight": weight}})
    trees = grown(REWARDS)
    made, rows = run(initial, trees, REWARDS, row, teacher=Artifact.at(cold_start))
    found, gaps = iter(rows), []
    for tree, rewards in zip(trees, REWARDS, strict=True):
        base = [0.0] * len(rewards) if estimator == "none" else group_relative(rewards)
        lessons = slow_penalties(initial, cold_start, tree, weight)
        gaps += lessons
        for own, lesson in zip(base, lessons, strict=True):
            assert next(found)["advantages"] == pytest.approx(own + lesson, abs=1e-3)
    assert made["metrics"]["kl_teacher"] == pytest.approx(
        -np.concatenate(gaps).mean() / weight, abs=1e-3
    )
    every = np.concatenate([row["advantages"] for row in rows])
    assert made["metrics"]["advantage_spread"] == pytest.approx(np.std(every), rel=1e-5)


def test_a_policy_learns_nothing_from_itself(initial):
    row = ROWS["distil"]
    made, rows = run(initial, grown(REWARDS), REWARDS, row, teacher=Artifact.at(initial))
    assert not np.concatenate([found["advantages"] for found in rows]).any()
    assert made["metrics"]["kl_teacher"] == 0


@pytest.fixture(scope="module")
def server(cold_start, tokenizer):
    """A server of the policy ``cold_start``, and how often it was asked to score tokens."""
    engine = TransformersEngine(checkpoint.load_policy(cold_start, MACHINE), tokenizer)
    asked: list[str] = []

    class Served(SimpleNamespace):
        @property
        def engine(self):
            asked.append("once")
            return engine

    served = Served(name="teacher", lock=threading.Lock())
    with listening(Starlette(routes=openai_protocol.routes(served))) as port:
        yield ServerTeacher(kind="server", url=f"http://127.0.0.1:{port}/v1", name="teacher"), asked


def test_a_server_teaches_as_its_policy_does(initial, cold_start, server, monkeypatch):
    """A path that leaves share is scored once, and a replay asks no server."""
    row, trees = ROWS["distil"], grown(REWARDS)
    (teacher, asked), others = server, {"temperature": 1.0, "penalties": None}
    _, expected = run(initial, trees, REWARDS, row, teacher=Artifact.at(cold_start), **others)
    made, rows = run(initial, trees, REWARDS, row, teacher=teacher, **others)
    for one, other in zip(rows, expected, strict=True):
        np.testing.assert_allclose(one["advantages"], other["advantages"], rtol=0, atol=2e-5)
    assert np.abs(np.concatenate([found["advantages"] for found in rows])).max() > 1
    assert len(asked) == 2 * sum(map(len, REWARDS)), "the engine is looked up twice a request"
    scores = Path(artifacts.output(made, "teacher").path)
    teacher_scores.publish([scores, scores, Path("none")], Path("data/teacher.parquet"))
    monkeypatch.setenv(REPLAYED, "data")
    away = teacher.model_copy(update={"url": "http://127.0.0.1:9/v1"})
    _, again = run(initial, trees, REWARDS, row, teacher=away, name="again", **others)
    assert again == rows


def test_a_kl_term_of_the_loss_does_not_touch_the_credit(initial):
    row = ROWS["reinforce_pp_baseline"]
    assert row.kl and row.kl.place == "loss"
    made, rows = run(initial, grown(REWARDS), REWARDS, row)
    _, plain = run(initial, grown(REWARDS), REWARDS, row.model_copy(update={"kl": None}))
    assert rows == plain
    assert "kl_reference" not in made["metrics"]


# ---------------------------------------------------------------- critic


def planted_critic(initial, row):
    """The critic of the learner in memory, with a head that says something."""
    learning = resident.POLICIES.load_learner(initial, MACHINE)
    checkpoint.prepare_critic(learning, row.critic, MACHINE)
    with torch.no_grad():
        learning.critic.head.weight.copy_(torch.linspace(-0.2, 0.2, 32)[None])
        learning.critic.head.bias.fill_(0.3)
    return learning


def plain_values(learning, nodes):
    """V before each sampled token of a path, from the backbone's own hidden states."""
    critic = learning.critic
    backbone = critic.backbone or learning.model.base_model
    tokens = np.concatenate([node.tokens for node in nodes]).astype(np.int64)
    with torch.no_grad():
        hidden = backbone(input_ids=torch.tensor(tokens)[None]).last_hidden_state[0]
        values = critic.head(hidden)[:, 0].numpy()
    own = np.concatenate([np.full(len(node.tokens), node.kind == TURN) for node in nodes])
    return values[np.flatnonzero(own) - 1]


@pytest.mark.parametrize("backbone", ["own", "shared"])
@pytest.mark.parametrize("lambda_", [1.0, 0.9])
def test_a_critics_values_and_what_it_shall_foretell_go_into_the_table(initial, backbone, lambda_):
    ppo = ROWS["ppo"]
    assert ppo.critic
    row = ppo.model_copy(
        update={
            "critic": ppo.critic.model_copy(update={"backbone": backbone}),
            "estimator": algorithms.Gae(kind="gae", gamma=1.0, **{"lambda": lambda_}),
        }
    )
    learning, trees = planted_critic(initial, row), grown(REWARDS)
    made, rows = run(initial, trees, REWARDS, row)
    given = iter(rows)
    every, targets, values = [], [], []
    for tree, rewards in zip(trees, REWARDS, strict=True):
        for leaf, value in zip(tree.leaves, rewards, strict=True):
            found = next(given)
            V = plain_values(learning, [tree.nodes[n] for n in tree.path(leaf)])
            assert found["values"] == pytest.approx(V, abs=1e-4)
            A, after = np.zeros(len(V)), 0.0
            for t in reversed(range(len(V))):
                last = t == len(V) - 1
                delta = value - V[t] if last else V[t + 1] - V[t]
                A[t] = after = delta + lambda_ * after
            assert found["returns"] == pytest.approx(A + V, abs=1e-4)
            every, targets, values = [*every, *A], [*targets, *(A + V)], [*values, *V]
    advantages = np.concatenate([row["advantages"] for row in rows])
    whitened = (np.array(every) - np.mean(every)) / (np.std(every, ddof=1) + 1e-6)
    assert advantages == pytest.approx(whitened, abs=1e-3)
    explained = 1 - np.var(np.subtract(targets, values)) / np.var(targets)
    assert made["metrics"]["explained_variance"] == pytest.approx(explained, abs=1e-3)


def test_a_new_critic_values_everything_at_nothing(initial):
    _, rows = run(initial, grown(REWARDS), REWARDS, ROWS["ppo"])
    for row, value in zip(rows, [r for rewards in REWARDS for r in rewards], strict=True):
        assert row["values"] == [0.0] * len(row["values"])
        assert row["returns"] == pytest.approx([value] * len(row["values"]))


# ---------------------------------------------------------------- steps and states


def node(parent, kind, text, tokens, outcome=""):
    scores = np.full(len(tokens) if kind == TURN else 0, 0.5, np.float32)
    return Node(parent, kind, outcome, text, np.array(tokens, np.int32), -scores, scores)


def episodes(*observed, in_parts=False):
    """Leaves that share the prompt alone; each turn has 1, 2 or 3 tokens and meets a result.

    ``in_parts``: turns of several tokens are stored as several nodes.
    """
    tree = Tree(Question("q", "toy", observed[0][0], ("1",)))
    tree.nodes.append(node(-1, PROMPT, observed[0][0], [7, 8]))
    for states in observed:
        at = 0
        for place in range(len(states)):
            count = place % 3 + 1
            for part in range(count) if in_parts else [0]:
                tokens = [10 + part] if in_parts else list(range(10, 10 + count))
                whole = not in_parts or part == count - 1
                tree.nodes.append(node(at, TURN, "t", tokens, "call" if whole else Outcome.PART))
                at = len(tree.nodes) - 1
            if place < len(states) - 1:
                tree.nodes.append(node(at, RESULT, states[place + 1], [9], "ok"))
                at = len(tree.nodes) - 1
        tree.leaves.append(at)
    return tree


# GAGPO worked by hand: gamma .95, lambda .8
GAGPO = [
    ("ABC", 10, [3.61, 4.75, 0]),
    ("ABD", 0, [-3.61, -4.75, 0]),
    ("AEC", 10, [3.309167, 6.333333, 0]),
    ("AEE", 0, [-3.453567, -2.565, -3.166667]),
]


@pytest.mark.parametrize("in_parts", [False, True], ids=["whole turns", "turns in parts"])
def test_golden_values_of_gagpo_come_from_the_texts_that_the_turns_acted_on(initial, in_parts):
    tree = episodes(*(states for states, _, _ in GAGPO), in_parts=in_parts)
    rewards = [[float(value) for _, value, _ in GAGPO]]
    made, rows = run(initial, [tree], rewards, ROWS["gagpo"])
    for row, (_, _, raw) in zip(rows, GAGPO, strict=True):
        standardised = (np.array(raw) - 0.0381056) / (3.7021811 + 1e-6)
        assert row["advantages"] == pytest.approx(np.repeat(standardised, [1, 2, 3]), abs=1e-5)
        assert row["segments"] == [0, 1, 1, 2, 2, 2], "a turn is a step"
    states = [state for episode, _, _ in GAGPO for state in episode]
    assert made["metrics"]["singleton_share"] == pytest.approx(1 / len(states))  # D
    assert made["metrics"]["mean_state_group"] == pytest.approx(len(states) / 5)


def test_a_state_is_an_observation_without_its_history(initial):
    """GiGPO: C is met after B and after E, and compared."""
    tree = episodes("ABC", "AEC")
    row = ROWS["gigpo"].model_copy(
        update={"estimator": algorithms.TwoLevel(kind="two_level", omega=1, gamma=1, std=False)}
    )
    _, rows = run(initial, [tree], [[1.0, 0.0]], row)
    # episode .5; A shared .5, B alone 0, C shared .5
    assert rows[0]["advantages"] == pytest.approx(np.repeat([1.0, 0.5, 1.0], [1, 2, 3]))


# ---------------------------------------------------------------- rewards of steps


WORLD = {states: [0.0, 0.0, float(final)] for states, final, _ in GAGPO}
forms = pytest.mark.parametrize("fresh", [False, True], ids=["growing", "fresh prompts"])


def by_steps(row, group):
    """The advantage of each step of each leaf of a tree."""
    starts = [np.unique(episode.steps, return_index=True)[1] for episode in group]
    return [np.array(row)[start] for row, start in zip(row, starts, strict=True)]


@forms
@pytest.mark.parametrize("at_the_end", [False, True], ids=["by the world", "as a part"])
def test_golden_values_of_gagpo_from_a_worlds_states_and_rewards(initial, fresh, at_the_end):
    """Final rewards are those of the last step, or a part of the reward: the same numbers."""
    silent = {states: [0.0] * 3 for states in WORLD}
    tree = world_tree(silent if at_the_end else WORLD, fresh, cut=["ABD"])
    rewards = [sum(steps) for steps in WORLD.values()]
    group = episodes_of(tree, rewards, ROWS["gagpo"])
    assert [episode.states for episode in group] == [tuple(states) for states in WORLD]
    assert [episode.reward for episode in group] == (rewards if at_the_end else [0] * 4)
    made, rows = run(initial, [tree], [rewards], ROWS["gagpo"])
    found = by_steps([row["advantages"] for row in rows], group)
    for steps, (_, _, raw) in zip(found, GAGPO, strict=True):
        assert steps == pytest.approx((np.array(raw) - 0.0381056) / 3.7021821, abs=1e-5)
    assert made["metrics"]["singleton_share"] == pytest.approx(1 / 12)
    assert made["state_groups"] == {"1": 1, "2": 4, "3-4": 7, "5-8": 0, ">8": 0}


@forms
def test_a_steps_reward_is_at_the_last_token_of_its_turn(fresh):
    """-0.1 for an act that is not possible, 10 by the world, .5 as a part of the whole reward."""
    tree = world_tree({"AAB": [-0.1, 0.0, 10.0], "AAC": [-0.1, -0.1, 0.0]}, fresh)
    group = episodes_of(tree, [10.4, 0.3], ROWS["gagpo"])
    for episode, leaf, steps in zip(group, tree.trajectories(), WORLD_STEPS, strict=True):
        ends = np.cumsum([len(turn.tokens) for turn in sampled(leaf)]) - 1
        assert episode.token_rewards[ends].tolist() == steps
        assert np.count_nonzero(episode.token_rewards) == np.count_nonzero(steps)
        assert episode.reward == pytest.approx(0.5)
        assert episode.states == ("A", "A", "BC"[steps[2] == 0])
    assert [episode.whole for episode in group] == [10.4, 0.3]


WORLD_STEPS = ([-0.1, 0.0, 10.0], [-0.1, -0.1, 0.0])


@forms
@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "gigpo", "gagpo", "tree_value", "reinforce_pp", "ppo"]
)
def test_every_estimator_takes_rewards_of_steps(initial, name, fresh):
    """Equal rewards, given in other steps, are no spread; with a spread all are finite."""
    row = ROWS[name].model_copy(update={"kl": None})
    even = world_tree({"ABC": [0.1, 0.2, 0.3], "ADE": [0.3, 0.2, 0.1]}, fresh)
    tree = world_tree({"ABC": [0.0, -0.1, 1.0], "ABD": [0.0, -0.1, 0.0], "AE": [-0.1, 0.0]}, fresh)
    _, rows = run(initial, [even, tree], [[0.6, 0.6], [0.9, -0.1, -0.1]], row, name=name)
    if name in ("grpo", "rloo", "tree_value"):
        assert not any(any(row["advantages"]) for row in rows[:2])
    assert all(np.isfinite(row["advantages"]).all() for row in rows)
    assert any(any(row["advantages"]) for row in rows[2:])


def test_kl_in_the_reward_is_reported_without_the_rewards_of_steps(initial, cold_start):
    at = {"reference": Artifact.at(cold_start), "samplers": {0: Artifact.at(initial)}}
    silent, paid = (
        world_tree({"ABC": [step] * 3, "AD": [step] * 2}, fresh=True) for step in (0.0, 4.0)
    )
    found = [
        run(initial, [tree], [rewards], ROWS["reinforce_pp"], name=str(rewards), **at)[0]
        for tree, rewards in ((silent, [0.0, 0.0]), (paid, [12.0, 8.0]))
    ]
    assert found[0]["metrics"]["kl_reference"] == found[1]["metrics"]["kl_reference"] != 0


# ---------------------------------------------------------------- which tokens are shared


CALIBRATED = [  # worked by hand
    [0, -0.2887, 0, 0.8660],
    [0, -0.2887, 0, -0.8660],
    [0, -0.2887, -0.8660, -0.8660],
    [0, 0.8660, 0.8660, 0.8660],
]
PATHS, PAID = ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [1, 8, 9, 4]), [1.0, 0.0, 0.0, 1.0]


def keyed_on(key):
    estimator = algorithms.PrefixCalibrated(kind="prefix_calibrated", key=key)
    return ROWS["gpg"].model_copy(update={"estimator": estimator})


def apart():
    """The golden paths as four rollouts from the prompt."""
    nodes = [node(-1, PROMPT, "", [9]), *(node(0, TURN, "", path) for path in PATHS)]
    return Tree(Question("q", "toy", "", ("1",)), nodes, [1, 2, 3, 4])


def together():
    """The golden paths as one tree: 1 - 2 - 3 - 4, with branches 5, 67 and 894."""
    parts = [(0, [1]), (1, [2]), (2, [3]), (3, [4]), (3, [5]), (2, [6, 7]), (1, [8, 9, 4])]
    nodes = [node(-1, PROMPT, "", [9])]
    nodes += [node(parent, TURN, "", tokens, Outcome.PART) for parent, tokens in parts]
    return Tree(Question("q", "toy", "", ("1",)), nodes, [4, 5, 6, 7])


@pytest.mark.parametrize(
    ("tree", "key"),
    [(apart, "token_ids"), (together, "lineage"), (together, "token_ids")],
    ids=["equal prefixes", "lineage", "both"],
)
def test_golden_values_of_the_prefix_calibrated_estimate(initial, tree, key):
    _, rows = run(initial, [tree()], [PAID], keyed_on(key))
    for row, expected in zip(rows, CALIBRATED, strict=True):
        assert row["advantages"] == pytest.approx(expected, abs=5e-5)


def test_by_lineage_equal_tokens_of_other_rollouts_are_other_tokens(initial):
    _, rows = run(initial, [apart()], [PAID], keyed_on("lineage"))
    for row, initial_advantage in zip(rows, (0.8660, -0.8660, -0.8660, 0.8660), strict=True):
        assert row["advantages"] == pytest.approx([initial_advantage] * 4, abs=5e-5)


def test_what_was_observed_parts_equal_tokens_by_their_ids(initial):
    """Two rollouts that call alike, get other results and then answer alike."""
    nodes = [node(-1, PROMPT, "", [9])]
    for result in (20, 21):
        call = len(nodes)
        nodes.append(node(0, TURN, "", [1, 2]))
        nodes.append(node(call, RESULT, "", [result]))
        nodes.append(node(call + 1, TURN, "", [3]))
    tree = Tree(Question("q", "toy", "", ("1",)), nodes, [3, 6])
    _, rows = run(initial, [tree], [[1.0, 0.0]], keyed_on("token_ids"))
    credit = 0.5 / (np.std([0, 1], ddof=1) + 1e-6)
    assert rows[0]["advantages"] == pytest.approx([0, 0, credit], abs=1e-6)
    assert rows[1]["advantages"] == pytest.approx([0, 0, -credit], abs=1e-6)


def branched(observed=(20, 21)):
    """A call whose result three paths follow, one of which parts inside its turn; and a rollout."""
    nodes = [
        node(-1, PROMPT, "", [9]),
        node(0, TURN, "", [1, 2], Outcome.CALL),
        node(1, RESULT, "", observed, Outcome.OK),
        node(2, TURN, "", [3, 4], Outcome.PART),
        node(3, TURN, "", [5]),  # the continuation of the turn
        node(3, TURN, "", [6, 7]),  # a branch inside it
        node(2, TURN, "", [3, 4, 5]),  # two more from the result
        node(2, TURN, "", [8]),
        node(0, TURN, "", [1, 2]),
    ]
    return Tree(Question("q", "toy", "", ("1",)), nodes, [4, 5, 6, 7, 8])


@pytest.mark.parametrize("others", [False, True])  # compared with the other paths alone
def test_value_from_the_tree_follows_its_branches(initial, others):
    """After the part [3, 4] V is 1/2, after the result (1/2 + 0 + 1)/3 = 1/2, at the prompt 1/4."""
    at_prompt, at_result, in_turn = (2, 3 / 2, 2) if others else (1, 1, 1)  # m / (m - 1)
    called, path, half = [0.25 * at_prompt] * 2, 0.5 * at_result, 0.5 * in_turn
    expected = [
        [*called, 0.0, 0.0, half],
        [*called, 0.0, 0.0, -half, -half],
        [*called, -path, -path, -path],
        [*called, path],
        [-0.25 * at_prompt] * 2,
    ]
    estimator = algorithms.TreeValue(kind="tree_value", leave_one_out=others)
    row = ROWS["tree_value"].model_copy(update={"estimator": estimator})
    rewards = [[1.0, 0.0, 0.0, 1.0, 0.0]]
    _, rows = run(initial, [branched()], rewards, row)
    assert [row["advantages"] for row in rows] == expected
    _, other = run(initial, [branched((30, 31, 32))], rewards, row, name="other")
    assert other == rows, "what was observed changes nothing"


# ---------------------------------------------------------------- segments


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("none", lambda call, answer: [0] * (call + answer)),
        ("every_token", lambda call, answer: list(range(call + answer))),
        ("tool_call", lambda call, answer: [0] * call + [1] * answer),
        ("step", lambda call, answer: [0] * call + [1] * answer),
    ],
)
def test_segments_end_at_the_marks_of_the_row(initial, tokenizer, marks, expected):
    call, answer = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in ("<think>multiply</think><python>print(1)</python>", "<answer>1</answer>")
    )
    nodes = [
        node(-1, PROMPT, "", [9]),
        node(0, TURN, "", call, "call"),
        node(1, RESULT, "", [9, 9], "ok"),
        node(2, TURN, "", answer, "answer"),
    ]
    tree = Tree(Question("q", "toy", "", ("1",)), nodes, [3, 3])
    row = ROWS["grpo"].model_copy(update={"marks": algorithms.Marks(kind=marks)})
    _, rows = run(initial, [tree], [[1.0, 0.0]], row)
    assert rows[0]["segments"] == expected(len(call), len(answer))


def test_golden_tree_of_think_marks(initial, tokenizer):
    """One branch behind each think tag: shared parts have the mean of the answers below them."""

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    nodes = [
        node(-1, PROMPT, "", [9]),
        node(0, TURN, "", ids("<think>"), Outcome.PART),
        node(1, TURN, "", ids("a</think>"), Outcome.PART),
        node(2, TURN, "", ids("<answer>1</answer>"), Outcome.ANSWER),
        node(2, TURN, "", ids("<answer>2</answer>"), Outcome.ANSWER),
        node(1, TURN, "", ids("b</think><answer>2</answer>"), Outcome.ANSWER),
    ]
    tree = Tree(Question("q", "toy", "", ("1",)), nodes, [3, 4, 5])
    row = ROWS["gpg"].model_copy(update={"marks": algorithms.Marks(kind="think")})
    _, rows = run(initial, [tree], [[1.0, 0.0, 0.0]], row)
    assert [len(ids(text)) for text in ("<think>", "a</think>")] == [1, 2]
    right, wrong = 2 / 3**0.5, -1 / 3**0.5  # (r - 1/3) / 0.57735
    expected = [[0, 1 / 12**0.5, right], [0, 1 / 12**0.5, wrong], [0, wrong, wrong]]
    for got, credit in zip(rows, expected, strict=True):
        answer = len(got["segments"]) - 3
        assert got["segments"] == [0, 1, 1, *[2] * answer]
        by_token = np.repeat(credit, [1, 2, answer])
        assert got["advantages"] == pytest.approx(by_token, abs=1e-5)


# ---------------------------------------------------------------- masked leaves

FEW = sorted(name for name, row in ROWS.items() if row.critic is None and not row.kl_in("reward"))


def ended(tree, leaf, outcome):
    """Let a leaf of a tree end with another outcome."""
    node = tree.leaves[leaf]
    tree.nodes[node] = replace(tree.nodes[node], outcome=outcome)
    return tree


def test_a_dead_world_does_not_lower_what_others_have_earned(initial):
    """Three right answers and one dead world: 0.5, 0.5, 0.5, -1.5 without a mask."""
    rewards = [[1.0, 1.0, 1.0, 0.0]]
    trees = [ended(random_tree(0, 4), 3, "world_failed")]
    masked, rows = run(initial, trees, rewards, ROWS["grpo"])
    assert [(row["kept"], row["advantage"]) for row in rows] == [(True, 0.0)] * 3 + [(False, 0.0)]
    assert masked["metrics"]["masked_share"] == 0.25
    every = ROWS["grpo"].model_copy(update={"masked": ()})
    _, before = run(initial, trees, rewards, every, name="every")
    assert [row["advantage"] for row in before] == pytest.approx([0.5] * 3 + [-1.5], abs=1e-5)
    made, rows = run(initial, trees, rewards, ROWS["dapo"], name="dapo")
    assert made["metrics"]["groups_kept"] == 0 and not any(row["kept"] for row in rows)


@pytest.mark.parametrize("row", FEW)
def test_masked_leaves_are_as_if_they_had_never_been(initial, row):
    rewards = [[1.0, 0.0, 0.5, 1.0, -1.0], [0.0, 1.0, 0.0, 0.5, 0.5]]
    trees = grown(rewards)
    ended(trees[0], 1, "replay_differs")
    ended(trees[1], 4, "world_timeout")
    rest = [[0, 2, 3, 4], [0, 1, 2, 3]]
    without = [tree.with_leaves(leaves) for tree, leaves in zip(trees, rest, strict=True)]
    left = [[values[leaf] for leaf in leaves] for values, leaves in zip(rewards, rest, strict=True)]
    _, masked = run(initial, trees, rewards, ROWS[row])
    _, alone = run(initial, without, left, ROWS[row], name="alone")
    learned = [entry for entry in masked if entry["kept"]]
    assert len(learned) == 8 and not any(entry["kept"] for entry in masked[8:])
    places = [leaf for leaves in rest for leaf in leaves]
    assert [entry["leaf"] for entry in learned] == places
    assert [entry | {"leaf": 0} for entry in learned] == [entry | {"leaf": 0} for entry in alone]


def test_a_leaf_whose_tool_was_away_is_masked_and_its_branches_with_it(initial):
    """Those that branched before the call stay."""
    tree = random_tree(0, 2)
    tree.nodes = [*tree.nodes[:1]]
    for parent, kind, outcome in ((0, TURN, "call"), (1, RESULT, "unavailable"), (2, TURN, "cut")):
        tree.nodes.append(node(parent, kind, "", [1, 2], outcome))
    tree.nodes += [node(parent, TURN, "", [parent, 3], "answer") for parent in (2, 0, 0)]
    tree.leaves = [3, 4, 5, 6]
    _, rows = run(initial, [tree], [[0.0, 1.0, 1.0, 0.0]], ROWS["reinforce"])
    assert {row["leaf"]: row["kept"] for row in rows} == {0: False, 1: False, 2: True, 3: True}
    cut = ROWS["reinforce"].model_copy(update={"masked": ("cut",)})
    _, rows = run(initial, [tree], [[0.0, 1.0, 1.0, 0.0]], cut, name="cut")
    assert {row["leaf"]: row["kept"] for row in rows} == {0: False, 1: True, 2: True, 3: True}


@pytest.mark.parametrize("row", ["reinforce", "grpo", "gpg"])
def test_nothing_is_learned_where_fewer_than_two_leaves_are_left(initial, row):
    trees = [ended(random_tree(0, 2), 0, "world_failed"), random_tree(1, 2, name="other")]
    made, rows = run(initial, trees, [[0.0, 1.0], [0.0, 1.0]], ROWS[row])
    assert [entry["kept"] for entry in rows] == [True, True, False, False]
    assert made["metrics"]["masked_share"] == 0.25


def test_every_outcome_that_may_be_masked_has_a_cause_that_allows_it():
    """What an agent may have brought about stays trained."""
    failures = {o.value for o, cause in CAUSES.items() if cause == Cause.INFRASTRUCTURE}
    limits = {o.value for o, cause in CAUSES.items() if cause == Cause.LIMIT}
    assert set(algorithms.INFRASTRUCTURE) == failures == set(INFRASTRUCTURE)
    assert set(get_args(algorithms.Maskable)) == failures | limits
    assert CAUSES.keys() == set(Outcome)
