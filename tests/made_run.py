"""What a run leaves, made up: its tables, tokenizer and reports, for pages."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks import advantage, reward
from tasks.learning import token_values
from tasks.ledger import keys, records
from tasks.ledger.artifacts import ROOT
from tasks.trees.outcomes import Outcome
from tasks.trees.tables import save_trees, write_table
from tasks.trees.tree import AFTER_RESULT, PROMPT, RESULT, TURN, Decision, Node, Question, Tree

TABLES = ("questions", "nodes", "leaves", "decisions")
STEPS = "steps"  # of worlds and programs
CALL = "<think>{}</think><python>{}</python>"
ANSWER = "<think>{}</think><answer>\\boxed{{{}}}</answer>"
COUNTS = ("tool_calls", "tool_errors", "response_tokens", "sampled_tokens")


def node(encode, random, parent, kind, outcome, text):
    """A node whose tokens are those of its text, with random values where it is sampled."""
    tokens = np.array(encode(text), np.int32)
    sampled = len(tokens) if kind == TURN else 0
    entropies = random.random(sampled).astype(np.float32) ** 3
    return Node(parent, kind, outcome, text, tokens, -2 * entropies, entropies)


def tree(encode, random, name, text="What is 2+2?", said=("let us see", "2+2"), leaves=4):
    """A tree: two trajectories part at the prompt, and the others after the first one's result."""
    thought, code = said
    nodes = [
        node(encode, random, -1, PROMPT, "", text),
        node(encode, random, 0, TURN, Outcome.CALL, CALL.format(thought, code)),
        node(encode, random, 1, RESULT, Outcome.OK, f"<result>{thought}</result>"),
        node(encode, random, 0, TURN, Outcome.CUT, f"<think>{thought} {thought}"),
    ]
    ends = [3]
    for leaf in range(1, leaves):
        nodes.append(node(encode, random, 2, TURN, Outcome.ANSWER, ANSWER.format(thought, leaf)))
        ends.append(len(nodes) - 1)
    rise = Decision(AFTER_RESULT, 2, 1, 20, 0.1, 0.25, 0.15, 0.53, True, leaves - 2)
    return Tree(Question(name, "sum", text, ("2",)), nodes, [ends[1], ends[0], *ends[2:]], [rise])


def scores(one):
    """The rewards of a tree's leaves: the answer 2 is right, a trajectory that is cut gets -1."""
    rows = []
    for leaf, last in enumerate(one.leaves):
        cut = one.nodes[last].outcome == Outcome.CUT
        answer = None if cut else one.nodes[last].text.rsplit("{", 1)[1].split("}")[0]
        own = {"score": float(answer == "2"), "success": answer == "2", "answer": answer}
        own |= {"reward": -1.0 if cut else own["score"], "outcome": one.nodes[last].outcome}
        own |= {"faults": ["answer"] if cut else [], "sound": not cut, "breakdown": {}}
        base = {"question": one.question.id, "kind": "sum", "leaf": leaf, "scorer": "exact"}
        rows.append({**base, **own, **dict.fromkeys(COUNTS, 1), "length_penalty": 0.0})
    return rows


def credits(one, rewards):
    """The advantages of a tree's leaves: rewards less their mean, and growing along the leaf."""
    values = [row["reward"] for row in rewards]
    rows = []
    for leaf, last in enumerate(one.leaves):
        count = sum(
            len(one.nodes[at].tokens) for at in one.path(last) if one.nodes[at].kind == TURN
        )
        value = values[leaf] - float(np.mean(values))
        own = {"question": one.question.id, "leaf": leaf, "kept": True, "advantage": value}
        grown = [value + 0.01 * place for place in range(count)]
        rows.append({**own, "advantages": grown, "segments": [0] * count})
    return rows


