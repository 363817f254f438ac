"""What a game's grammar says, as TextWorld's own evaluation words it, in a fifth of its time.

TextWorld parses the rules and queries of a grammar anew, and copies what they refer to, whenever it
says something; that is most of the time of an act. Here a text is parsed once in a process and
nothing is copied. Tests hold both against each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Scope:
    """What a text may refer to."""

    rules: dict[str, list[Any]]  # of the grammar, by symbol: textworld's ProductionRule
    state: Any  # textworld's PddlState
    entities: dict[str, Any]  # id -> textworld's EntityInfo
    mapping: dict[Any, Any]  # placeholder -> variable

    def matches(self, query: str) -> Iterator[Scope]:
        """Yield this scope with each assignment for which the facts of a query hold."""
        for mapping in self.state.all_assignments(_query(query), self.mapping):
            yield replace(self, mapping=self.mapping | mapping)


def say(text: str, scope: Scope) -> str:
    """Return a text of the grammar, such as "#look.feedback#", with everything in it filled in."""
    return _joined(_symbols(text), scope).strip()


def _joined(symbols: list[Any], scope: Scope) -> str:
    return "".join(_WORDS[type(symbol).__name__](symbol, scope) for symbol in symbols)


def _rule(symbol: object, scope: Scope) -> str:
    """Return what a symbol's first rule says whose condition holds."""
    from textworld.envs.pddl.textgen import CSGUnknownSymbolError

    for rule in scope.rules.get(str(symbol), []):
        if not rule.condition or any(True for _ in scope.matches(rule.condition)):
            return _joined(rule.rhs, scope)
    raise CSGUnknownSymbolError(symbol)


def _value(symbol: Any, scope: Scope) -> str:
    """Return the value of an expression, such as {r.name}."""
    variables = {each.name: scope.entities[it.name] for each, it in scope.mapping.items()}
    return str(symbol.derive({"variables": variables})[0])


def _alternatives(symbol: Any, scope: Scope) -> list[str]:
    """Return what an expression says for each assignment of its query, if it has one."""
    scopes = scope.matches(symbol.given) if symbol.given else [scope]
    return [_joined([symbol.expression], each) for each in scopes]


def _listed(symbol: Any, scope: Scope) -> str:
    """Return alternatives with the grammar's separators."""
    alternatives = _alternatives(symbol.symbol, scope)
    if not alternatives:
        return _rule("list_empty", scope)
    *first, last = alternatives
    if not first:
        return last
    between = _rule("list_separator", scope).join(first)
    return between + _rule("list_last_separator", scope) + last


_WORDS: dict[str, Callable[[Any, Scope], str]] = {
    "TerminalSymbol": lambda symbol, scope: str(symbol),
    "NonterminalSymbol": _rule,
    "EvalSymbol": _value,
    "ConditionalSymbol": lambda symbol, scope: "".join(_alternatives(symbol, scope)),
    "ListSymbol": _listed,
}


@functools.lru_cache(maxsize=4096)
def _symbols(text: str) -> list[Any]:
    from textworld.envs.pddl.textgen import _parse_and_convert

    symbols: list[Any] = _parse_and_convert(text, rule_name="symbols")
    return symbols


@functools.lru_cache(maxsize=4096)
def _query(text: str) -> Any:
    from textworld.logic import Rule

    return Rule.parse_conjunctive_query(text)
