"""Try agents without training: prompts around any policy, or around a model behind a server.

``beamline agents RECIPE --agents direct react rag`` lets each agent do the recipe's
held-out tasks with the recipe's tools, world and limits, and writes the table of what each reached
and what it took to ``reports/<recipe>/agents.md`` and ``.json``. ``--model`` names the policies:
those of the recipe (initial, cold_start, trained), folders, or the address of a server that speaks
OpenAI's protocol. ``--sets gsm8k/test bamboogle/test`` asks other questions, by rows of
params/benchmarks.yaml. ``--model initial trained --agents bare --sets gsm8k/test`` is what training
has changed on a set that it has not seen; ``--set dialogue.turn_tokens=256`` gives longer turns.

``--pages snippets full condensed`` compares how documents enter the context of agents that search:
as the search shows them, with pages in full, or with pages condensed, by each model of
``--condensers``.

What one agent gave on one set is computed once: an interrupted call resumes when it is made again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows import end_import_phase, exit_fast
from flows.runs import git, ledger_mirror
from flows.tracking import agent_report
from flows.tracking.progress import Progress
from flows.tracking.run import stage_run
from params.given_numbers import above_zero, from_zero
from params.run_folders import RunFolders
from params.schema.chat import ChatBudget, ChatLimits
from params.schema.recipe import Recipe
from tasks import recipes
from tasks.agents import AGENTS, prompts, table
from tasks.agents.contract import BROWSER, CONDENSED, FULL, PAGES, SEARCHES, SNIPPETS
from tasks.agents.models import PUBLISHED, TRAINED, ModelChoice, choose, open_model
from tasks.agents.running import Models
from tasks.agents.sets import questions_of
from tasks.chat.contract import ChatModel
from tasks.environments import open_environment
from tasks.environments.contract import OpenEnvironment
from tasks.evaluation.try_agent import Described, TryInputs, try_agent
from tasks.ledger import artifacts, keys
from tasks.ledger.artifacts import Artifact, Record
from tasks.ledger.substeps import Ledger, SubStep
from tasks.scorers import sources
from tasks.trees import panels
from tasks.trees.tables import read_rows
from tasks.trees.tree import Question
from tasks.trees.words import printable

INTERRUPTED = 130  # the exit status of a shell after SIGINT
COUNTS = ("questions", "trials", "page_characters", "concurrency", "most_calls", "most_tokens")
SHORT = 8  # letters of a key in the name of a folder
OWN = "policy"  # in --condensers: the model that is asked
TAGS = "tags"  # the dialect


@dataclass(frozen=True)
class AgentVariant:
    """A row's agent: how pages enter its context, and who condenses them."""

    agent: str
    pages: str = SNIPPETS
    condenser: str = OWN
    model: str = TRAINED

    def label(self, condenser: str, oracle: bool, of_model: str = "") -> str:
        """Return how the table names it. ``condenser``: the name of that model.

        ``of_model``: the name of the model that is asked, where there are several.
        """
        pages = {
            SNIPPETS: "",
            FULL: ", pages in full",
            CONDENSED: f", pages condensed by {condenser}",
        }
        marked = ", oracle" if oracle and AGENTS[self.agent].retries else ""
        return ", ".join(filter(None, [self.agent + pages[self.pages] + marked, of_model]))


def variants(
    agents: Sequence[str],
    pages: Sequence[str],
    condensers: Sequence[str],
    models: Sequence[str] = (TRAINED,),
) -> list[AgentVariant]:
    """Return the variants of each agent; ``pages`` matter to agents that can open some.

    Those that differ in the model alone stand one below the other.
    """
    result = []
    for agent in dict.fromkeys(agents):
        ways = pages if "page" in AGENTS[agent].prompts else [SNIPPETS]
        for way in dict.fromkeys(ways):
            of_way = condensers if way == CONDENSED else [OWN]
            result += [
                AgentVariant(agent, way, condenser, model)
                for condenser in dict.fromkeys(of_way)
                for model in dict.fromkeys(models)
            ]
    return result


