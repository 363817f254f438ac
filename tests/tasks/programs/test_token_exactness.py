"""What the gateway sampled is what is trained: token for token, however a client sends it back."""

import random

import pytest

from tasks.dialects.native import Native
from tasks.programs import episodes
from tests.examples import is_thorough
from tests.scripted_engine import ScriptedEngine
from tests.tasks.dialects import families
from tests.tasks.programs.conftest import Running

DIALOGUES = 200 if is_thorough() else 100  # in each of two dialects
SPOKEN = ["7", "Let me see.", " of", "é 🙂", "\\boxed{7}", "\n\n"]


def in_tags(seed):
    chance = random.Random(seed)
    thought = f"<think>{chance.choice(SPOKEN)}</think>" * chance.randrange(2)
    kind = chance.randrange(4)
    if kind == 0:
        return f"{thought}<python>{chance.randrange(9)} + 4</python>", False
    if kind == 1:
        return f'{thought}<add>{{"a": {chance.randrange(9)}, "b": 4}}</add>', False
    if kind == 2:
        return f"{thought}<answer>\\boxed{{{chance.randrange(9)}}}</answer>", False
    return chance.choice(SPOKEN), True


def native(seed):
    chance = random.Random(seed)
    thought = f"<think>\n{chance.choice(SPOKEN).strip()}\n</think>\n\n" * chance.randrange(2)
    if chance.randrange(2):
        call = f'{{"name": "add", "arguments": {{"a": {chance.randrange(9)}, "b": 4}}}}'
        return f"{thought}<tool_call>\n{call}\n</tool_call>", True
    return f"{thought}{chance.choice(SPOKEN).strip()}", True


def contexts_of(tree):
    """Yield context and turn of each sampled turn of a tree, as they are trained."""
    for leaf in tree.leaves:
        tokens = []
        for index in tree.path(leaf):
            node = tree.nodes[index]
            if node.kind == "prompt":
                tokens = []
            if node.kind == "turn":
                yield index, tokens, node.tokens.tolist()
            tokens = [*tokens, *node.tokens.tolist()]


def check(trees, drawn):
    """Raise AssertionError where a turn is trained behind other tokens than it was sampled."""
    trained = {
        (number, index): (context, turn)
        for number, tree in enumerate(trees)
        for index, context, turn in contexts_of(tree)
    }
    assert sorted(trained.values()) == sorted(drawn)


def continued(trees):
    """Return the share of requests after an episode's first that go on from sampled tokens."""
    kinds = [
        tree.nodes[tree.nodes[index].parent].kind
        for tree in trees
        for leaf in tree.leaves
        for index in tree.path(leaf)[2:]
        if tree.nodes[index].kind == "turn"
    ]
    return kinds.count("result") / len(kinds)


@pytest.mark.parametrize("dialect", ["tags", "native"])
def test_what_was_sampled_is_trained(own, running, dialect):
    if dialect == "tags":
        asking = running(in_tags)
    else:
        tokenizer = families.tokenizer("qwen3")
        engine = ScriptedEngine(tokenizer, native)
        asking = Running(tokenizer, engine, {"native": Native(renderer="qwen3")})
    trees, counts = asking.grow("own/wanderer.py:run", questions=DIALOGUES, lanes=DIALOGUES)
    assert {tree.nodes[tree.leaves[0]].outcome for tree in trees} == {"answer"}, [
        tree.nodes[tree.leaves[0]].observation
        for tree in trees
        if tree.nodes[tree.leaves[0]].outcome != "answer"
    ][:3]
    check(trees, asking.engine.drawn)
    assert len(asking.engine.drawn) <= counts.requests
    # Qwen3's template drops thoughts when the user writes again: a new prompt follows there
    assert continued(trees) > (0.4 if dialect == "tags" else 0.1)


def test_a_spoilt_bridge_is_caught(own, running, monkeypatch):
    """The check above finds a bridge that changes what was sampled."""
    honest = episodes._prompt

    def spoiling(chat, asked, before, following):
        prompt, before = honest(chat, asked, before, following)
        if before is not None:
            prompt = prompt.copy()
            prompt[len(before.prompt)] += 1
        return prompt, before

    monkeypatch.setattr(episodes, "_prompt", spoiling)
    asking = running(in_tags)
    trees, _ = asking.grow("own/wanderer.py:run", questions=20)
    with pytest.raises(AssertionError):
        check(trees, asking.engine.drawn)
