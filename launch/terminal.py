"""What is printed: text of models, environments and logs never reaches a terminal as anything but text."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType

# All control characters but tab and newline, also those of eight bits, and what turns the direction of writing round.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Each control character as its code, so that it can be seen and does nothing."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


class CleanConsole(Console):
    """A console of rich whose own colours and movements are the only ones."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Any]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=clean(segment.text))


def say(text: str, file: IO[Any] | None = None) -> None:
    """`print` for lines that may quote others."""
    print(clean(text), file=file or sys.stdout)
