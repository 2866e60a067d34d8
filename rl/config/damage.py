"""Files of a run's folder that were damaged: told in one line, with the file's name, by whoever reads them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from rl.config.failures import EndsRun
from rl.config.tree import ConfigError

T = TypeVar("T")
_CHUNK = 1 << 20
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
RESUME = "begin the run anew, or with resume=CHECKPOINT"


class Damaged(EndsRun, ConfigError):
    """Whoever is started again would read the same: it ends the run, and a command, in one line."""

    one_line = True


@contextlib.contextmanager
def reading(path: Path, remedy: str) -> Iterator[None]:
    """Whatever goes wrong within is the fault of what this file says. remedy: what a user can do."""
    try:
        yield
    except (ConfigError, EndsRun):
        raise
    except Exception as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        raise Damaged(f"{path} is damaged ({' '.join(what.split())[:200]}); {remedy}") from error


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """The whole lines of a file that can be read, one at a time; of one that is not there, or is no file, none."""
    return (found for _, found in placed_lines(path, kind))


def placed_lines(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """`read_lines`, each with its place in the file, at which `lines_at` finds it again.

    A line that is still being written ends the reading: what comes behind its first half is no line.
    """
    if not path.is_file():
        return
    decoder = msgspec.json.Decoder(kind)
    place = 0
    with path.open("rb", buffering=_CHUNK) as file:
        for line in itertools.takewhile(lambda line: line.endswith(b"\n"), file):
            with contextlib.suppress(*_UNREADABLE):
                yield place, decoder.decode(line)
            place += len(line)


def lines_at(path: Path, kind: type[T], places: Iterable[int]) -> Iterator[T]:
    """The lines at these places, as far as they can be read as this kind."""

    def lines() -> Iterator[bytes]:
        for place in places:
            file.seek(place)
            yield file.readline()

    with path.open("rb") as file:
        yield from readable(lines(), kind)


def readable(lines: Iterable[bytes], kind: type[T]) -> Iterator[T]:
    """The lines of JSON that can be read: a killed process leaves half of one, a bad disk any other."""
    decoder = msgspec.json.Decoder(kind)
    for line in lines:
        with contextlib.suppress(*_UNREADABLE):
            yield decoder.decode(line)