@dataclass(frozen=True)
class Trying:
    """What all variants share."""

    name: str  # of the recipe
    recipe: Recipe
    args: argparse.Namespace
    sets: Mapping[str, Sequence[Question]]
    choices: Mapping[str, ModelChoice]  # by the word that names a model or a condenser
    identities: Mapping[str, Described]  # of the same, for keys; a digest takes a while
    corpus: Artifact | None
    ledger: Ledger

    def label(self, variant: AgentVariant) -> str:
        """Return how the table names a variant."""
        several = len(self.args.model) > 1
        of_model = variant.model if variant.model in PUBLISHED else self._name(variant.model)
        condenser = self._name(condenser_of(variant))
        return variant.label(condenser, self.args.oracle, of_model if several else "")

    def _name(self, word: str) -> str:
        return self.choices[word].name

    @property
    def model_names(self) -> str:
        """Return the names of the models that are asked."""
        return ", ".join(self._name(word) for word in self.args.model)

    def inputs(self, variant: AgentVariant, questions: Sequence[Question]) -> TryInputs:
        """Return what decides the results of a variant on a set."""
        kind = AGENTS[variant.agent]
        return TryInputs(
            agent=variant.agent,
            model=self.identities[variant.model],
            condenser=self.identities[condenser_of(variant)],
            questions=panels.in_order(questions, "test", "agents").digest,
            prompts={
                **prompts.load(kind.prompts, self.args.prompts),
                **prompts.load_acts(self.recipe.environment, self.args.prompts),
            },
            pages=variant.pages,
            page_characters=self.args.page_characters,
            trials=self.args.trials if kind.retries else 1,
            oracle=self.args.oracle and kind.retries,
            failed_as_wrong=self.args.failed_as_wrong,
            acting=recipes.agent_of(self.recipe),
            evaluate=self.recipe.evaluate,
            corpus=self.corpus,
            scorers=sources({question.scorer for question in questions}),
        )

    def _stage(self, variant: AgentVariant, name: str) -> str:
        """Return the ledger's stage of a variant on a set, within which a change is explained."""
        names = self._name(variant.model), self._name(condenser_of(variant))
        words = (*names, variant.pages, name)
        return f"agents/{variant.agent}-{keys.key_of({'of': '/'.join(words)})[:SHORT]}"

    def result(
        self,
        variant: AgentVariant,
        name: str,
        models: Mapping[str, Any],
        environment: OpenEnvironment,
    ) -> Record:
        """Return the record of a variant on a set, computed now or found."""
        questions = self.sets[name]
        step = SubStep(self.name, self._stage(variant, name), 0, self.recipe.seed, self.ledger)
        progress = Progress(f"{self.label(variant)}, {name}", len(questions), unit="questions")
        record: Record = try_agent(
            step,
            self.inputs(variant, questions),
            questions=questions,
            models=Models(models[variant.model], models[condenser_of(variant)]),
            environment=environment,
            advance=progress.advance,
        )
        progress.reach(len(questions), {"success": record["success"]})
        progress.close()
        return record


def condenser_of(variant: AgentVariant) -> str:
    """Return the word of the model that condenses."""
    return variant.model if variant.condenser == OWN else variant.condenser


def run(trying: Trying) -> Path:
    """Try all variants on all sets; write the table after each, and return its file."""
    name, recipe, args = trying.name, trying.recipe, trying.args
    all_variants = variants(args.agents, args.pages, args.condensers, args.model)
    results: dict[str, list[dict[str, Any]]] = {}  # in the order of the table
    files: list[str] = []  # with results whose model failed
    page = RunFolders(name).reports / f"{args.report}.md"
    with ExitStack() as stack:
        opened = stage_run(name, "agents", _key(trying, all_variants), _tags(args))
        tracked = stack.enter_context(opened)
        workers, corpus = recipe.machine.threads, RunFolders(name).corpus
        environment = stack.enter_context(
            open_environment(_tools(recipe, args), recipe.environment, workers, corpus)
        )
        for variant, models in _with_models(trying, all_variants):
            label = trying.label(variant)
            for of_set in trying.sets:
                record = trying.result(variant, of_set, models, environment)
                file = Path(artifacts.output(record, "results").path)
                rows_of_set = read_rows(file)
                files += [str(file)] * any(row["fault"] for row in rows_of_set)
                results.setdefault(label, []).extend({**row, "set": of_set} for row in rows_of_set)
                shown = _in_order(trying, all_variants, results)
                rows = table.summarise(shown, recipe.evaluate.bootstrap, recipe.seed)
                why = table.reasons(shown, files)
                agent_report.write(page, name, trying.model_names, rows, why)
        agent_report.log(tracked, page, rows, at=record["finished"])
    return page


