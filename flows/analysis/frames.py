"""Open the tables of a run as pandas frames: ``frames.rewards("tiny")``.

Each function takes a recipe, ``iteration`` (one, several or None for all; the others are not read
into memory) and ``project``, the folder of another checkout or of a worktree with a run's commit.
Rows of one run are joined by ``KEYS`` and ``node`` or ``leaf``. A table that is missing raises
ValueError with the file and the command that makes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from flows.analysis import reading
from params import recipe_files
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import PROMPT, TURN, CallResult, calls_of, results_of

HERE = Path()
KEYS = ["iteration", "question"]
LISTS = ("tokens", "logprobs", "entropies")  # of nodes, an entry a token
CALL_COLUMNS = (
    "node",
    "answered",
    "number",
    "tool",
    "argument",
    "outcome",
    "ok",
    "result",
    "leaves",
)
PARTS = ("answer", "format", "many_tools")  # of a reward that needs no table of its own

Iterations = int | Collection[int] | None


def questions(
    recipe: str, iteration: Iterations = None, project: Path | str = HERE
) -> pd.DataFrame:
    """Return the questions that each iteration trained on, a row a question."""
    frame = _trees(recipe, "questions", iteration, project).to_pandas()
    return frame.rename(columns={"id": "question"})


def nodes(recipe: str, iteration: Iterations = None, project: Path | str = HERE) -> pd.DataFrame:
    """Return the nodes of the trees, a row a node.

    Beside the stored columns: ``tokens`` (their number), ``entropy`` and ``logprob`` (means of the
    node's sampled tokens, NaN where there are none; entropies are divided by ln|V|, so in [0, 1]),
    ``depth`` (0 for the prompt), ``leaves`` (trajectories through the node) and ``shared``
    (whether these are several).
    """
    table = _trees(recipe, "nodes", iteration, project)
    frame = table.drop_columns(list(LISTS)).to_pandas()
    frame["tokens"] = pc.list_value_length(table["tokens"]).to_numpy()
    frame["entropy"], frame["logprob"] = (_means(table[name]) for name in ("entropies", "logprobs"))
    parents = _parents(frame)
    frame["depth"] = _depths(parents)
    ends = _trees(recipe, "leaves", iteration, project).to_pandas()
    frame["leaves"] = _leaves_through(parents, _rows_of(ends, frame))
    frame["shared"] = frame["leaves"] > 1
    return frame


def leaves(recipe: str, iteration: Iterations = None, project: Path | str = HERE) -> pd.DataFrame:
    """Return the trajectories, a row a leaf.

    ``path``: its nodes, the prompt first; ``turns``: how many whole turns; ``response``: the text
    of turns and results; ``branched_from`` and ``branched_at``: the older leaf with which it shares
    most, and the last node that both have, missing for leaves that share the prompt alone;
    ``shared_tokens`` and ``own_tokens``: tokens after the prompt that other leaves have, too.
    """
    frame = _trees(recipe, "leaves", iteration, project).to_pandas()
    every = nodes(recipe, iteration, project)
    parents, rows = _parents(every), _rows_of(frame, every)
    node, text, kind, outcome, tokens, shared = (
        every[name].to_numpy() for name in ("node", "text", "kind", "outcome", "tokens", "shared")
    )
    paths = [_path(parents, row) for row in rows]
    below = [np.array(path[1:], np.int64) for path in paths]  # without the prompt
    frame["path"] = [node[path].tolist() for path in paths]
    frame["turns"] = [int(((kind[p] == TURN) & (outcome[p] != Outcome.PART)).sum()) for p in below]
    frame["response"] = ["".join(text[p[kind[p] != PROMPT]]) for p in below]
    frame["shared_tokens"] = [int(tokens[p][shared[p]].sum()) for p in below]
    frame["own_tokens"] = [int(tokens[p][~shared[p]].sum()) for p in below]
    older = [
        _branching(paths_of_tree) for _, paths_of_tree in frame.groupby(KEYS, sort=False)["path"]
    ]
    branches = pd.concat([*older, pd.DataFrame(columns=["branched_from", "branched_at"])])
    return frame.join(branches.astype("Int64"))


def rewards(recipe: str, iteration: Iterations = None, project: Path | str = HERE) -> pd.DataFrame:
    """Return reward, score, answer, faults and lengths of each leaf (tasks/reward.py).

    ``lenient`` and ``last_number``: whether the answer stands in the last turn, whatever its form,
    and as its last number; missing where that means nothing, and in runs of earlier releases.
    ``estimate``: the reward model's probability of success; missing where there is no such model.
    """
    return _with_breakdown(_trees(recipe, "rewards", iteration, project))


def parts(recipe: str, iteration: Iterations = None, project: Path | str = HERE) -> pd.DataFrame:
    """Return what each part of the recipe's reward added, a row a leaf and part.

    Recipes with the usual three parts have no such table: their values follow from the rewards and
    the recipe. Raises ValueError where the recipe has been changed since the run.
    """
    if _file(recipe, "trees/parts.parquet", project).is_file():
        return _trees(recipe, "parts", iteration, project).to_pandas()
    return _usual_parts(recipe, rewards(recipe, iteration, project), Path(project))


def advantages(
    recipe: str, iteration: Iterations = None, project: Path | str = HERE
) -> pd.DataFrame:
    """Return the mean advantage of each leaf; those of its tokens are in ``tokens``.

    ``kept``: false where the group filter dropped the leaf, and nothing learned from it.
    """
    columns = [*KEYS, "leaf", "kept", "advantage"]
    return _trees(recipe, "advantages", iteration, project, columns).to_pandas()


def decisions(
    recipe: str, iteration: Iterations = None, project: Path | str = HERE
) -> pd.DataFrame:
    """Return the branching decisions: where, how uncertain, and how many branches were added."""
    return _trees(recipe, "decisions", iteration, project).to_pandas()


def steps(recipe: str, iteration: Iterations = None, project: Path | str = HERE) -> pd.DataFrame:
    """Return what a world answered to each act; only recipes with an environment have it."""
    if not _file(recipe, "trees/steps.parquet", project).is_file():
        _trees(recipe, "nodes", 0, project, ["node"])  # raises where nothing has run
        raise ValueError(
            f"{_file(recipe, 'trees/steps.parquet', project)} does not exist: only recipes with an "
            f"environment have steps; calls('{recipe}') has the calls of tools"
        )
    return _trees(recipe, "steps", iteration, project).to_pandas()


def calls(recipe: str, iteration: Iterations = None, project: Path | str = HERE) -> pd.DataFrame:
    """Return the calls that were executed, a row each; one that leaves share is there once.

    ``node`` is the (last part of the) turn that called, ``answered`` the node that has the results
    of all its calls, -1 where the trajectory ended before the agent read them; ``tool`` and
    ``argument`` are what the recipe's dialect reads, ``number`` the call's place in its trajectory,
    from 1; ``outcome`` is the tool's, ``ok`` whether it ran to its end. Trees of earlier releases
    have calls that the agent read the results of.
    """
    frame = nodes(recipe, iteration, project)
    parents = _parents(frame)
    kind, text, outcome = (frame[name].to_numpy() for name in ("kind", "text", "outcome"))
    stored = frame["results"] if "results" in frame else [None] * len(frame)
    results = [results_of(each) for each in stored]
    after = {int(parents[row]): row for row in np.flatnonzero((kind != TURN) & (parents >= 0))}
    called = [row for row, made in enumerate(results) if made or row in after]
    texts = ["".join(text[_turn(parents, kind, row)]) for row in called]
    read = reading.call_reader(recipe, texts, Path(project))
    acts: dict[int, list[CallResult]] = {}
    for row, said in zip(called, texts, strict=True):
        shown = (outcome[after[row]], text[after[row]]) if row in after else ("", "")
        acts[row] = calls_of(results[row], read(said), *shown)
    numbers = np.zeros(len(frame), np.int64)  # of the last call up to each node
    for row, parent in enumerate(parents):  # parents come before their children
        before = numbers[parent] if parent >= 0 else 0
        numbers[row] = before + len(acts.get(row, ()))
    node = frame["node"].to_numpy()
    rows = [
        {
            **{name: frame[name][row] for name in KEYS},
            "node": node[row],
            "answered": node[after[row]] if row in after else -1,
            "number": numbers[row] - len(acts[row]) + place,
            "tool": call.tool or None,
            "argument": call.argument if call.tool else None,
            "outcome": call.outcome,
            "ok": call.outcome == Outcome.OK,
            "result": call.text,
            "leaves": frame["leaves"][row],
        }
        for row in called
        for place, call in enumerate(acts[row], start=1)
    ]
    return pd.DataFrame(rows, columns=[*KEYS, *CALL_COLUMNS])


def tokens(recipe: str, iteration: Iterations = None, project: Path | str = HERE) -> pd.DataFrame:
    """Return the sampled tokens of each leaf, a row a token; name one iteration of a large run.

    ``place``: among the leaf's sampled tokens; ``position``: tokens of the trajectory before it,
    prompt included; ``text``: the token alone, missing where the policy's tokenizer is; ``entropy``
    (in [0, 1]), ``logprob`` (nats), ``advantage`` and ``segment`` (macro action; both missing where
    the leaf was dropped); ``shared``: whether other leaves have the token, too. A shared token is
    there once for each of its leaves, whose advantages may differ.
    """
    table = _trees(recipe, "nodes", iteration, project)
    flat = {name: _split(table[name]) for name in LISTS}
    every = table.select([*KEYS, "node", "parent", "kind"]).to_pandas()
    parents, kinds = _parents(every), every["kind"].to_numpy()
    credit = _trees(recipe, "advantages", iteration, project).to_pandas().set_index([*KEYS, "leaf"])
    ends = _trees(recipe, "leaves", iteration, project).to_pandas()
    rows = _rows_of(ends, every)
    through = _leaves_through(parents, rows)
    leaf_frames = []
    for key, row in zip(ends[[*KEYS, "leaf"]].itertuples(index=False), rows, strict=True):
        path = _path(parents, row)
        sizes = np.array([len(flat["tokens"][at]) for at in path])
        sampled_mask = np.repeat(kinds[path] == TURN, sizes)
        at = np.repeat(path, sizes)[sampled_mask]
        columns = {name: np.concatenate([flat[name][n] for n in path]) for name in LISTS}
        given = credit.loc[tuple(key)]
        leaf_frames.append(
            pd.DataFrame(
                {
                    **dict(zip([*KEYS, "leaf"], key, strict=True)),
                    "node": every["node"].to_numpy()[at],
                    "place": np.arange(len(at)),
                    "position": np.flatnonzero(sampled_mask),
                    "token": columns["tokens"][sampled_mask],
                    "entropy": columns["entropies"],
                    "logprob": columns["logprobs"],
                    "advantage": _credited(given["advantages"], len(at)),
                    "segment": _credited(given["segments"], len(at)),
                    "shared": through[at] > 1,
                }
            )
        )
    frame = pd.concat(leaf_frames, ignore_index=True)
    ids, which = np.unique(frame["token"].to_numpy(), return_inverse=True)
    texts = reading.token_texts(recipe, ids.tolist(), Path(project))
    frame.insert(7, "text", pd.Series(texts, dtype="str").iloc[which].to_numpy())
    return frame


def token_values(
    recipe: str, iteration: Iterations = None, project: Path | str = HERE
) -> pd.DataFrame:
    """Return what the update saw of each trained node's tokens (tasks/learning/token_values.py)."""
    return _trees(recipe, "tokens", iteration, project).to_pandas()


def answers(recipe: str, project: Path | str = HERE) -> pd.DataFrame:
    """Return the answers of the evaluation, a row an answer; ``agent`` says whose it is."""
    file = _file(recipe, "evaluation.parquet", project)
    return _with_breakdown(_read(recipe, file, None, None))


def curve(recipe: str, iteration: Iterations = None, project: Path | str = HERE) -> pd.DataFrame:
    """Return the metrics of training, a row an iteration.

    With validation, the policy that the last iteration made has a row of its own, whose metrics of
    training are missing.
    """
    file = _file(recipe, "curve.csv", project)
    _check(recipe, file)
    try:
        frame = pd.read_csv(file)
    except pd.errors.EmptyDataError:
        raise ValueError(f"{file} is empty: restore it (dvc checkout), or train again") from None
    return frame if iteration is None else frame[frame["iteration"].isin(_listed(iteration))]


# ---------------------------------------------------------------- files


def _file(recipe: str, name: str, project: Path | str) -> Path:
    return Path(project, "data", recipe, name)


def _trees(
    recipe: str,
    name: str,
    iteration: Iterations,
    project: Path | str,
    columns: list[str] | None = None,
) -> pa.Table:
    return _read(recipe, _file(recipe, f"trees/{name}.parquet", project), iteration, columns)


def _read(recipe: str, file: Path, iteration: Iterations, columns: list[str] | None) -> pa.Table:
    _check(recipe, file)
    filters = None if iteration is None else [("iteration", "in", _listed(iteration))]
    return pq.read_table(file, columns=columns, filters=filters)


def _check(recipe: str, file: Path) -> None:
    """Raise ValueError where a file is missing."""
    if not file.is_file():
        raise reading.missing(recipe, file)


def _listed(iteration: int | Collection[int]) -> list[int]:
    return [iteration] if isinstance(iteration, int | np.integer) else [*iteration]


def _with_breakdown(table: pa.Table) -> pd.DataFrame:
    """Return a table of rewards with the breakdown of each score as a dict."""
    frame = table.to_pandas()
    frame["breakdown"] = [dict(pairs) for pairs in frame["breakdown"]]
    return frame


def _usual_parts(recipe: str, given: pd.DataFrame, project: Path) -> pd.DataFrame:
    """Return the three usual parts of each reward; the last one is what remains of it."""
    file = project / "params" / f"{recipe}.yaml"
    listed = recipe_files.read(recipe, file.parent)["reinforce"]["reward"]
    of = {name: settings or {} for entry in listed for name, settings in entry.items()}
    if tuple(of) != PARTS:
        raise ValueError(_changed(file))
    weight, wrong = of["answer"].get("weight", 1.0), of["answer"].get("wrong", 0.0)
    right = np.where(given["score"] > 0, weight * given["score"], wrong)
    answer = np.where(given["sound"], right, 0.0)
    form = np.where(given["sound"], 0.0, of["format"].get("broken", -1.0))
    bonus = (given["reward"] - answer - form).round(12)
    if not bonus.isin([0.0, of["many_tools"].get("bonus", 0.1)]).all():
        raise ValueError(_changed(file))
    keys = given[[*KEYS, "leaf"]]
    values = zip(PARTS, (answer, form, bonus), strict=True)
    frame = pd.concat([keys.assign(part=name, value=value) for name, value in values])
    return frame.sort_index(kind="stable").reset_index(drop=True)


def _changed(file: Path) -> str:
    return (
        f"{file}: 'reinforce.reward' is not that of the run: restore the file, or run again to "
        "split the rewards into parts"
    )


# ---------------------------------------------------------------- trees as arrays


def _parents(frame: pd.DataFrame) -> NDArray[np.int64]:
    """Return the row of each node's parent, -1 for prompts. A tree's nodes stand together."""
    rows = np.arange(len(frame))
    starts = rows - frame["node"].to_numpy()  # of the tree of each node
    parent = frame["parent"].to_numpy()
    return np.where(parent < 0, -1, starts + parent)


def _rows_of(ends: pd.DataFrame, every: pd.DataFrame) -> NDArray[np.int64]:
    """Return the row of the last node of each leaf."""
    rows = pd.Series(np.arange(len(every)), pd.MultiIndex.from_frame(every[[*KEYS, "node"]]))
    return rows.loc[pd.MultiIndex.from_frame(ends[[*KEYS, "node"]])].to_numpy()


def _path(parents: NDArray[np.int64], row: int) -> list[int]:
    """Return the rows from the prompt to a node."""
    path = [int(row)]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]


