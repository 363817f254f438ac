"""The page of a suite: our table, the tables that the paper prints with ours, and its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flows.host import files
from flows.tracking import calls_to_success as calls
from flows.tracking import comparison_tables as tables
from flows.tracking import paper_figures, paper_tables, run_figures
from flows.tracking.comparison_report import slug
from flows.tracking.comparison_tables import COLD_START, Result
from params.run_folders import RunFolders
from params.schema.suites import Part, Suite
from tasks.trees import panels
from tasks.trees.intervals import interval_over_seeds
from tasks.trees.profiles import pooled

ByLabel = Mapping[str, Sequence[Result]]  # label of a variant -> its results, one a seed
WRITTEN_AS = {"tool_calls": "tool calls", "environment_steps": "environment steps"}


def place(recipe: str, suite: str) -> Path:
    """Return the page of a suite."""
    return RunFolders(recipe).reports / f"suite-{suite}.md"


def write(
    recipe: str,
    name: str,
    suite: Suite,
    names: Mapping[str, str],
    all_results: Sequence[Result],
    *,
    resamples: int,
    committed: bool = False,
) -> None:
    """Write the page and figures of the results so far. ``names``: label -> variant's name."""
    usable, odd = _comparable(all_results)
    results = {
        label: results_of_variant
        for label, variant in names.items()
        if (results_of_variant := [result for result in usable if result["variant"] == variant])
    }
    page = place(recipe, name)
    drawn, missing = _draw(page, suite, results, resamples)
    parts = [
        f"# The suite {name} on {recipe}\n\n{suite.statement} ({suite.paper})\n",
        _origin(usable, odd, committed),
        table(suite, results, usable, resamples),
        published_section(suite, results, usable, resamples),
        _sources(suite),
        calls_section(suite, results),
        state_section(results),
        *[f"![{title}]({file})\n" for title, file in drawn],
        _listed("Not drawn", missing),
        _listed("What the paper also says", suite.claims),
        _listed("What the paper reports and no source here has", suite.missing),
        f"**What cannot be compared.** {suite.incomparable}\n",
        f"{panels.sentence(usable[0]['panel'])}\n" if usable else "",
    ]
    with files.replaced(page) as partial:
        partial.write_text("\n".join(part for part in parts if part))


