"""ALFWorld's engine: TextWorld's state of a PDDL problem, with states that can be copied.

ALFWorld (arXiv 2010.03768) plays a problem with TextWorld, which keeps its states in the library of
Fast Downward and words them with a grammar. TextWorld's own environment words every admissible
command anew at each step, which is most of its time, and cannot go back. Here the library's states
are used by their numbers: episodes of a problem share one library, and commands are worded once,
by wording.py.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import tempfile
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.environments.alfworld import engine_library, fast_downward_tasks
from tasks.environments.alfworld.fast_downward_tasks import GroundedTask
from tasks.environments.alfworld.wording import Scope, say

GAMES = 96  # problems that a process keeps ready
PLACEHOLDER = re.compile(r"\[\{[^\]]*\}\]|\{\w+\}")  # of a name in a command's template
INTRODUCTION = "#look.feedback#"  # the grammar's symbol of a first look at the room
REMEDY = "install the packages of the extra 'worlds', as make run does: pip install -e '.[worlds]'"


def check_installed() -> None:
    """Raise RuntimeError with the remedy where ALFWorld's packages are missing."""
    try:
        with _data_folder():
            import alfworld  # noqa: F401
            import fast_downward  # noqa: F401
            import textworld  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"the environment household needs {error.name}: {REMEDY}") from error


@contextmanager
def _data_folder() -> Iterator[None]:
    """Give ALFWorld a folder while it is imported: else it makes one in the user's home."""
    given = os.environ.get("ALFWORLD_DATA")
    os.environ["ALFWORLD_DATA"] = given or tempfile.gettempdir()
    try:
        yield
    finally:
        if given is None:
            del os.environ["ALFWORLD_DATA"]


def package_folder() -> Path:
    """Return the folder of the package alfworld. Raises RuntimeError where it is missing."""
    check_installed()
    import alfworld

    return Path(alfworld.__file__).parent


@functools.lru_cache(maxsize=1)
def domain() -> str:
    """Return ALFWorld's domain in PDDL."""
    return (package_folder() / "data/alfred.pddl").read_text()


@functools.lru_cache(maxsize=1)
def grammar() -> str:
    """Return ALFWorld's grammar."""
    return (package_folder() / "data/alfred.twl2").read_text()


@dataclass(frozen=True)
class Command:
    """A command that is admissible in a state, and the operator of the library that does it."""

    text: str
    operator: int
    effects: int  # how many atoms it changes
    feedback: str  # the grammar's symbol of what is said after it
    mapping: Any  # placeholder -> variable


@dataclass
class Game:
    """A problem that is ready in this process; its library is free when nobody holds it."""

    library: Any
    first: Any  # textworld's PddlState at the beginning
    number: int  # of the library's first state
    entities: dict[str, Any]  # id -> textworld's EntityInfo
    task: GroundedTask
    can_plan: bool = False  # whether the planner has the problem
    commands: dict[int, dict[str, Command]] = field(default_factory=dict)  # by number of the state
    texts: dict[tuple[Any, ...], str] = field(default_factory=dict)  # of commands


@functools.lru_cache(maxsize=GAMES)
def open_game(problem: str, domain: str, grammar: str) -> Game:
    """Return the game of a PDDL problem. Raises RuntimeError where packages are missing."""
    check_installed()
    library = engine_library.taken()
    task = fast_downward_tasks.parsed(domain, problem)
    state = _first_state(library, task, problem, _logic(domain, grammar))
    game = Game(library, state, library.get_state_id(), _entities(state), task)
    closing = weakref.finalize(game, engine_library.give_back, library)
    closing.atexit = False  # the process ends with its libraries
    return game


def _first_state(library: Any, task: GroundedTask, problem: str, logic: Any) -> Any:
    """Return textworld's PddlState of a problem, which the library has loaded.

    Its own constructor also translates the problem for the planner, which is half of its time and
    which only ``Play.plan`` needs.
    """
    import fast_downward
    from textworld.envs.pddl.logic import Atom, PddlState
    from textworld.logic import Proposition, State, Type, Variable

    state = PddlState.__new__(PddlState)
    State.__init__(state, _no_logic())
    state._logic, state.downward_lib, state.pddl_problem = logic, library, problem
    state.task, state.sas = task.task, task.sas(for_planner=False)
    library.load_sas(state.sas.encode())
    state._actions = {action.name: action for action in state.task.actions}
    for kind in state.task.types:
        with suppress(ValueError):  # known from another problem
            logic.types.add(Type(kind.name, kind.supertype_names))
    state.name2type = {each.name: each.type_name for each in state.task.objects}
    for atom in state.task.init:  # facts that never change, and those of the beginning
        if isinstance(atom, fast_downward.translate.pddl.Atom) and atom.predicate != "=":
            arguments = [Variable(each, state.name2type[each]) for each in atom.args]
            state.add_fact(Proposition(atom.predicate, arguments))
    atoms = (Atom * library.get_state_size())()
    library.get_state(atoms)
    facts = (atom.get_fact(state.name2type) for atom in atoms)
    state.add_facts([fact for fact in facts if not fact.is_negation])
    return state


def _no_logic() -> Any:
    """Return the logic that textworld's State asks for, and that PddlState does not use."""
    from textworld.logic import GameLogic

    return GameLogic()