def _turn(parents: NDArray[np.int64], kinds: NDArray[Any], row: int) -> list[int]:
    """Return the rows of the parts of a turn up to its part ``row``."""
    parts = [row]
    while kinds[parts[0]] == kinds[parents[parts[0]]] == TURN:
        parts.insert(0, int(parents[parts[0]]))
    return parts


def _depths(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    depths = np.zeros(len(parents), np.int64)
    for row, parent in enumerate(parents):  # parents come before their children
        depths[row] = depths[parent] + 1 if parent >= 0 else 0
    return depths


def _leaves_through(parents: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many leaves contain each node."""
    through = np.bincount(ends, minlength=len(parents))
    for row in range(len(parents) - 1, -1, -1):
        if parents[row] >= 0:
            through[parents[row]] += through[row]
    return through


def _branching(paths: pd.Series) -> pd.DataFrame:
    """Return the older leaf that each leaf of a tree shares most nodes with, and the last of them.

    A branch is younger than the trajectory that it leaves, so that is where it started.
    """
    listed = paths.tolist()
    branches: list[tuple[int | None, int | None]] = []
    for leaf, path in enumerate(listed):
        shared = [_common(path, other) for other in listed[:leaf]]
        most = max(shared, default=0)
        branches.append((shared.index(most), path[most - 1]) if most > 1 else (None, None))
    return pd.DataFrame(branches, paths.index, ["branched_from", "branched_at"], dtype="Int64")


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many nodes two paths share from the prompt on."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _means(lists: pa.ChunkedArray) -> NDArray[np.float64]:
    """Return the mean of each list, NaN for empty ones."""
    whole = lists.combine_chunks()
    sizes = pc.list_value_length(whole).to_numpy(zero_copy_only=False)
    owners = pc.list_parent_indices(whole).to_numpy(zero_copy_only=False)
    values = pc.list_flatten(whole).to_numpy(zero_copy_only=False).astype(np.float64)
    sums = np.bincount(owners, weights=values, minlength=len(whole))
    return np.divide(sums, sizes, out=np.full(len(whole), np.nan), where=sizes > 0)


def _split(lists: pa.ChunkedArray) -> list[NDArray[Any]]:
    """Return the lists as arrays."""
    whole = lists.combine_chunks()
    sizes = pc.list_value_length(whole).to_numpy(zero_copy_only=False)
    flat = pc.list_flatten(whole).to_numpy(zero_copy_only=False)
    return np.split(flat, np.cumsum(sizes)[:-1]) if len(sizes) else []


def _credited(values: Any, size: int) -> NDArray[np.float64]:
    """Return the values of a leaf's tokens as floats; NaN where the leaf was dropped."""
    return np.full(size, np.nan) if values is None else np.asarray(values, np.float64)