def _comparable(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """Return the results on the panel that most have, and the others."""
    panels_of = [(one["panel"]["digest"], len(one["right"])) for one in results]
    common = max(panels_of, key=panels_of.count, default=None)
    usable = [one for one, panel in zip(results, panels_of, strict=True) if panel == common]
    return usable, [one for one in results if one not in usable]


def _origin(results: Sequence[Result], odd: Sequence[Result], committed: bool) -> str:
    """Say of which commits results are that were not checked against the code."""
    lines = []
    if committed:
        commits = sorted({one["commit"][:12] for one in results if one.get("commit")})
        lines.append(
            f"From the results that are there, whatever their keys: of the commits "
            f"{', '.join(commits)}. What has changed since is not in them."
        )
    if odd:
        names = sorted({one["variant"] for one in odd})
        lines.append(f"Left out, since they were asked other questions: {', '.join(names)}.")
    return "\n".join([*lines, ""]) if lines else ""


# ---------------------------------------------------------------- tables


def table(suite: Suite, results: ByLabel, all_results: Sequence[Result], resamples: int) -> str:
    """Return the table of all parts; a variant without results yet has empty cells."""
    spent = tuple(kind for kind in tables.SPENT if kind != "seconds")
    head = ["part", "variant", "success (%)", "by seed (%)", f"less {suite.baseline} (points)"]
    head += ["tool calls a question", "updates", *(kind.replace("_", " ") for kind in spent)]
    head += paper_tables.beside(suite)
    lines = []
    if cold := [one for one in all_results if one["variant"] == COLD_START]:
        lines.append(["", COLD_START, *_ours(COLD_START, {COLD_START: cold}, suite, resamples)])
    for key, part in suite.parts.items():
        for label in part.variants:
            cells = _ours(label, results, suite, resamples)
            lines.append([key, label, *cells, *paper_tables.beside(suite, label)])
    wide = [line + [""] * (len(head) - len(line)) for line in lines]
    stated = [f"- **{key}** ({part.of}): {part.statement}" for key, part in suite.parts.items()]
    return (
        "\n".join(stated)
        + "\n\nSuccess is that of held-out questions, with 95 % intervals over seeds and questions;"
        "\ndifferences are paired by seed and question; what was spent is the mean of a seed.\n\n"
        + tables.table(head, wide)
    )


def _ours(label: str, results: ByLabel, suite: Suite, resamples: int) -> list[str]:
    """Return the cells of what was measured here, from success on; empty ones for nothing yet."""
    spent = [kind for kind in tables.SPENT if kind != "seconds"]
    if label not in results:
        return [""] * (5 + len(spent))
    results_of_label = [{**one, "variant": label} for one in results[label]]
    (row,) = tables.table_rows(results_of_label, resamples)
    by_seed = ", ".join(f"{100 * value:.1f}" for value in row["by_seed"].values())
    call_means = [
        np.mean(one["measures"]["tool calls a question"])
        for one in results_of_label
        if "measures" in one
    ]
    cells = [
        tables.percent(row),
        by_seed,
        _difference(label, results_of_label, results, suite, resamples),
    ]
    cells.append(f"{np.mean(call_means):.2f}" if len(call_means) == len(results_of_label) else "")
    if "spent" not in results_of_label[0]:
        return cells
    return [*cells, f"{row['iterations']:.1f}", *(f"{row[kind]:,.0f}" for kind in spent)]


def _difference(
    label: str, results_of_label: Sequence[Result], results: ByLabel, suite: Suite, resamples: int
) -> str:
    if label in (suite.baseline, COLD_START) or suite.baseline not in results:
        return ""
    other = [{**one, "variant": suite.baseline} for one in results[suite.baseline]]
    rows = tables.difference_rows([*other, *results_of_label], resamples, suite.baseline)
    return tables.percent(rows[0], "mean") if rows else ""


def _sources(suite: Suite) -> str:
    return _listed("Sources of the paper's numbers", [one.source for one in suite.published])


def published_section(
    suite: Suite, results: ByLabel, usable: Sequence[Result], resamples: int
) -> str:
    """Return the paper's tables with ours, and ours by kind where they do not have all kinds."""
    cold = [one for one in usable if one["variant"] == COLD_START]
    every = {**({COLD_START: cold} if cold else {}), **results}
    parts = [paper_tables.section(one, every, resamples) for one in suite.published]
    several = bool(usable) and len(set(usable[0]["kinds"])) > 1
    if several and not paper_tables.covers(suite.published, usable):
        labelled = [{**one, "variant": label} for label, own in every.items() for one in own]
        parts.append(tables.kind_markdown(tables.kind_rows(labelled, resamples)))
    return "\n".join(parts)


def _listed(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"**{title}**\n", *(f"- {line}" for line in lines), ""]) if lines else ""


def calls_section(suite: Suite, results: ByLabel) -> str:
    """Return what training spent until success reached levels, and the ratio that is claimed."""
    curves = curves_of(results)
    what = WRITTEN_AS.get(suite.budget, "")
    if not curves or not what:
        return ""
    levels = calls.levels(curves)
    said = calls.calls_markdown(calls.calls_rows(curves, levels, suite.budget), what)
    if claim := suite.ratio:
        pair = {name: curves[name] for name in (claim.of, claim.to) if name in curves}
        ratio = calls.ratio(pair, claim.of, claim.to, calls.levels(pair), suite.budget)
        sentence = calls.ratio_sentence(ratio, claim.of, claim.to, claim.claimed, what)
        return f"{said}\n{sentence}\n"
    return said


def state_section(results: ByLabel) -> str:
    """Return how many steps share their state, over a whole training (GAGPO, table 5)."""
    lines = [
        [
            label,
            *(_mean_of_curves(results_of_label, name, scale) for name, scale in SHARING.values()),
        ]
        for label, results_of_label in results.items()
        if all("singleton_share" in one.get("curve", {}) for one in results_of_label)
    ]
    return (
        "Groups of equal states, mean over updates and seeds:\n\n"
        + tables.table(["variant", *SHARING], lines)
        if lines
        else ""
    )


SHARING = {
    "steps with a state of their own (%)": ("singleton_share", 100),
    "steps of a group": ("mean_state_group", 1),
}


def _mean_of_curves(results: Sequence[Result], name: str, scale: float) -> str:
    return f"{scale * np.mean([np.mean(one['curve'][name]) for one in results]):.1f}"


def curves_of(results: ByLabel) -> dict[str, list[Mapping[str, list[float]]]]:
    """Return the training curves of each label that has them, one a seed."""
    return {
        label: [one["curve"] for one in results_of_label]
        for label, results_of_label in results.items()
        if all("curve" in one for one in results_of_label)
    }


