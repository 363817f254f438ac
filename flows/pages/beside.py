"""Put what several agents did with the same questions beside each other, as one block of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from flows.pages.forest import Block

Question = dict[str, Any]
Named = Sequence[tuple[str, Block]]  # an agent's or a run's name, and its block

BETTER, WORSE = "better", "worse"
ORDER = (WORSE, BETTER, "")  # in which a block lists its questions


def beside(number: int | str, named: Named) -> Block:
    """Return one block with the questions that all of ``named`` have, each as one tree.

    The trees of a question share its prompt; a leaf says by ``of`` whose it is. A question's
    ``change`` says whether the second of ``named`` did better or worse than the first, by success;
    those that changed come first.
    """
    texts: dict[str, int] = {}
    parts: dict[str, list[tuple[str, Question]]] = {}
    for name, block in named:
        places = [texts.setdefault(text, len(texts)) for text in block["texts"]]
        for question in block["questions"]:
            parts.setdefault(question["id"], []).append((name, _with_texts(question, places)))
    questions = [_one_tree(each) for each in parts.values() if len(each) == len(named)]
    questions.sort(key=lambda question: ORDER.index(question["change"]))
    return {"iteration": number, "questions": questions, "texts": list(texts)}


def changed(block: Block) -> dict[str, list[str]]:
    """Return the ids of the questions that got better or worse: change -> ids."""
    ids: dict[str, list[str]] = {BETTER: [], WORSE: []}
    for question in block["questions"]:
        if question["change"]:
            ids[question["change"]].append(question["id"])
    return ids


def _with_texts(question: Question, places: Sequence[int]) -> Question:
    """Return a question whose tokens name their texts by other indices."""
    nodes = [
        {**node, "tokens": [places[index] for index in node["tokens"]]}
        if "tokens" in node
        else node
        for node in question["nodes"]
    ]
    return {**question, "nodes": nodes}


def _one_tree(parts: Sequence[tuple[str, Question]]) -> Question:
    """Return the trees of one question as one, below the prompt of the first."""
    first = parts[0][1]
    nodes, leaves, decisions = [dict(first["nodes"][0])], [], []
    known = [
        [name, text] for name, question in parts if (text := question["nodes"][0].get("prompt"))
    ]
    if len({text for _, text in known}) > 1:
        nodes[0]["prompts"] = known
    for name, question in parts:
        shift = len(nodes) - 1
        nodes += [
            {**node, "parent": node["parent"] + shift if node["parent"] else 0}
            for node in question["nodes"][1:]
        ]
        leaves += [
            {**leaf, "node": leaf["node"] + shift, "of": name} for leaf in question["leaves"]
        ]
        decisions += [
            {**one, "node": one["node"] + shift if one["node"] else 0}
            for one in question["decisions"]
        ]
    return {
        **first,
        "nodes": nodes,
        "leaves": leaves,
        "decisions": decisions,
        "change": _change(*(question["leaves"] for _, question in parts[:2])),
    }


def _change(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> str:
    """Return whether the second leaves succeed more often than the first."""
    one, other = (fmean(bool(leaf["success"]) for leaf in leaves) for leaves in (before, after))
    return BETTER if other > one else WORSE if other < one else ""
