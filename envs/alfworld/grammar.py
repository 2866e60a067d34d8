"""TextWorld's context-sensitive grammar, derived without copying and parsed once.

The stock derivation parses each template anew and deep-copies every symbol's context at every expansion. Here a
template is parsed once into the engine's own symbols, which are never written to, and is expanded by recursion; the
text is the same (tests compare whole transcripts).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from textworld.envs.pddl import textgen
from textworld.envs.pddl.logic import GameLogic
from textworld.generator.game import EntityInfo
from textworld.logic import Placeholder, Proposition, Rule, State, Variable

_TASK = re.compile(r'("rhs": "Your task is to: )([^"#{}\[\]|\\]*)(\.")')
_GOAL_RULE = "task"

Symbols = tuple[Any, ...]


@dataclass(frozen=True)
class Context:
    """What a derivation may look at."""

    state: State
    entities: Mapping[str, EntityInfo]  # by id
    mapping: Mapping[Placeholder, Variable]
    variables: Mapping[str, EntityInfo]  # by placeholder


@lru_cache(maxsize=4096)
def parse_template(text: str) -> Symbols:
    return tuple(textgen._parse_and_convert(text, rule_name="symbols"))


@lru_cache(maxsize=1024)
def parse_query(text: str) -> Rule:
    return Rule.parse_conjunctive_query(text)


@lru_cache(maxsize=16)
def _parse_logic(domain: str, grammar: str) -> GameLogic:
    return GameLogic(domain=domain, grammar=grammar)


class Grammar:
    """The rules of one game. Games that differ in their goal's wording only share everything that was parsed."""

    def __init__(self, domain: str, source: str) -> None:
        goals = _TASK.findall(source)
        self._goal: Symbols | None = None
        if len(goals) == 1:
            self._goal = parse_template(f"Your task is to: {goals[0][1]}.")
            source = _TASK.sub(r"\1\3", source)
        self.logic = _parse_logic(domain, source)

    def derive(self, start: str, context: Context) -> str:
        return "".join(str(part) for part in self._expand(parse_template(start), context))

    def is_static(self, template: str, fluents: frozenset[str]) -> bool:
        """Whether a derivation can never change while a game is played: no rule, no query of a fluent."""
        return all(_static(symbol, fluents) for symbol in parse_template(template))

    def _expand(self, symbols: Symbols, context: Context) -> Iterator[object]:
        for symbol in symbols:
            yield from self._one(symbol, context)

    def _one(self, symbol: Any, context: Context) -> Iterator[object]:
        match symbol:
            case textgen.TerminalSymbol():
                yield symbol.symbol
            case textgen.NonterminalSymbol():
                yield from self._expand(self._rule(str(symbol), context), context)
            case textgen.EvalSymbol():
                yield eval(symbol.expression, {}, dict(context.variables))  # grammars are code, as in the stock engine

            case textgen.ConditionalSymbol():
                for found in _contexts(symbol, context):
                    yield from self._one(symbol.expression, found)
            case textgen.ListSymbol():
                yield from self._list(symbol, context)
            case _:
                raise NotImplementedError(f"grammar symbol {type(symbol).__name__}")

    def _list(self, symbol: textgen.ListSymbol, context: Context) -> Iterator[object]:
        inner = symbol.symbol
        found = _contexts(inner, context)
        if not found:
            yield from self._expand(self._rule("list_empty", context), context)
        for index, each in enumerate(found):
            if index:
                separator = "list_last_separator" if index == len(found) - 1 else "list_separator"
                yield from self._expand(self._rule(separator, context), context)
            yield from self._one(inner.expression, each)

    def _rule(self, name: str, context: Context) -> Symbols:
        """The right side of the first rule that applies."""
        if name == _GOAL_RULE and self._goal is not None:
            return self._goal
        rules = self.logic.grammar._rules.get(name)
        if not rules:
            raise textgen.CSGUnknownSymbolError(name)
        for rule in rules:
            if not rule.condition or _holds(rule.condition, context):
                return tuple(rule.rhs)
        raise IndexError(f"no rule of {name} applies")


def _contexts(symbol: textgen.ConditionalSymbol, context: Context) -> list[Context]:
    if not symbol.given:
        return [context]
    found = []
    for mapping in context.state.all_assignments(parse_query(symbol.given), context.mapping):
        named = {placeholder.name: context.entities[variable.name] for placeholder, variable in mapping.items()}
        found.append(Context(context.state, context.entities, dict(mapping), {**context.variables, **named}))
    return found


def _holds(condition: str, context: Context) -> bool:
    return next(iter(context.state.all_assignments(parse_query(condition), context.mapping)), None) is not None


def _static(symbol: Any, fluents: frozenset[str]) -> bool:
    match symbol:
        case textgen.TerminalSymbol() | textgen.EvalSymbol():
            return True
        case textgen.ListSymbol():
            return _static(symbol.symbol, fluents)
        case textgen.ConditionalSymbol():
            asked = parse_query(symbol.given).preconditions if symbol.given else ()
            return all(each.name.removeprefix("not_") not in fluents for each in asked) and _static(
                symbol.expression, fluents
            )
    return False


class Facts(State):
    """The engine's state with each signature's facts kept sorted, as queries ask for them."""

    def __init__(self, logic: GameLogic, by_signature: Mapping[Any, frozenset[Proposition]]) -> None:
        self._logic = logic  # all that the queries use; the base class accepts its own kind of logic only
        self._by_signature = dict(by_signature)
        self._sorted: dict[Any, list[Proposition]] = {}

    @property
    def facts(self) -> Iterator[Proposition]:
        for facts in self._by_signature.values():
            yield from facts

    def facts_with_signature(self, sig: Any) -> list[Proposition]:
        found = self._sorted.get(sig)
        if found is None:
            found = self._sorted[sig] = sorted(self._by_signature.get(sig, ()))
        return found

    def change(self, fact: Proposition, negated: Proposition) -> None:
        """Make `fact` hold, and its negation not."""
        for each, holds in ((negated, False), (fact, True)):
            signature = each.signature
            facts = self._by_signature.get(signature, frozenset())
            if (each in facts) != holds:
                self._by_signature[signature] = facts | {each} if holds else facts - {each}
                self._sorted.pop(signature, None)