# ---------------------------------------------------------------- figures


def _draw(
    page: Path, suite: Suite, results: ByLabel, resamples: int
) -> tuple[list[tuple[str, str]], list[str]]:
    """Draw the figures of all parts; return title and file of each, and why others are missing."""
    drawn, missing = [], []
    for key, part in suite.parts.items():
        results_of_part = {label: results[label] for label in part.variants if label in results}
        for name in part.figures:
            file = f"{page.stem}-{key}-{slug(name)}.png"
            try:
                run_figures.save(
                    FIGURES[name](part, results_of_part, suite, resamples), page.with_name(file)
                )
                drawn.append((f"{key}: {name.replace('_', ' ')}", file))
            except ValueError as error:
                missing.append(f"{key}, {name.replace('_', ' ')}: {error}")
                page.with_name(file).unlink(missing_ok=True)
    return drawn, missing


def _entropies(part: Part, results: ByLabel, suite: Suite, resamples: int) -> Any:
    """Draw the first training iterations of all variants, which start from one policy."""
    by_tool: dict[str, list[Any]] = {}
    every = [
        one
        for results_of_label in results.values()
        for one in results_of_label
        if "entropy_by_tool" in one
    ]
    for one in every:
        for tool, profile in one["entropy_by_tool"]["first"].items():
            by_tool.setdefault(tool, []).append(profile)
    seeds = len({one["seed"] for one in every})
    profiles = {tool: pooled(profiles_of_tool) for tool, profiles_of_tool in by_tool.items()}
    return paper_figures.entropy_by_tool(profiles, seeds, "first iterations of all variants")


def _by(measures: Sequence[str], title: str, spent: str = "") -> Callable[..., Any]:
    def draw(part: Part, results: ByLabel, suite: Suite, resamples: int) -> Any:
        against = spent or suite.budget
        return paper_figures.curves_by(curves_of(results), measures, against, title)

    return draw


def _scaling(part: Part, results: ByLabel, suite: Suite, resamples: int) -> Any:
    rows = [
        {
            "value": part.variants[label].value,
            **tables.table_rows(list(results_of_label), resamples)[0],
        }
        for label, results_of_label in results.items()
    ]
    if len(rows) < 2:
        raise ValueError("fewer than two of its variants have results")
    return paper_figures.scaling(rows, part.axis, _most(results))


def _pass_at_k(part: Part, results: ByLabel, suite: Suite, resamples: int) -> Any:
    rows = {
        label: [
            {"k": int(k), **_mean([one["pass_at"][k] for one in results_of_label], resamples)}
            for k in results_of_label[0]["pass_at"]
        ]
        for label, results_of_label in results.items()
        if all(one.get("pass_at") for one in results_of_label)
    }
    return paper_figures.pass_at_k(rows, _most(results))


def _mean(values: Sequence[Sequence[float]], resamples: int) -> dict[str, float]:
    values_SQ = np.array(values, np.float64)
    low, high = interval_over_seeds(values_SQ, resamples, seed=0)
    return {"mean": float(values_SQ.mean()), "low": low, "high": high}


def _advantages(part: Part, results: ByLabel, suite: Suite, resamples: int) -> Any:
    histograms = {
        label: [one.get("advantages", []) for one in results_of_label]
        for label, results_of_label in results.items()
    }
    return paper_figures.advantages(histograms)


def _state_groups(part: Part, results: ByLabel, suite: Suite, resamples: int) -> Any:
    counts_by_label = {}
    for label, results_of_label in results.items():
        if all(one.get("state_groups") for one in results_of_label):
            names = results_of_label[0]["state_groups"]
            counts_by_label[label] = {
                name: float(sum(sum(one["state_groups"][name]) for one in results_of_label))
                for name in names
            }
    return paper_figures.state_groups(counts_by_label, _most(results))


def _most(results: ByLabel) -> int:
    return max(map(len, results.values()), default=0)


FIGURES: dict[str, Callable[[Part, ByLabel, Suite, int], Any]] = {
    "entropy_by_tool": _entropies,
    "success_by_calls": _by(["success"], "Success in training against what was spent"),
    "scaling": _scaling,
    "pass_at_k": _pass_at_k,
    "success_by_update": _by(["success"], "Success in training", "iteration"),
    "episode_length": _by(["episode_steps"], "Length of episodes", "iteration"),
    "dynamics": _by(paper_figures.DYNAMICS, "Training dynamics", "iteration"),
    "advantages": _advantages,
    "state_groups": _state_groups,
}