def _with_models(
    trying: Trying, all_variants: Sequence[AgentVariant]
) -> Iterator[tuple[AgentVariant, dict[str, ChatModel]]]:
    """Yield each variant with its models, those of one model together: it is loaded once."""
    limits, account = _limits(trying.args), f"{trying.name}-agents"
    for model in trying.args.model:
        of_model = [each for each in all_variants if each.model == model]
        words = dict.fromkeys([model, *map(condenser_of, of_model)])
        with ExitStack() as stack:
            models = {
                word: stack.enter_context(
                    open_model(trying.choices[word], trying.recipe, limits, account)
                )
                for word in words
            }
            for variant in of_model:
                yield variant, models


def _in_order(
    trying: Trying, all_variants: Sequence[AgentVariant], results: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the results that there are in the order of the variants."""
    labels = map(trying.label, all_variants)
    return {label: results[label] for label in labels if label in results}


def _tools(recipe: Recipe, args: argparse.Namespace) -> dict[str, Any]:
    """Return the recipe's tools; a browser gives pages as they are, up to ``--page-characters``."""
    tools = dict(recipe.tools)
    if BROWSER in tools:
        changed = {"condense": None, "characters": args.page_characters}
        tools[BROWSER] = tools[BROWSER].model_copy(update=changed)
    return tools


def _limits(args: argparse.Namespace) -> ChatLimits:
    """Return how servers are asked."""
    budget = ChatBudget(calls=args.most_calls, tokens=args.most_tokens)
    return ChatLimits(
        concurrency=args.concurrency,
        timeout_seconds=args.timeout,
        retries=args.retries,
        budget=budget,
    )


def _key(trying: Trying, all_variants: Sequence[AgentVariant]) -> str:
    """Return the key of the whole call."""
    step = SubStep(trying.name, "agents", 0, trying.recipe.seed)
    of_all = {
        f"{variant}/{name}": str(step.place(try_agent, trying.inputs(variant, questions)))
        for variant in all_variants
        for name, questions in trying.sets.items()
    }
    return keys.key_of(of_all)


def _tags(args: argparse.Namespace) -> dict[str, str]:
    checkout = git.revision()
    return {
        "model": " ".join(args.model),
        "mlflow.source.git.commit": checkout.commit,
        "mlflow.source.name": "flows/commands/agents.py",
        "mlflow.source.type": "LOCAL",
        "git.dirty": str(checkout.dirty).lower(),
    }


# ---------------------------------------------------------------- the command


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="beamline agents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("recipe", help="params/<recipe>.yaml: tools, world and limits")
    add("--agents", nargs="+", choices=AGENTS, help="else all that can do the tasks")
    add(
        "--model",
        nargs="+",
        default=[TRAINED],
        metavar="WORD",
        help=f"each of {', '.join(PUBLISHED)}, a folder, or http://... (or URL#NAME); else trained",
    )
    add("--name", default="", help="of the model at a server, or of a policy in tables")
    add("--key-variable", metavar="VAR", help="environment variable with the server's key")
    add("--concurrency", type=int, default=8, metavar="N", help="requests at once, at most (8)")
    add("--timeout", type=above_zero, default=120.0, metavar="SECONDS", help="of an attempt (120)")
    add("--retries", type=from_zero, default=4, metavar="N", help="of a request that failed (4)")
    add("--most-calls", type=int, metavar="N", help="budget of servers' calls, over all calls")
    add("--most-tokens", type=int, metavar="N", help="budget of their tokens")
    add("--sets", nargs="+", default=[], metavar="SET", help="kinds, or set/split of benchmarks")
    add("--questions", type=int, metavar="N", help="of each set, at most")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="values of the recipe, for this")
    add("--trials", type=int, default=3, metavar="N", help="of reflexion, at most (3)")
    add("--oracle", action="store_true", help="the gold answer decides on another trial")
    add("--failed-as-wrong", action="store_true", help="count tasks that the model did not answer")
    add("--pages", nargs="+", choices=PAGES, default=[SNIPPETS], help="how documents are read")
    add(
        "--condensers",
        nargs="+",
        default=[OWN],
        metavar="WORD",
        help=f"who condenses pages: {OWN}, a folder, or URL#NAME of a server's model",
    )
    add("--page-characters", type=int, default=20_000, metavar="N", help="of pages, at most")
    add("--report", default="agents", metavar="NAME", help="file in reports/<recipe> (agents)")
    add("--prompts", type=Path, default=prompts.FOLDER, metavar="FOLDER", help="else %(default)s")
    return parser.parse_args(arguments)


