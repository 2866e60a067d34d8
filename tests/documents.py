"""What the documents tell to write and to run: their fenced blocks, read as a reader would."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS = ("gpu", "hub", "endpoint", "network", "hours", "other tools", "a run")
"""What a block may need that a test does not have, said in a comment above it: `<!-- needs: gpu -->`.

`a run`: one of as many steps as the block names, or one that goes on."""
PART = "part"
"""In its place: a part of a program, which does nothing by itself."""
_FENCE = re.compile(r"^( *)(?:<!-- ([^\n]+) -->\n\1)?```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (?P<name>[\w./-]+\.(?:py|yaml|jsonl|sh))(?: .*)?\n")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. needs: why it is not run, or nothing."""

    line: int
    language: str
    text: str
    needs: str
    is_part: bool

    @property
    def file(self) -> str:
        """The file that its first line says it is."""
        found = _FILE.match(self.text)
        return found["name"] if found and self.language != "bash" else ""

    @property
    def commands(self) -> list[str]:
        """Each line of a shell's block, without its comment."""
        lines = [line.split(" # ")[0].split("  #")[0].strip() for line in self.text.splitlines()]
        return [line for line in lines if line and not line.startswith("#")] if self.language == "bash" else []

    @property
    def program(self) -> str:
        """Of a part, within a coroutine function, whose signature may be all that there is."""
        if not self.is_part:
            return self.text
        head = self.text.rstrip()
        whole = f"{head}: ...\n" if re.match(r"(async )?def [^\n]*$", head) else self.text
        return f"async def part():\n{textwrap.indent(whole, '    ')}"


def blocks(page: Path) -> Iterator[Block]:
    """Raises AssertionError for a mark that says nothing of this."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        indent, mark, language = found[1], found[2] or "", found[3]
        told = re.sub(f"^{indent}", "", found[4], flags=re.MULTILINE)
        needs = mark.removeprefix("needs: ") if mark.startswith("needs: ") else ""
        assert not mark or mark in (PART, "/measured") or needs in NEEDS, f"{page.name}:{line}: {mark!r}"
        yield Block(line, language, told, needs, mark == PART)
