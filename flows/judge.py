"""Ask a recipe's judge about answers that people have graded, and print how far it agrees.

``python -m flows.judge RECIPE --labelled FILE``. FILE is JSON Lines: ``question``, ``accepted`` (a
text, or a list of texts), ``answer``, and ``right`` (true or false). Printed are accuracy with a
95 % interval (Wilson), Cohen's kappa, the table of confusion, missing verdicts, calls and tokens,
for the vote and for each model. Verdicts that were asked for before are taken from disk.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows import end_import_phase, exit_fast
from params.schema.judge import Judge
from tasks import settings
from tasks.chat.cached import Cached
from tasks.rewards import judging
from tasks.scorers import judge
from tasks.scorers.judge import Asked, Vote

PARAMS = Path("params")
FIELDS = {"question": str, "accepted": list, "answer": str, "right": bool}
SHOWN = 80  # characters of a value in a message


@dataclass(frozen=True)
class Labelled:
    """An answer, and whether it is right."""

    asked: Asked
    right: bool


@dataclass(frozen=True)
class Agreement:
    """How verdicts compare with labels."""

    answers: int
    agreed: int
    low: float  # of the interval of the accuracy
    high: float
    kappa: float  # nan where labels and verdicts are all alike
    confusion: list[list[int]]  # [label wrong, right][verdict wrong, right]
    without_verdict: int

    @property
    def accuracy(self) -> float:
        """Return the share of answers on which verdict and label agree."""
        return self.agreed / self.answers


def agreement(labels: Sequence[bool], found: Sequence[Mapping[str, float]]) -> Agreement:
    """Compare the breakdowns of scores (tasks/scorers/judge.py) with the labels, in order."""
    from scipy.stats import binomtest
    from sklearn.metrics import cohen_kappa_score, confusion_matrix

    verdicts = [breakdown["score"] == 1 for breakdown in found]
    agreed = sum(label == verdict for label, verdict in zip(labels, verdicts, strict=True))
    bounds = binomtest(agreed, len(labels)).proportion_ci(method="wilson")
    alike = len({*labels, *verdicts}) == 1
    return Agreement(
        answers=len(labels),
        agreed=agreed,
        low=float(bounds.low),
        high=float(bounds.high),
        kappa=float("nan") if alike else float(cohen_kappa_score(labels, verdicts)),
        confusion=confusion_matrix(labels, verdicts, labels=[False, True]).tolist(),
        without_verdict=sum(breakdown["without_verdict"] > 0 for breakdown in found),
    )


# ---------------------------------------------------------------- file of labels


def load_labelled(file: Path) -> list[Labelled]:
    """Read a file of labelled answers. Raises ValueError with a line for each fault."""
    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    found, faults = [], []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(_labelled(json.loads(line)))
        except ValueError as error:
            faults.append(f"{file}, line {number}: {error}")
    if not lines:
        faults.append(f"{file} is empty: write an object of {', '.join(FIELDS)} in each line")
    if faults:
        raise ValueError("\n".join(faults))
    return found


def _labelled(entry: Any) -> Labelled:
    """Return the answer of one line. Raises ValueError with field, value and remedy."""
    if not isinstance(entry, dict):
        raise ValueError(f"{entry!r:.{SHOWN}} is no object: write {', '.join(FIELDS)}")
    accepted = entry.get("accepted")
    values = {**entry, "accepted": [accepted] if isinstance(accepted, str) else accepted}
    for field, kind in FIELDS.items():
        value = values.get(field)
        if not isinstance(value, kind):
            raise ValueError(f"'{field}' = {value!r:.{SHOWN}}: write a {kind.__name__}")
    if not all(isinstance(form, str) for form in values["accepted"]) or not values["accepted"]:
        raise ValueError(f"'accepted' = {accepted!r:.{SHOWN}}: write a text, or a list of texts")
    asked = Asked(values["question"], tuple(values["accepted"]), values["answer"])
    return Labelled(asked, values["right"])


# ---------------------------------------------------------------- report


def by_model(chosen: Judge, votes: Sequence[Vote], asked: Sequence[Asked]) -> dict[str, Any]:
    """Return the breakdowns of the vote, and those of each model alone where there are several."""
    models = chosen.models if len(chosen.models) > 1 else ()
    alone = {
        model.name: judge.breakdowns(
            [vote for vote in votes if vote.model == model.name],
            asked,
            chosen.model_copy(update={"models": (model,)}),
        )
        for model in models
    }
    title = "vote" if alone else chosen.models[0].name
    return {title: judge.breakdowns(votes, asked, chosen)} | alone


def report(found: Agreement) -> str:
    """Return an agreement as text."""
    (right_no, wrong_yes), (wrong_no, right_yes) = found.confusion
    return (
        f"  accuracy {found.accuracy:.1%} ({found.agreed} of {found.answers}), 95 % interval "
        f"{found.low:.1%} to {found.high:.1%}\n"
        f"  Cohen's kappa {found.kappa:.3f}\n"
        "  label   verdict right   verdict wrong\n"
        f"  right   {right_yes:13}   {wrong_no:13}\n"
        f"  wrong   {wrong_yes:13}   {right_no:13}\n"
        f"  answers without a verdict, which count as wrong: {found.without_verdict}"
    )


def spending(model: Cached) -> str:
    """Return what a model was asked, as text."""
    used = model.usage
    return (
        f"{model.name}: {used.asked} requests asked, {used.cached} taken from disk; "
        f"{used.prompt_tokens} tokens of prompts, {used.completion_tokens} of verdicts"
    )


def run(name: str, file: Path) -> None:
    """Ask the judge of a recipe about a labelled file, and print the agreement.

    Raises ValueError for a faulty recipe or file, and RuntimeError where the judge cannot be asked.
    """
    recipe = settings.load(name, PARAMS)
    chosen = recipe.judge
    if chosen is None:
        raise ValueError(f"params/{name}.yaml: judge is null: write the section (docs/judge.md)")
    template = judge.load_prompt(PARAMS / chosen.prompt)
    labelled = load_labelled(file)
    asked = [one.asked for one in labelled]
    from tasks.exam import judges_of  # with torch: faults are told before

    with judging.open_judge(chosen, template, name, judges_of(recipe)) as opened:
        opened.judge(asked)
        for label, found in by_model(chosen, opened.votes, asked).items():
            print(label)
            print(report(agreement([one.right for one in labelled], [found[one] for one in asked])))
        for model in opened.models:
            if isinstance(model, Cached):
                print(spending(model))


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status. 2: a recipe or a file with faults."""
    parser = argparse.ArgumentParser(prog="python -m flows.judge", description=__doc__)
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe of params/ with a judge")
    parser.add_argument("--labelled", metavar="FILE", type=Path, required=True, help="JSON Lines")
    chosen = parser.parse_args(arguments)
    try:
        run(chosen.recipe, chosen.labelled)
    except (ValueError, RuntimeError) as error:
        print(f"judge: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
