"""The TextWorld/ALFWorld engine, with everything kept that depends on the game alone.

The game's state lives in the same fast-downward library that the stock engine uses, and the text comes from the same
grammar: transcripts are byte-identical to `AlfredDemangler(PddlEnv())`. What is kept per game (`PreparedGame`):
translation, names, initial facts, commands by operator and facts by effect. What is left per step: one call for the
operators, one for the effects, and the text.

Not thread-safe, as the stock engine: one process drives its engines one after another. Each engine holds a copy of
the library (some 2 MB) for ever, since closing one crashes the next load: engines are pooled and loaded anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import fast_downward
from alfworld.agents.utils.misc import Demangler
from mementos import core as mementos
from textworld.envs.pddl.logic import Atom
from textworld.generator.game import EntityInfo
from textworld.logic import Placeholder, Proposition, Type, Variable

from envs.alfworld.grammar import Context, Facts, Grammar
from envs.alfworld.translation import GameFile, Translation, kept_translation, read_game

NOTHING = "Nothing happens."
FACTS_REMEMBERED = 100_000
"""How many facts TextWorld may remember. It keeps every fact of every game for ever: some 2 000 of a room of usual
size, 1 MB."""


@dataclass(frozen=True)
class Observation:
    """What is seen after a reset or a step: the game's text, the commands it admits now (sorted), whether the goal
    holds, and whether the command was admissible."""

    text: str
    commands: tuple[str, ...]
    won: bool
    admissible: bool = True


@dataclass(frozen=True)
class Move:
    """An operator of the planner as a player sees it."""

    mapping: Mapping[Placeholder, Variable]
    variables: Mapping[str, EntityInfo]
    feedback: str  # the grammar's rule
    template: str
    command: str | None  # None: depends on the state


class PreparedGame:
    """What all episodes of one game share."""

    def __init__(self, game: GameFile, translation: Translation) -> None:
        self.translation = translation
        self.grammar = Grammar(game.domain, game.grammar)
        logic = self.grammar.logic
        for kind in translation.types:
            with contextlib.suppress(ValueError):  # known already: the logic is shared, and has a type `object`
                logic.types.add(Type(*kind))
        self.initial: dict[object, frozenset[Proposition]] | None = None
        self.entities: dict[str, EntityInfo] = {}
        self._moves: dict[str, Move] = {}
        self._atoms: dict[bytes, tuple[Proposition, Proposition, bool]] = {}

    def begin(self, atoms: list[bytes]) -> None:
        """To be called once, with the planner's initial state: facts and the names of everything."""
        if len(mementos._memento_cache) > FACTS_REMEMBERED:
            mementos._memento_cache.clear()  # it saves time, no more: facts are compared by what they say
        translated = self.translation.facts
        facts = [Proposition(name, [Variable(*each) for each in arguments]) for name, arguments in translated]
        for raw in atoms:
            fact, _, negated = self.atom(raw)
            if not negated:
                facts.append(fact)
        initial: dict[object, set[Proposition]] = {}
        for fact in facts:
            initial.setdefault(fact.signature, set()).add(fact)

        self.initial = {signature: frozenset(group) for signature, group in initial.items()}
        self.entities = {var.name: EntityInfo(var.name, var.type) for fact in facts for var in fact.arguments}
        demangler = Demangler(game_infos=self.entities)
        for info in self.entities.values():
            info.name = demangler.demangle_alfred_name(info.id)
            info.definite = "the"
            info.indefinite = "a"

    def atom(self, raw: bytes) -> tuple[Proposition, Proposition, bool]:
        """(the fact, its negation, whether it is a negative one) of an atom as the planner prints it."""
        known = self._atoms.get(raw)
        if known is None:
            atom = Atom.from_buffer_copy(raw.ljust(ctypes.sizeof(Atom), b"\0"))
            fact = atom.get_fact(self.translation.type_of)
            known = self._atoms[raw] = (fact, fact.negate(), fact.is_negation)
        return known

    def move(self, name: str, state: Facts) -> Move:
        """The player's move of an operator, by the operator's name with its arguments."""
        known = self._moves.get(name)
        if known is None:
            action, *arguments = name.split()
            rules = self.grammar.logic.actions[action]
            mapping = {
                Placeholder(parameter, kind): Variable(argument, kind)
                for (parameter, kind), argument in zip(self.translation.parameters[action], arguments, strict=False)
            }
            variables = {placeholder.name: self.entities[variable.name] for placeholder, variable in mapping.items()}
            command = None
            if self.grammar.is_static(rules.template, self.translation.fluents):
                command = self.grammar.derive(rules.template, Context(state, self.entities, mapping, variables))

            known = self._moves[name] = Move(mapping, variables, rules.feedback_rule, rules.template, command)
        return known

    def command(self, move: Move, state: Facts) -> str:
        if move.command is not None:
            return move.command
        return self.grammar.derive(move.template, Context(state, self.entities, move.mapping, move.variables))


class GameCache:
    """The `capacity` games played last, by path. There is one for each process."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: OrderedDict[Path, PreparedGame] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, path: Path) -> PreparedGame:
        """Raises GameError."""
        prepared = self._kept.get(path)
        if prepared is None:
            game = read_game(path)
            prepared = self._kept[path] = PreparedGame(game, kept_translation(game))
            if len(self._kept) > self.capacity:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(path)
        return prepared


class Engine:
    """One live game at a time; `load` again for the next one."""

    def __init__(self) -> None:
        self._library = fast_downward.load_lib()
        self._game: PreparedGame | None = None

    def load(self, game: PreparedGame) -> Observation:
        """Begin the game; the first observation."""
        self._game = game
        library = self._library
        library.load_sas(zlib.decompress(game.translation.sas))
        if game.initial is None:
            atoms = (Atom * library.get_state_size())()
            library.get_state(atoms)
            game.begin([atom._name for atom in atoms])
        assert game.initial is not None
        self.facts = Facts(game.grammar.logic, game.initial)
        text = game.grammar.derive("#intro#", Context(self.facts, game.entities, {}, {}))
        return self._observe(text)

    def step(self, command: str) -> Observation:
        """Play one command; what is not admissible now changes nothing and answers NOTHING."""
        game = self._game
        library = self._library
        assert game is not None, "load() comes before step()"
        chosen = self._chosen.get(command.strip())
        if chosen is None:
            return Observation(NOTHING, self.observation.commands, self.observation.won, admissible=False)

        operator_id, effect_count, move = chosen
        effects = (Atom * effect_count)()
        library.apply_operator(operator_id, effects)
        for effect in effects:
            fact, negated, _ = game.atom(effect._name)
            self.facts.change(fact, negated)
        text = game.grammar.derive(move.feedback, Context(self.facts, game.entities, move.mapping, move.variables))
        return self._observe(text)

    def _observe(self, text: str) -> Observation:
        game = self._game
        library = self._library
        assert game is not None
        operators = (fast_downward.Operator * library.get_applicable_operators_count())()
        library.get_applicable_operators(operators)
        # By command without the blank that a name may end in: the first operator that has it. Inner blanks count, as in
        # the stock engine.
        self._chosen: dict[str, tuple[int, int, Move]] = {}
        commands = set()

        for operator in operators:
            move = game.move(operator.name, self.facts)
            command = game.command(move, self.facts)
            commands.add(command)
            self._chosen.setdefault(command.strip(), (operator.id, operator.nb_effect_atoms, move))
        self.observation = Observation(text, tuple(sorted(commands)), bool(library.check_goal()))
        return self.observation