def checked(args: argparse.Namespace, ledger: Ledger) -> Trying:
    """Read and check everything before anything starts.

    Raises ValueError with all faults, one line each.
    """
    params = Path("params")
    recipe = recipes.load_changed(args.recipe, args.set, params)
    args.agents = args.agents or [name for name in AGENTS if not _unfit(name, recipe)]
    faults = [fault for name in args.agents for fault in _unfit(name, recipe)]
    faults += _option_faults(args, recipe)
    placeholders_of = {
        name: given for one in args.agents for name, given in AGENTS[one].prompts.items()
    }
    sets: Mapping[str, Sequence[Question]] = {}
    args.model = list(dict.fromkeys(args.model))
    choices, choice_faults = _choices(args)
    try:
        prompts.load(placeholders_of, args.prompts)
        prompts.load_acts(recipe.environment, args.prompts)
    except ValueError as error:
        faults.append(str(error))
    try:
        sets = questions_of(args.recipe, recipe, args.sets, args.questions, params)
    except ValueError as error:
        faults.append(str(error))
    if faults := [*faults, *choice_faults]:
        raise ValueError("\n".join(faults))
    corpus = RunFolders(args.recipe).corpus
    return Trying(
        name=args.recipe,
        recipe=recipe,
        args=args,
        sets=sets,
        choices=choices,
        identities={word: choice.identity() for word, choice in choices.items()},
        corpus=Artifact.at(corpus) if corpus.exists() else None,
        ledger=ledger,
    )


def _option_faults(args: argparse.Namespace, recipe: Recipe) -> list[str]:
    """Return what is wrong with numbers and pages on the command line, one line each."""
    numbers = {name: getattr(args, name) for name in COUNTS}
    faults = [
        f"--{name.replace('_', '-')} {value}: give a number above 0"
        for name, value in numbers.items()
        if value is not None and value < 1
    ]
    if set(args.pages) != {SNIPPETS} and BROWSER not in recipe.tools:
        faults.append(
            f"--pages {' '.join(args.pages)}: the recipe has no tool that opens pages: add "
            f"tools.{BROWSER} to params/{args.recipe}.yaml"
        )
    return faults


def _choices(args: argparse.Namespace) -> tuple[dict[str, ModelChoice], list[str]]:
    """Return the model that each word stands for, and a line for each word that stands for none."""
    choices: dict[str, ModelChoice] = {}
    faults = []
    condensers = [word for word in args.condensers if word != OWN]
    if args.name and len(args.model) > 1:
        faults.append(f"--name {args.name}: it names one model; of several, write URL#NAME")
    for option, words in (("--model", args.model), ("--condensers", condensers)):
        for word in words:
            server_or_policy, _, name = word.partition("#")
            given = name or (args.name if option == "--model" else "")
            try:
                choices[word] = choose(server_or_policy, args.recipe, given, args.key_variable)
            except ValueError as error:
                faults.append(f"{option}: {error}")
    return choices, faults


def _unfit(agent: str, recipe: Recipe) -> list[str]:
    """Return why an agent cannot do the tasks of a recipe."""
    kind, faults = AGENTS[agent], []
    if recipe.environment and not kind.in_worlds:
        faults.append(f"--agents {agent}: it answers questions, and cannot act in a world")
    if kind.needs_search and not set(SEARCHES) & set(recipe.tools):
        faults.append(f"--agents {agent}: it searches, and the recipe's tools have no search")
    if kind.in_tags and TAGS not in recipe.dialect:
        faults.append(
            f"--agents {agent}: it calls tools in tags, and the recipe's dialect has none"
        )
    return faults


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status. 2: nothing can be tried."""
    args = parsed(arguments)
    try:
        with ledger_mirror.opened() as ledger:
            trying = checked(args, ledger)
            from tasks.policy.machine import use_machine  # with torch: faults are told before

            use_machine(trying.recipe.machine)
            page = run(trying)
    except KeyboardInterrupt:
        print("agents: interrupted; the same call resumes", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, RuntimeError, OSError) as error:
        print(f"agents: {printable(str(error))}", file=sys.stderr)
        return 2
    print(f"\n{page.read_text()}")
    return 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
