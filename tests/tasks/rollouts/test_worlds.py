"""Trees grown in a world: forks against replays, fresh prompts, rewards of steps, ends."""

import json
import random
import re
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count, product
from types import SimpleNamespace

import numpy as np
import pytest

from params.schema.agent import Dialogue
from params.schema.algorithms import Marks
from params.schema.reinforce import Rollout
from tasks.dialects.tags import Tags, open_tags
from tasks.engines import Sample
from tasks.environments.contract import EnvironmentKind, OpenEnvironment
from tasks.environments.episodes import open_worlds
from tasks.environments.frozen_lake import ENVIRONMENT, FrozenLakeSettings
from tasks.rollouts.rounds import Setting, grow
from tasks.trees import dialogue as talk
from tasks.trees.outcomes import Outcome, StopReason
from tasks.trees.tables import load_trees, save_trees
from tasks.trees.tree import PROMPT, RESULT, TURN
from tests.resting import grown_in_parts

LAKE = FrozenLakeSettings(
    smallest=4,
    largest=4,
    largest_test=4,
    holes=0.1,
    distance=4,
    slippery=0.3,
    steps=6,
    sight=None,
    hidden=False,
    goal=1.0,
    penalty=-0.1,
)
FORMS = {
    "growing": {},
    "fresh": {"prompt": "fresh", "history": 2, "prompt_tokens": 400},
}


class Walker:
    """An engine that walks at random by the seed of each turn, with random entropies."""

    def __init__(self, tokenizer):
        self.tokenizer, self.numbers = tokenizer, count()

    def replicas(self, most):
        return [self]

    def release(self):
        pass

    @contextmanager
    def session(self, paths, context, temperature, top_p, stop):
        self.context = context
        yield self

    def open(self):
        return next(self.numbers)

    def fork(self, handle):
        return next(self.numbers)

    def close(self, handle):
        pass

    def sample(self, requests):
        return [self._turn(request) for request in requests]

    def _turn(self, request):
        assert len(request.tokens) + request.max_tokens <= self.context
        draw = random.Random(request.seed)
        text = f"<move>{draw.choice(['left', 'right', 'up', 'down'])}</move>"
        if draw.random() < 0.1:
            text = "<think>enough</think><answer>\\boxed{7}</answer>"
        tokens = talk.encode(self.tokenizer, text)[: request.max_tokens]
        whole = len(tokens) == len(talk.encode(self.tokenizer, text))
        entropies = np.array([draw.random() for _ in tokens], np.float32)
        stopped = StopReason.STOP if whole else StopReason.LENGTH
        return Sample(tokens, -entropies, entropies, stopped)


OWN = "tests/tasks/rollouts/lakes_of_a_user.py"
PLACES = {  # world -> reference, and number of processes
    "forked": ("tasks/environments/frozen_lake.py:FrozenLake", 1),
    "replayed": (f"{OWN}:Replayed", 2),
    "fading": (f"{OWN}:Fading", 1),
}


@pytest.fixture(scope="module")
def lakes(tokenizer):
    """Open worlds by name, for ``grown``."""
    with ExitStack() as stack:
        opened = {}
        for name, (world, workers) in PLACES.items():
            kind = EnvironmentKind(FrozenLakeSettings, world, ENVIRONMENT.specs, ENVIRONMENT.tasks)
            opened[name] = stack.enter_context(open_worlds(kind, LAKE, workers, 20.0))
        yield SimpleNamespace(tokenizer=tokenizer, **opened)


def grown(lakes, world, form, branching, grow=grow):
    """Grow the trees of three levels; return them."""
    dialogue = Dialogue(
        system="",
        turn_tokens=60,
        result_tokens=300,
        response_tokens=3000,
        tool_calls=20,
        **FORMS[form],
    )
    budget = Rollout(
        leaves=6,
        initial=2,
        branch=2,
        marks_per_rollout=2,
        entropy_window=3,
        base_probability=0.5,
        entropy_weight=0.2,
        threshold=0.5,
        draw=False,
        temperature=1.0,
        rows=64,
    )
    specs = list(ENVIRONMENT.specs(LAKE))
    setting = Setting(
        lakes.tokenizer,
        dialogue,
        budget,
        open_tags(Tags(), lakes.tokenizer, dialogue, specs),
        OpenEnvironment(specs, getattr(lakes, world).session),
        "0/0",
        branching,
        Marks(kind="tool_call" if branching == "marks" else "none"),
    )
    return grow(ENVIRONMENT.tasks(LAKE, "train", 3, 0), Walker(lakes.tokenizer), setting)


