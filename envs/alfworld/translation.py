"""A game file and its PDDL→SAS translation, made once per game and kept.

The stock engine translates four times per episode: twice in `load`, twice in `reset`, and one of each two only for a
planner. The translation depends on the game alone, so it is made once and kept on disk (some 20 kB a game), for every
process and run to come.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import fast_downward
import msgspec
import xxhash

from rl.store.made_once import cache_folder

_FORMAT = 2  # of a kept translation: the digest of the rest, and the rest
_DIGEST_BYTES = 16


class GameError(ValueError):
    """A game file that cannot be read or translated."""


@dataclass(frozen=True)
class GameFile:
    """`game.tw-pddl`: everything a game consists of."""

    path: Path
    domain: str
    grammar: str
    problem: str


Named = tuple[str, str]  # (name, type)


class Translation(msgspec.Struct, array_like=True, frozen=True):
    """What the engine needs of a translated problem, in the form in which it is kept."""

    sas: bytes  # compressed
    facts: list[tuple[str, list[Named]]]  # of the problem file: predicate and arguments
    types: list[tuple[str, list[str]]]  # name and parents
    type_of: dict[str, str]  # of every object by its id
    parameters: dict[str, list[Named]]  # by action
    fluents: frozenset[str]  # predicates that some action changes


def read_game(path: Path) -> GameFile:
    """Raises GameError, naming the file and what is wrong."""
    try:
        data = json.loads(path.read_text())
        return GameFile(path, data["pddl_domain"], data["grammar"], data["pddl_problem"])
    except OSError as error:
        raise GameError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise GameError(f"{path} is no ALFWorld game: {type(error).__name__} {error}") from None


def kept_translation(game: GameFile, cache: Path | None = None) -> Translation:
    """`translate`, once for ever: kept under the hash of domain and problem. Raises GameError."""
    digest = hashlib.sha256(f"{_FORMAT}\0{game.domain}\0{game.problem}".encode()).hexdigest()
    path = (cache or cache_folder()) / "alfworld-translations" / digest[:2] / digest[2:34]
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        kept = path.read_bytes()
        if xxhash.xxh3_128_digest(kept[_DIGEST_BYTES:]) == kept[:_DIGEST_BYTES]:  # else it is damaged
            return msgspec.msgpack.decode(kept[_DIGEST_BYTES:], type=Translation)

    made = translate(game)
    with contextlib.suppress(OSError):  # a full or read-only disk costs time, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        encoded = msgspec.msgpack.encode(made)
        draft.write_bytes(xxhash.xxh3_128_digest(encoded) + encoded)
        draft.replace(path)
    return made


def translate(game: GameFile) -> Translation:
    """Some 50 ms of CPU. Raises GameError."""
    arguments = sys.argv
    try:
        task, sas = fast_downward.pddl2sas(game.domain, game.problem)  # overwrites sys.argv, for its option parser
    except (Exception, SystemExit) as error:  # the translator exits on bad input
        raise GameError(f"{game.path} cannot be translated: {type(error).__name__} {error}") from None
    finally:
        sys.argv = arguments

    type_of = {each.name: each.type_name for each in task.objects}
    facts = [_fact(each, type_of) for each in task.init]

    return Translation(
        sas=zlib.compress(sas.encode(), 1),
        facts=[fact for fact in facts if fact is not None],
        types=[(each.name, list(each.supertype_names)) for each in task.types],
        type_of=type_of,
        parameters={
            action.name: [(parameter.name.strip("?"), parameter.type_name) for parameter in action.parameters]
            for action in task.actions
        },
        fluents=frozenset(effect.literal.predicate for action in task.actions for effect in action.effects),
    )


def _fact(atom: object, type_of: dict[str, str]) -> tuple[str, list[Named]] | None:
    """The fact as the stock engine reads the problem's initial state: equality, costs and distances are no facts."""
    from fast_downward.translate.pddl.conditions import Atom  # not before pddl2sas: importing it parses sys.argv
    from fast_downward.translate.pddl.f_expression import Assign

    if isinstance(atom, Atom):
        if atom.predicate == "=":
            return None
        return atom.predicate, [(name, type_of[name]) for name in atom.args]
    if isinstance(atom, Assign):
        name = str(atom.expression.value)
        if atom.fluent.symbol == "total-cost" or name.isdigit():
            return None
        return name, [(arg, type_of[arg]) for arg in atom.fluent.args]
    return None