@functools.lru_cache(maxsize=4)
def _logic(domain: str, grammar: str) -> Any:
    from textworld.envs.pddl.logic import GameLogic

    return GameLogic(domain=domain, grammar=grammar)


def _entities(state: Any) -> dict[str, Any]:
    """Return what the grammar says of each thing: ALFWorld's names, such as "cabinet 3"."""
    with _data_folder():
        from alfworld.agents.utils.misc import Demangler
    from textworld.generator.game import EntityInfo

    entities = {
        variable.name: EntityInfo(variable.name, variable.type)
        for fact in state.facts
        for variable in fact.arguments
    }
    names = Demangler(game_infos=entities)
    for entity in entities.values():
        entity.name = names.demangle_alfred_name(entity.id)
        entity.definite, entity.indefinite = "the", "a"
    return entities


class Play:
    """One way through a game. Copies share the game and go on by themselves."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.number = game.number
        self.state = _copied(game.first)

    def copy(self) -> Play:
        """Return an equal play that goes its own way."""
        new = copy.copy(self)
        new.state = _copied(self.state)
        return new

    def look(self) -> str:
        """Return how the grammar describes the room at the beginning."""
        return self._say(INTRODUCTION, {})

    def admissible(self) -> dict[str, Command]:
        """Return the admissible commands by their text, sorted."""
        known = self.game.commands
        if self.number not in known:
            self._enter()
            commands = {each.text: each for each in reversed(list(self._applicable()))}
            known[self.number] = dict(sorted(commands.items()))
        return known[self.number]

    def act(self, text: str) -> str | None:
        """Do a command and return what is said; None where it is not admissible."""
        command = self.admissible().get(text)
        if command is None:
            return None
        self._apply(command)
        return self._say(command.feedback, command.mapping)

    def forms(self) -> frozenset[str]:
        """Return the commands of the domain with # in place of each name, such as "open #"."""
        actions = self.state._logic.actions.values()
        return frozenset(PLACEHOLDER.sub("#", action.template) for action in actions)

    def names(self) -> frozenset[str]:
        """Return the names of the receptacles and things of the problem."""
        return frozenset(entity.name for entity in self.game.entities.values())

    def won(self) -> bool:
        """Return whether the goal holds."""
        self._enter()
        return bool(self.game.library.check_goal())

    def plan(self) -> list[str]:
        """Return the planner's commands from here to the goal; [] where it finds none."""
        if not self.game.can_plan:
            self._prepare_planner()
        self._enter()
        commands: list[str] = self.state.replan(self.game.entities)
        self._enter()  # the search has left the library elsewhere
        return commands

    def _prepare_planner(self) -> None:
        self.game.library.load_sas_replan(self.game.task.sas(for_planner=True).encode())
        self.game.can_plan = True

    def _enter(self) -> None:
        self.game.library.set_state_id(self.number)

    def _apply(self, command: Command) -> None:
        from textworld.envs.pddl.logic import Atom

        self._enter()
        changed = (Atom * command.effects)()
        self.game.library.apply_operator(command.operator, changed)
        for atom in changed:
            fact = atom.get_fact(self.state.name2type)
            self.state.remove_fact(fact.negate())
            self.state.add_fact(fact)
        self.number = self.game.library.get_state_id()

    def _applicable(self) -> Iterator[Command]:
        for action in self.state.all_applicable_actions():
            yield Command(
                self._text(action),
                action.id,
                self.state._operators[action.id].nb_effect_atoms,
                action.feedback_rule,
                action.mapping,
            )

    def _text(self, action: Any) -> str:
        """Return the text of a command, which is known once for all states.

        It depends on the placeholders in its template, and on facts that never change.
        """
        words = set(re.findall(r"\w+", action.command_template))
        used = ((ph.name, var.name) for ph, var in action.mapping.items() if ph.name in words)
        key = (action.command_template, *sorted(used))
        if key not in self.game.texts:
            names = {key: entity.name for key, entity in self.game.entities.items()}
            action.command_template = self._say(action.command_template, action.mapping)
            self.game.texts[key] = action.format_command(names)
        return self.game.texts[key]

    def _say(self, symbol: str, mapping: Any) -> str:
        rules = self.state._logic.grammar._rules
        return say(symbol, Scope(rules, self.state, self.game.entities, mapping))


def textworld_environment(problem: str) -> tuple[Any, list[str]]:
    """Return TextWorld's own environment of a problem, and its first admissible commands.

    Nothing here plays in it: tests and a benchmark compare with it.
    """
    check_installed()
    from textworld import EnvInfos
    from textworld.envs.pddl import PddlEnv

    environment = PddlEnv(EnvInfos(won=True, admissible_commands=True))
    data = {"pddl_domain": domain(), "grammar": grammar(), "pddl_problem": problem}
    environment.load(data)
    names = open_game(problem, domain(), grammar()).entities
    for entity in environment._entity_infos.values():  # as ALFWorld's wrapper names things
        entity.name = names[entity.id].name
    return environment, list(environment.reset()["admissible_commands"])


def _copied(state: Any) -> Any:
    """Return a copy of textworld's state with facts of its own."""
    new = copy.copy(state)
    new._facts = defaultdict(set, {key: set(facts) for key, facts in state._facts.items()})
    new._vars_by_name = dict(state._vars_by_name)
    new._vars_by_type = defaultdict(set, {k: set(v) for k, v in state._vars_by_type.items()})
    new._var_counts = Counter(state._var_counts)
    return new
