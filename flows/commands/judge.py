"""Ask a recipe's judge about answers that people have graded, and print how far it agrees.

``beamline judge RECIPE --labelled FILE``. FILE is JSON Lines: ``question``, ``accepted`` (a
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
from tasks import recipes
from tasks.chat.cached import Cached
from tasks.rewards import judging
from tasks.scorers import judge
from tasks.scorers.judge import Submission, Vote
from tasks.trees.words import printable

PARAMS = Path("params")
FIELDS = {"question": str, "accepted": list, "answer": str, "right": bool}
SHOWN = 80  # characters of a value in a message


@dataclass(frozen=True)
class GradedAnswer:
    """An answer, and whether it is right."""

    asked: Submission
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


def agreement(labels: Sequence[bool], breakdowns: Sequence[Mapping[str, float]]) -> Agreement:
    """Compare the breakdowns of scores (tasks/scorers/judge.py) with the labels, in order."""
    from scipy.stats import binomtest
    from sklearn.metrics import cohen_kappa_score, confusion_matrix

    verdicts = [breakdown["score"] == 1 for breakdown in breakdowns]
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
        without_verdict=sum(breakdown["without_verdict"] > 0 for breakdown in breakdowns),
    )


# ---------------------------------------------------------------- file of labels


def load_labelled(file: Path) -> list[GradedAnswer]:
    """Read a file of labelled answers. Raises ValueError with a line for each fault."""
    try:
        lines = [line for line in file.read_text().split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    answers, faults = [], []
    for number, line in enumerate(lines, start=1):
        try:
            answers.append(_labelled(json.loads(line)))
        except ValueError as error:
            faults.append(f"{file}, line {number}: {error}")
    if not lines:
        faults.append(f"{file} is empty: write an object of {', '.join(FIELDS)} in each line")
    if faults:
        raise ValueError("\n".join(faults))
    return answers


def _labelled(entry: Any) -> GradedAnswer:
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
    submission = Submission(values["question"], tuple(values["accepted"]), values["answer"])
    return GradedAnswer(submission, values["right"])


# ---------------------------------------------------------------- report


def by_model(
    judge_settings: Judge, votes: Sequence[Vote], submissions: Sequence[Submission]
) -> dict[str, Any]:
    """Return the breakdowns of the vote, and those of each model alone where there are several."""
    models = judge_settings.models if len(judge_settings.models) > 1 else ()
    alone = {
        model.name: judge.breakdowns(
            [vote for vote in votes if vote.model == model.name],
            submissions,
            judge_settings.model_copy(update={"models": (model,)}),
        )
        for model in models
    }
    title = "vote" if alone else judge_settings.models[0].name
    return {title: judge.breakdowns(votes, submissions, judge_settings)} | alone


def report(agreement: Agreement) -> str:
    """Return an agreement as text."""
    (right_no, wrong_yes), (wrong_no, right_yes) = agreement.confusion
    return (
        f"  accuracy {agreement.accuracy:.1%} ({agreement.agreed} of {agreement.answers}), "
        f"95 % interval {agreement.low:.1%} to {agreement.high:.1%}\n"
        f"  Cohen's kappa {agreement.kappa:.3f}\n"
        "  label   verdict right   verdict wrong\n"
        f"  right   {right_yes:13}   {wrong_no:13}\n"
        f"  wrong   {wrong_yes:13}   {right_no:13}\n"
        f"  answers without a verdict, which count as wrong: {agreement.without_verdict}"
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
    recipe = recipes.load(name, PARAMS)
    judge_settings = recipe.judge
    if judge_settings is None:
        raise ValueError(
            f"params/{name}.yaml: judge is null: write the section (docs/own-reward.md)"
        )
    template = judge.load_prompt(PARAMS / judge_settings.prompt)
    labelled = load_labelled(file)
    submissions = [one.asked for one in labelled]
    from tasks.evaluation.exam import judges_of  # with torch: faults are told before

    with judging.open_judge(judge_settings, template, name, judges_of(recipe)) as opened:
        opened.judge(submissions)
        for label, breakdowns in by_model(judge_settings, opened.votes, submissions).items():
            print(label)
            print(
                report(
                    agreement(
                        [one.right for one in labelled], [breakdowns[one] for one in submissions]
                    )
                )
            )
        for model in opened.models:
            if isinstance(model, Cached):
                print(spending(model))


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit status. 2: a recipe or a file with faults."""
    parser = argparse.ArgumentParser(prog="beamline judge", description=__doc__)
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe of params/ with a judge")
    parser.add_argument("--labelled", metavar="FILE", type=Path, required=True, help="JSON Lines")
    args = parser.parse_args(arguments)
    try:
        run(args.recipe, args.labelled)
    except (ValueError, RuntimeError) as error:
        print(f"judge: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