def told(trees):
    """Return all that trees hold, as values that compare."""
    return [
        (
            [
                (n.parent, n.kind, n.outcome, n.text, n.tokens.tolist(), n.observation)
                for n in t.nodes
            ],
            t.leaves,
            t.decisions,
        )
        for t in trees
    ]


@pytest.fixture(scope="module", params=product(FORMS, ("none", "entropy", "marks")), ids="-".join)
def way(request):
    """The form of prompts and the kind of branching."""
    return request.param


@pytest.fixture(scope="module")
def forked(lakes, way):
    """The trees of a world that forks, grown at once."""
    return grown(lakes, "forked", *way)


def test_a_fork_and_a_replay_grow_equal_trees(lakes, way, forked):
    assert told(grown(lakes, "replayed", *way)) == told(forked)
    assert all(len(tree.leaves) == 6 for tree in forked)
    assert "none" in way or any(d.added for tree in forked for d in tree.decisions)


@pytest.mark.parametrize("world", ["forked", "replayed"])
def test_episodes_in_parts_are_those_of_an_undivided_rollout(lakes, way, forked, world, tmp_path):
    divide = partial(grown_in_parts, turns=2, folder=tmp_path)
    (trees, parts) = grown(lakes, world, *way, grow=divide)
    assert told(trees) == told(forked)
    assert parts > 2


@pytest.mark.parametrize("form", list(FORMS))
def test_a_world_that_shows_something_else_in_the_next_part_fails_its_paths(lakes, form, tmp_path):
    divide = partial(grown_in_parts, turns=2, folder=tmp_path)
    (trees, _) = grown(lakes, "fading", form, "none", grow=divide)
    acted = [
        trajectory
        for tree in trees
        for trajectory in tree.trajectories()
        if len([node for node in trajectory if node.kind == TURN]) > 3
    ]
    assert not acted, "after the part in which it began, no path acts but once"
    last = [trajectory[-1] for tree in trees for trajectory in tree.trajectories()]
    failed = [node for node in last if node.outcome == Outcome.REPLAY_DIFFERS]
    assert len(failed) > 3
    for node in failed:
        assert node.observation.truncated
        assert re.search(r"text was '.* \(\d+\)', is '.* \(\d+\)'", node.observation.text, re.S)


@pytest.mark.parametrize("form", list(FORMS))
def test_an_episode_is_a_path(lakes, form, tmp_path):
    trees = grown(lakes, "forked", form, "entropy")
    between = {"growing": RESULT, "fresh": PROMPT}[form]
    outcomes = set()
    for tree in trees:
        start = tree.nodes[0].observation
        assert start.text in tree.nodes[0].text and "actions: " in tree.nodes[0].text
        for leaf, trajectory in zip(tree.leaves, tree.trajectories(), strict=True):
            kinds = [node.kind for node in trajectory]
            assert kinds[0] == PROMPT and set(kinds[2::2]) <= {between}
            assert set(kinds[1::2]) == {TURN} and tree.nodes[leaf].kind == TURN
            seen = [node.observation for node in trajectory[1:] if node.kind == TURN]
            last = trajectory[-1]
            outcomes.add(last.outcome)
            if last.outcome == Outcome.TERMINATED:
                assert last.observation.terminated
                assert last.observation.info["success"] == (last.observation.reward == 1.0)
            if last.outcome == Outcome.TRUNCATED:
                assert last.observation.truncated and len(seen) == LAKE.steps
            for observation, node in zip(seen[:-1], trajectory[2::2], strict=True):
                assert observation.text.splitlines()[-1] in node.text
    assert {Outcome.TERMINATED, Outcome.ANSWER} <= outcomes
    save_trees(trees, tmp_path)
    assert told(load_trees(tmp_path)) == told(trees)


def test_a_fresh_prompt_shows_the_last_steps(lakes):
    (tree, *_) = grown(lakes, "forked", "fresh", "none")
    prompts = [node for node in tree.nodes if node.kind == PROMPT and node.parent >= 0]
    longest = max(prompts, key=lambda node: node.text.count("step "))
    assert longest.text.count("step ") == 2
    assert json.dumps(longest.text).count("move ") == 2


def test_a_branch_at_a_mark_has_the_history_of_its_own_path(lakes):
    for tree in grown(lakes, "forked", "fresh", "marks"):
        for trajectory in tree.trajectories():
            prompts = [node.text for node in trajectory if node.kind == PROMPT][1:]
            for acts, text in enumerate(prompts, start=1):
                assert f"step {acts}: move" in text and f"step {acts + 1}:" not in text
