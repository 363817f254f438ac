"""Tables of a comparison: success, success by kind, differences and what they can tell. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.comparison.budget import SPENT
from tasks.trees import panels, power
from tasks.trees.intervals import interval_over_seeds

COLD_START = "cold start"
SUCCESS, SCORES = "right", "scores"  # of a result: a value a question
ONE_SEED = (
    " With one seed, the noise of training is\nunknown: intervals and sizes are those of the "
    "questions alone."
)

Result = Mapping[str, Any]  # of one variant and seed


def report(
    results: Sequence[Result], rows: Sequence[Mapping[str, Any]], resamples: int, baseline: str = ""
) -> str:
    """Return the text of all tables; ``rows`` are ``table_rows`` of the results."""
    kinds = kind_rows(results, resamples)
    differences = difference_rows(results, resamples, baseline)
    in_score = difference_rows(results, resamples, baseline, SCORES) if _graded(results) else []
    parts = [
        markdown(rows),
        kind_markdown(kinds) if len(kinds[0]["kinds"]) > 1 else "",
        difference_markdown(differences) if differences else "",
        f"The same in the mean score:\n\n{difference_table(in_score)}" if in_score else "",
        sensitivity_markdown(results, rows),
        alarm_markdown(results),
        f"{panels.sentence(results[0]['panel'])}\n",
    ]
    return "\n".join(part for part in parts if part)


def table_rows(results: Sequence[Result], resamples: int) -> list[dict[str, Any]]:
    """Return a row for each variant, in the order of its first result.

    Success is the mean over seeds, with a 95 % interval over seeds and questions; what was spent
    and done is the mean over seeds. Where scores are graded, there is their mean, too: ``score``.
    """
    graded = _graded(results)
    rows = []
    for variant, by_seed in by_variant(results).items():
        row = {
            "variant": variant,
            **_interval(_matrix([*by_seed.values()]), resamples),
            "by_seed": {seed: result["success"] for seed, result in by_seed.items()},
        }
        if graded:
            row["score"] = _interval(_matrix([*by_seed.values()], SCORES), resamples, "mean")
        if trained := [result for result in by_seed.values() if "spent" in result]:
            spent = {kind: _mean([one["spent"][kind] for one in trained]) for kind in SPENT}
            names = ("steps_a_batch", "iterations", "trained_tokens")
            row |= spent | {name: _mean([one[name] for one in trained]) for name in names}
        rows.append(row)
    return rows


def kind_rows(results: Sequence[Result], resamples: int) -> list[dict[str, Any]]:
    """Return the success of each variant by kind of question: ``kinds``, kind -> success."""
    rows = []
    for variant, by_seed in by_variant(results).items():
        right_SQ = _matrix([*by_seed.values()])
        kinds_Q = np.array(next(iter(by_seed.values()))["kinds"])
        by_kind = {
            str(kind): _interval(right_SQ[:, kinds_Q == kind], resamples)
            for kind in np.unique(kinds_Q)
        }
        rows.append({"variant": variant, "kinds": by_kind})
    return rows


def mean_of_kinds(
    results: Sequence[Result], kinds: Collection[str], measure: str, resamples: int
) -> dict[str, float] | None:
    """Return ``mean``, ``low`` and ``high`` of one variant's questions of these kinds, or None.

    ``results``: one a seed; ``measure``: SUCCESS or SCORES.
    """
    chosen_Q = np.isin(results[0]["kinds"], list(kinds))
    if not chosen_Q.any():
        return None
    return _interval(_matrix(results, measure)[:, chosen_Q], resamples, "mean")


def difference_rows(
    results: Sequence[Result], resamples: int, baseline: str = "", measure: str = SUCCESS
) -> list[dict[str, Any]]:
    """Return a row for each variant but the baseline: what it has more, and what can be told.

    ``measure``: SUCCESS or SCORES. ``mean``, ``low``, ``high``: the difference in it, paired by
    seed and question, with its 95 % interval over both; ``finds``: the smallest true difference
    that as many seeds and questions would find with probability 80 %; ``told``: whether the
    interval leaves out 0. Where it does not, ``seeds_needed`` and ``questions_needed`` say how many
    of one, with the other as it is, would find a difference of the observed size; None where no
    number would.
    """
    every = by_variant(results)
    trained = [variant for variant in every if variant != COLD_START]
    if not trained:
        return []
    best = max(trained, key=lambda variant: _mean([r["success"] for r in every[variant].values()]))
    against = baseline if baseline in every else best
    work = (resamples, measure)
    return [
        {"variant": variant, "baseline": against, **_difference(by_seed, every[against], *work)}
        for variant, by_seed in every.items()
        if variant != against and set(by_seed) & set(every[against])
    ]


def _difference(
    by_seed: Mapping[int, Result],
    baseline_by_seed: Mapping[int, Result],
    resamples: int,
    measure: str,
) -> dict[str, Any]:
    """Return a row of ``difference_rows`` without its names, over the seeds that both have."""
    seeds = [seed for seed in by_seed if seed in baseline_by_seed]
    variant_SQ, baseline_SQ = (
        _matrix([each[seed] for seed in seeds], measure) for each in (by_seed, baseline_by_seed)
    )
    more_SQ = variant_SQ - baseline_SQ
    low, high = interval_over_seeds(more_SQ, resamples, seed=0)
    mean, questions = float(more_SQ.mean()), more_SQ.shape[1]
    row = {"mean": mean, "low": low, "high": high, "seeds": len(seeds), "questions": questions}
    row["told"] = low > 0 or high < 0
    if questions < 2:
        return row
    noise = power.noise_of(more_SQ)
    needed = {
        "seeds_needed": power.seeds_needed(mean, noise, questions),
        "questions_needed": power.questions_needed(mean, noise, len(seeds)),
    }
    return {
        **row,
        "finds": power.smallest_difference(noise, len(seeds), questions),
        **({} if row["told"] else needed),
    }


def by_variant(results: Sequence[Result]) -> dict[str, dict[int, Result]]:
    """Return the results by variant and seed, in the order of their first results."""
    results_by_variant: dict[str, dict[int, Result]] = {}
    for result in results:
        results_by_variant.setdefault(result["variant"], {})[result["seed"]] = result
    return results_by_variant


def curves_of(results: Sequence[Result]) -> dict[str, list[Mapping[str, list[float]]]]:
    """Return the training curves of each variant, one a seed."""
    return {
        variant: [result["curve"] for result in by_seed.values()]
        for variant, by_seed in by_variant(results).items()
        if all("curve" in result for result in by_seed.values())
    }


def _graded(results: Sequence[Result]) -> bool:
    """Return whether a score lies between 0 and 1."""
    return any(score not in (0, 1) for result in results for score in result[SCORES])


def _matrix(results: Sequence[Result], measure: str = SUCCESS) -> NDArray[np.float64]:
    """Return a measure of each seed's policy on each question, from 0 to 1. [S, Q]"""
    return np.array([result[measure] for result in results], np.float64)


