"""Random trees of rollouts, and small policies, for tests of what learns from them."""

from dataclasses import replace

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tasks.learning.packing import Credit, Credited
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import PROMPT, RESULT, TURN, Node, Observation, Question, Tree

VOCABULARY = 97


def random_tree(seed, leaves=5, vocabulary=VOCABULARY, name="q", fresh=0.0, prompts=0):
    """A tree whose branches start at the prompt or after a tool result, some inside a turn.

    A share ``fresh`` of the results are fresh prompts instead; with ``prompts``, of so many kinds.
    """
    random = np.random.default_rng(seed)
    tree = Tree(Question(name, "kind", "text", ("1",)))

    def grow(parent, kind, longest):
        length = int(random.integers(1, longest + 1))
        tokens = random.integers(0, vocabulary, length).astype(np.int32)
        sampled = length if kind == TURN else 0
        logprobs = -4 * random.random(sampled).astype(np.float32)
        entropies = random.random(sampled).astype(np.float32)
        if kind == PROMPT and prompts:
            tokens = np.full(3, tokens[0] % prompts, np.int32)
        tree.nodes.append(Node(parent, kind, "", f"{kind} {length}", tokens, logprobs, entropies))
        return len(tree.nodes) - 1

    root = grow(-1, PROMPT, 8)
    starts = [root]
    for _ in range(leaves):
        at = int(random.choice(starts))
        for _ in range(int(random.integers(0, 3))):
            part = grow(at, TURN, 8)
            at = grow(part, PROMPT if fresh and random.random() < fresh else RESULT, 4)
            starts += [part, at]  # from `part` on, a branch begins inside what was a turn
        tree.leaves.append(grow(at, TURN, 8))
    return tree


def begun(tree, tokens):
    """The tree with the same tokens before each of its prompts, as with a system message."""
    before = np.array(tokens, np.int32)
    nodes = [
        replace(node, tokens=np.concatenate([before, node.tokens])) if node.kind == PROMPT else node
        for node in tree.nodes
    ]
    return replace(tree, nodes=nodes)


def world_tree(episodes, fresh=False, cut=()):
    """Episodes of a world as a tree: {states: reward of each step}; equal beginnings are shared.

    A state is a letter. ``fresh``: each step has a prompt of its own, else a result. The last
    observation has no node; it terminates the episode, or truncates one in ``cut``.
    """
    random = np.random.default_rng(len(episodes))
    tree = Tree(Question("q", "world", "Go.", (), data='{"seed": 3}'))
    made = {}

    def add(key, parent, kind, outcome, text, observation=None):
        if key not in made:
            length = int(random.integers(2, 6))
            tokens = random.integers(0, VOCABULARY, length).astype(np.int32)
            values = random.random(length if kind == TURN else 0).astype(np.float32)
            made[key] = len(tree.nodes)
            tree.nodes.append(
                Node(parent, kind, outcome, text, tokens, -values, values, observation)
            )
        return made[key]

    for states, rewards in episodes.items():
        at = add("", -1, PROMPT, "", f"Go. {states[0]}", Observation("ok", states[0]))
        for step, reward in enumerate(rewards[:-1], start=1):
            seen, past = states[step], states[: step + 1]
            turn = Observation("ok", f"You see {seen}.", reward, state=seen, info={"step": step})
            at = add((past, TURN), at, TURN, Outcome.CALL, f"to {seen}", turn)
            text = f"Go. Before: {past}. You see {seen}." if fresh else f"You see {seen}."
            at = add((past, PROMPT), at, PROMPT if fresh else RESULT, "ok", text)
        ends = {"truncated" if states in cut else "terminated": True}
        end = Observation("ok", "The end.", rewards[-1], actions=("stay",), **ends)
        (outcome,) = ends
        tree.leaves.append(add((states, "end"), at, TURN, outcome, "to the end", end))
    return tree


def lengths(tree):
    """Sampled tokens of each leaf."""
    return [
        sum(len(tree.nodes[n].tokens) for n in tree.path(leaf) if tree.nodes[n].kind == TURN)
        for leaf in tree.leaves
    ]


def credited(tree, seed=0, zeros=(), values=False, weighted=True):
    """Random credit and weights for the leaves; no credit for those in ``zeros``."""
    random, weights = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    credits = []
    for leaf, length in enumerate(lengths(tree)):
        advantages = np.zeros(length) if leaf in zeros else random.standard_normal(length)
        returns = random.standard_normal((2, length)).astype(np.float32)
        credits.append(
            Credit(
                advantages.astype(np.float32),
                np.sort(random.integers(0, 3, length)),
                *(returns if values else ()),
                weight=float(weights.uniform(0.2, 1)) if weighted else 1.0,
            )
        )
    return Credited(tree, credits)


def small_policy(seed=0, vocabulary=VOCABULARY, key_value_heads=1):
    """A Qwen2 of two layers whose weights are large enough for tokens to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=vocabulary,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=key_value_heads,
                max_position_embeddings=256,
                tie_word_embeddings=True,
                initializer_range=0.2,
                bos_token_id=None,
                eos_token_id=0,
            )
        )
