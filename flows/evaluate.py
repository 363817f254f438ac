"""Cold start and trained agent on the same held-out questions, side by side."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows import stage
from params import schema
from params.schema import Marks, Recipe
from tasks import figures, ledger, track
from tasks.evaluate import evaluate as compare
from tasks.evaluate import success_rows, table_rows
from tasks.ledger import Artifact, Step
from tasks.policy import use_machine
from tasks.progress import Progress
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.toolbox import Respond, open_tools


@flow(name="evaluate")
def evaluate(recipe: str) -> None:
    """Write ``reports/<recipe>`` (metrics and table) and ``data/<recipe>/evaluation.parquet``."""
    chosen = schema.load(recipe, Path("params"))
    models = Path("models", recipe)
    agents = {
        "cold_start": ledger.artifact(models / "cold_start"),
        "trained": ledger.artifact(models / "trained"),
    }
    questions = ledger.artifact(Path("data", recipe, "questions", "test.parquet"))
    corpus = ledger.artifact(Path("data", recipe, "corpus"))
    step = Step(recipe, "evaluate", 0, chosen.seed)
    use_machine(chosen.machine)
    key = ledger.stage_key(chosen, questions, corpus, *agents.values())
    with (
        track.stage(recipe, "evaluate", key, stage.run_tags()) as run,
        open_tools(chosen, Path(corpus.path)) as tools,
    ):
        rewards = {}
        for name, policy in agents.items():
            asked = Step(recipe, f"evaluate/{name}", 0, chosen.seed)
            rewards[name] = answer(chosen, asked, policy, questions, corpus, tools)
        made = compare(step=step, settings=chosen.evaluate, **rewards)
        reports = Path("reports", recipe)
        ledger.publish(ledger.of(made, "answers"), Path("data", recipe, "evaluation.parquet"))
        ledger.publish(ledger.of(made, "metrics"), reports / "metrics.json")
        ledger.publish(ledger.of(made, "table"), reports / "table.md")
        run.table(table_rows(made["rows"]), "evaluation.json")
        run.figure(figures.success_by_kind(success_rows(made["rows"])), "success_by_kind.png")


def answer(
    recipe: Recipe,
    step: Step,
    policy: Artifact,
    questions: Artifact,
    corpus: Artifact,
    tools: Respond,
) -> Artifact:
    """One agent answers the held-out questions once each; its scored answers."""
    progress = Progress(step.stage, recipe.evaluate.questions)
    rolled_out = rollout(
        step=step,
        policy=policy,
        questions=questions,
        size=recipe.evaluate.questions,
        first=0,
        attempt=0,
        branching="none",
        marks=Marks(kind="none"),
        budget=recipe.single_answers(),
        top_p=recipe.evaluate.top_p,
        dialogue=recipe.dialogue,
        machine=recipe.machine,
        limits=recipe.python,
        search=recipe.search,
        corpus=corpus,
        tools=tools,
        advance=progress.advance,
    )
    progress.close()
    trees = ledger.of(rolled_out, "trees")
    rewarded = reward(
        step=step,
        trees=trees,
        settings=recipe.reinforce.reward,
        overlong=None,
        response_tokens=recipe.dialogue.response_tokens,
    )
    return ledger.of(rewarded, "rewards")


if __name__ == "__main__":
    stage.main(evaluate)