def _interval(
    values_SQ: NDArray[np.float64], resamples: int, name: str = "success"
) -> dict[str, float]:
    low, high = interval_over_seeds(values_SQ, resamples, seed=0)
    return {name: float(values_SQ.mean()), "low": low, "high": high}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the table, one row per variant."""
    graded = "score" in rows[0]
    head = (
        *("variant", "success (%)", "by seed (%)", *(["score (%)"] if graded else [])),
        *("steps a batch", "iterations"),
        *("sampled tokens", "tool calls", "environment steps", "trained tokens", "minutes"),
    )
    lines = []
    for row in rows:
        by_seed = ", ".join(f"{100 * value:.1f}" for value in row["by_seed"].values())
        cells = [row["variant"], percent(row), by_seed]
        cells += [percent(row["score"], "mean")] if graded else []
        if "seconds" in row:
            counted = ("sampled_tokens", "tool_calls", "environment_steps", "trained_tokens")
            cells += [f"{row['steps_a_batch']:g}", f"{row['iterations']:.1f}"]
            cells += [*(f"{row[name]:,.0f}" for name in counted), f"{row['seconds'] / 60:.1f}"]
        else:
            cells += [""] * (len(head) - len(cells))
        lines.append(cells)
    return table(head, lines)


def alarm_markdown(results: Sequence[Result]) -> str:
    """Format which alarms the trainings raised, and in which iteration; "" for none."""
    lines = []
    for variant, by_seed in by_variant(results).items():
        raised: dict[str, list[str]] = {}
        for seed, result in by_seed.items():
            for name, iteration in result.get("alarms", {}).items():
                raised.setdefault(name, []).append(f"{seed} ({iteration})")
        lines += [[variant, name, ", ".join(seeds)] for name, seeds in raised.items()]
    if not lines:
        return ""
    return f"Alarms in training:\n\n{table(['variant', 'alarm', 'seed (iteration)'], lines)}"


def kind_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the success of each variant by kind of question."""
    head = ["variant", *(f"{kind} (%)" for kind in rows[0]["kinds"])]
    lines = [[row["variant"], *map(percent, row["kinds"].values())] for row in rows]
    return f"Success by kind of question:\n\n{table(head, lines)}"


