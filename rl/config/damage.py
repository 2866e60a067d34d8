"""Files of a run's folder that were damaged: told in one line, with the file's name, by whoever reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from rl.config.failures import EndsRun
from rl.config.tree import ConfigError

T = TypeVar("T")
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
    """The whole lines of a file that can be read; of one that is not there, or is no file, none."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    yield from readable((line for line in lines if line.endswith(b"\n")), kind)


def readable(lines: Iterable[bytes], kind: type[T]) -> Iterator[T]:
    """The lines of JSON that can be read: a killed process leaves half of one, a bad disk any other."""
    decoder = msgspec.json.Decoder(kind)
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            yield decoder.decode(line)
