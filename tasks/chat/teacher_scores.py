"""Score the sampled tokens of trees with a teacher behind a server.

What the server has said is kept beside the advantages, so a replay of a run (BEAMLINE_CALLS) asks
no server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from params.schema.teacher import ServerTeacher
from tasks.chat import account_of
from tasks.trees.tables import write_table
from tasks.trees.tree import TURN, Tree

SCORES = "teacher.parquet"
PROBED = 64  # tokens that are held against the policy's before a training
TABLE = pa.schema({"context": pa.string(), "logprobs": pa.list_(pa.float32())})
UNKNOWN = "�"  # in the text of a token that is a part of a character
Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Known = Mapping[str, Floats]  # digest of a context -> log-probabilities of its tokens


def logprobs_of(
    teacher: ServerTeacher,
    trees: Sequence[Tree],
    texts: Sequence[str],
    recipe: str,
    known: Known,
) -> tuple[list[list[Floats]], pa.Table]:
    """Return the log-probabilities of the sampled tokens, tree -> node -> tokens, and all scores.

    ``texts``: of each of the policy's ids. ``known``: what was answered before, which is not asked
    again. Each leaf's contexts are asked for once, those that several leaves share included. Raises
    RuntimeError where the server cannot answer, or has other tokens.
    """
    contexts = {
        digest_of(tokens): tokens for tree in trees for _, tokens in _contexts(tree) if len(tokens)
    }
    missing = {digest: tokens for digest, tokens in contexts.items() if digest not in known}
    scores = {digest: known[digest] for digest in contexts if digest in known}
    scores |= ask(teacher, missing, texts, recipe)
    rows = [{"context": digest, "logprobs": scores[digest]} for digest in contexts]
    return [_by_node(tree, scores) for tree in trees], pa.Table.from_pylist(rows, schema=TABLE)


def ask(
    teacher: ServerTeacher, contexts: Mapping[str, Ints], texts: Sequence[str], recipe: str
) -> dict[str, Floats]:
    """Return what the server says of each context. Raises RuntimeError as ``logprobs_of``."""
    if not contexts:
        return {}
    from tasks.chat.given_tokens import score  # openai takes seconds to import

    scored = score(teacher, list(contexts.values()), account_of(f"{recipe}-teacher"))
    for tokens, one in zip(contexts.values(), scored, strict=True):
        _check_texts(teacher, tokens, one.texts, texts)
    return {digest: one.logprobs for digest, one in zip(contexts, scored, strict=True)}


def check(teacher: ServerTeacher, ids: Sequence[int], texts: Sequence[str], recipe: str) -> None:
    """Raise RuntimeError unless the server scores tokens, and has the policy's.

    ``ids``: those that have a token, in order; its answer to some of them tells.
    """
    places = np.linspace(0, len(ids) - 1, min(PROBED, len(ids))).astype(int)
    ask(teacher, {"": np.array(ids, np.int32)[places]}, texts, recipe)


def digest_of(tokens: Ints) -> str:
    """Return the digest of a context."""
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=16).hexdigest()


def read(files: Iterable[Path]) -> dict[str, Floats]:
    """Return the scores in tables, by context."""
    return {
        row["context"]: np.array(row["logprobs"], np.float32)
        for file in files
        for row in pq.read_table(file).to_pylist()
    }


def publish(tables: Iterable[Path], file: Path) -> None:
    """Join tables of scores that exist to one, without repeated rows; none: no file."""
    file.unlink(missing_ok=True)
    if scores := read(table for table in tables if table.exists()):
        rows = [{"context": name, "logprobs": scores[name]} for name in sorted(scores)]
        write_table(pa.Table.from_pylist(rows, schema=TABLE), file)


def _contexts(tree: Tree) -> Iterable[tuple[list[int], Ints]]:
    """Yield the nodes and the tokens of each leaf's contexts up to the last sampled token."""
    for leaf in tree.leaves:
        for context in tree.contexts(leaf):
            turns = [place for place, node in enumerate(context) if tree.nodes[node].kind == TURN]
            nodes = context[: turns[-1] + 1] if turns else []
            if nodes:
                yield nodes, np.concatenate([tree.nodes[node].tokens for node in nodes])


def _by_node(tree: Tree, scores: Known) -> list[Floats]:
    by_node = [np.zeros(0, np.float32)] * len(tree.nodes)
    for nodes, tokens in _contexts(tree):
        ends = np.cumsum([len(tree.nodes[node].tokens) for node in nodes])
        parts = np.split(scores[digest_of(tokens)], ends[:-1])
        for node, part in zip(nodes, parts, strict=True):
            if tree.nodes[node].kind == TURN:
                by_node[node] = part
    return by_node


def _check_texts(
    teacher: ServerTeacher, tokens: Ints, theirs: Sequence[str], texts: Sequence[str]
) -> None:
    """Raise RuntimeError where the server writes a token in another way than the policy.

    Spaces around a token and parts of characters are written differently by the same tokenizer.
    """
    for token, text in zip(tokens.tolist(), theirs, strict=True):
        ours = texts[token]
        if UNKNOWN not in ours + text and ours.strip() and text.strip() not in (ours.strip(), ""):
            raise RuntimeError(
                f"teacher: the token {token} is {text!r} to the server's {teacher.name} and "
                f"{ours!r} to the policy: name a teacher with the policy's tokenizer"
            )