def difference_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the differences from the baseline, with an explanation."""
    one_seed = "" if any(row["seeds"] > 1 for row in rows) else ONE_SEED
    return (
        f"Differences in success from {rows[0]['baseline']}, paired by seed and question, with 95 %"
        " intervals over both, not\ncorrected for their number; a baseline that was chosen as the "
        "best flatters itself. *Finds*: the smallest true\ndifference that as many seeds and "
        "questions find with probability 80 %. *To tell it*: how many seeds, or how many\n"
        f"questions, would find a difference of the observed size.{one_seed}\n\n"
        f"{difference_table(rows)}"
    )


def difference_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the differences from the baseline, and what it would take to tell them."""
    head = ["variant", f"less {rows[0]['baseline']} (points)", "finds (points)", "to tell it"]
    lines = [
        [row["variant"], percent(row, "mean"), _points(row.get("finds")), _to_tell(row)]
        for row in rows
    ]
    return table(head, lines)


def _to_tell(row: Mapping[str, Any]) -> str:
    if row["told"]:
        return "told"
    if not row["mean"]:
        return "no difference"
    seeds, questions = (_needed(row, what) for what in ("seeds", "questions"))
    if row["seeds"] == 1:
        return questions
    return " or ".join(filter(None, (seeds, questions))) or "more seeds and more questions"


def _needed(row: Mapping[str, Any], what: str) -> str:
    if not (count := row.get(f"{what}_needed")):
        return ""
    # as many as there are would do on average, and did not this time
    return f"{_about(max(count, row[what] + 1))} {what}"


def _about(count: int) -> str:
    """Format a number of seeds or questions; estimates above 100 with two digits."""
    digits = max(0, len(str(count)) - 2)
    return f"{-(-count // 10**digits) * 10**digits:,}"


def percent(row: Mapping[str, float], name: str = "success") -> str:
    mean, low, high = (100 * row[column] for column in (name, "low", "high"))
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]"


def _points(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table: the first column to the left, the others to the right."""
    rows = [head, *lines]
    written = [f"| {' | '.join(cells)} |".replace("  ", " ") for cells in rows]
    return "\n".join([written[0], "|---|" + "---:|" * (len(head) - 1), *written[1:]]) + "\n"


def sensitivity_markdown(results: Sequence[Result], rows: Sequence[Mapping[str, Any]]) -> str:
    """Format success by gamma and lambda, for variants that differ in these alone; "" for none."""
    cells: dict[str, dict[tuple[float, float], str]] = {}
    first = {
        variant: next(iter(by_seed.values())) for variant, by_seed in by_variant(results).items()
    }
    for row in rows:
        estimator = first[row["variant"]].get("algorithm", {}).get("estimator", {})
        if {"gamma", "lambda"} <= set(estimator):
            factors = (estimator["gamma"], estimator["lambda"])
            cells.setdefault(_without_factors(row["variant"]), {})[factors] = percent(row)
    grids = [(name, grid) for name, grid in cells.items() if len(grid) > 1]
    return "\n".join(_grid(name, grid) for name, grid in grids)


def _without_factors(variant: str) -> str:
    """Return the name of a variant without its changes of gamma and lambda."""
    factors = ("algorithm.estimator.gamma=", "algorithm.estimator.lambda=")
    parts = [part for part in variant.split(", ") if not part.startswith(factors)]
    return ", ".join(parts)


def _grid(name: str, cells: Mapping[tuple[float, float], str]) -> str:
    gammas, lambdas = ({factors[axis]: None for factors in sorted(cells)} for axis in (0, 1))
    head = ["gamma", *(f"lambda {value:g}" for value in sorted(lambdas))]
    lines = [
        [f"{gamma:g}", *(cells.get((gamma, value), "") for value in sorted(lambdas))]
        for gamma in gammas
    ]
    return f"Success (%) of {name} by gamma and lambda:\n\n{table(head, lines)}"