def seen(one, random):
    """Values of an update's tokens: in every third node ratios are large, and clipped."""
    rows = []
    for at, entry in enumerate(one.nodes):
        if entry.kind == TURN:
            count = len(entry.tokens)
            ratio = np.full(count, 1.5 if at % 3 == 0 else 1.0) + 0.01 * random.random(count)
            lists = {"logprob_gap": 0.02 * random.standard_normal(count), "ratio": ratio}
            clipped = (ratio > 1.2).astype(float)
            rows.append({"question": one.question.id, "node": at, **lists, "clipped": clipped})
    return rows


def write_evaluation(folder, recipe, agents):
    """Write the evaluation of a run: its answers, and its trees as the ledger has them.

    ``agents``: agent -> its trees; one whose trees are not in the ledger has them as a tuple.
    """
    data = Path(folder, "data", recipe)
    rows, lines = [], []
    for agent, trees in agents.items():
        rows += [{"agent": agent, **row} for one in trees for row in scores(one)]
        if isinstance(trees, tuple):
            continue
        stage = f"evaluate/{agent.replace(' ', '_')}"
        inputs = {"step": records.drawn(0, 0), "source": keys.sources_digest({}), "agent": agent}
        key = keys.key_of(inputs)
        place = Path(folder, ROOT, recipe, stage, f"0000-rollout-{key}")
        save_trees(trees, place / "trees")
        step = {"recipe": recipe, "stage": stage, "iteration": 0, "seed": 0}
        made = {"verb": "rollout", "key": key, "step": step, "inputs": inputs, "sources": {}}
        records.write(place, place, {**made, "duration": 0.0, "finished": 0.0, "host": "here"})
        lines.append({"stage": stage, "iteration": 0, "verb": "rollout", "key": key})
    form = reward.TABLE.insert(0, pa.field("agent", pa.string()))
    write_table(pa.Table.from_pylist(rows, schema=form), data / "evaluation.parquet")
    file = data / "records" / "evaluate.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def write(folder, recipe, iterations, tokenizer=None, seed=0):
    """Write what a run of ``recipe`` with these trees leaves; ``iterations``: lists of trees."""
    random = np.random.default_rng(seed)
    data = Path(folder, "data", recipe)
    made: dict[str, list[pa.Table]] = {}
    for number, trees in enumerate(iterations):
        part = Path(folder, "made", str(number))
        save_trees(trees, part)
        files = [part / f"{name}.parquet" for name in (*TABLES, STEPS)]
        tables = {file.stem: pq.read_table(file) for file in files if file.is_file()}
        rewards = [scores(one) for one in trees]
        pairs = list(zip(trees, rewards, strict=True))
        rows = {
            "rewards": ([row for own in rewards for row in own], reward.TABLE),
            "advantages": ([row for pair in pairs for row in credits(*pair)], advantage.TABLE),
            "tokens": ([row for one in trees for row in seen(one, random)], token_values.TABLE),
        }
        for name, (own, form) in rows.items():
            tables[name] = pa.Table.from_pylist(own, schema=form)
        for name, table in tables.items():
            numbers = pa.array([number] * len(table), pa.int32())
            made.setdefault(name, []).append(table.add_column(0, "iteration", numbers))
        shutil.rmtree(part)
    for name, parts in made.items():
        write_table(pa.concat_tables(parts), data / "trees" / f"{name}.parquet")
    lines = [
        f"{number},{0.1 * number},{0.05 * number},0.2,1.5" for number in range(len(iterations))
    ]
    curve = "\n".join(["iteration,reward,success,entropy,tool_calls_a_leaf", *lines])
    (data / "curve.csv").write_text(f"{curve}\n")
    reports = Path(folder, "reports", recipe)
    reports.mkdir(parents=True, exist_ok=True)
    before, after = ({"mean": m, "low": m - 0.1, "high": m + 0.1} for m in (0.3, 0.6))
    measured = {"success": {"cold start": before, "trained": after}}
    (reports / "metrics.json").write_text(json.dumps(measured))
    if tokenizer is not None:
        place = Path(folder, "models", recipe, "trained")
        place.mkdir(parents=True, exist_ok=True)
        tokenizer.backend_tokenizer.save(str(place / "tokenizer.json"))
    return data
