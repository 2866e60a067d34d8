"""Turning a unified diff round."""

from __future__ import annotations

import re
from collections.abc import Iterator

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)$", re.DOTALL)
_SWAPPED = {"new file mode": "deleted file mode", "deleted file mode": "new file mode"}
_SWAPPED |= {"old mode": "new mode", "new mode": "old mode", "rename from": "rename to", "rename to": "rename from"}


class DiffError(ValueError):
    """A text that is no unified diff, or one that cannot be turned round."""


def reverse_diff(diff: str) -> str:
    """The diff that undoes `diff`. Raises DiffError for binary patches and malformed hunks."""
    out: list[str] = []
    lines = iter(diff.splitlines(keepends=True))
    for line in lines:
        if line.startswith("GIT binary patch"):
            raise DiffError("a binary patch cannot be reversed")
        if line.startswith("--- "):
            new = next(lines, "")
            if not new.startswith("+++ "):
                raise DiffError(f"no '+++' line after {line.strip()!r}")
            out += [_sides(new, "+++ ", "--- ", "b/", "a/"), _sides(line, "--- ", "+++ ", "a/", "b/")]

        elif hunk := _HUNK.match(line):
            old_start, old_count, new_start, new_count, rest = hunk.groups()
            out.append(f"@@ -{_range(new_start, new_count)} +{_range(old_start, old_count)} @@{rest}")
            out += _reversed_hunk(lines, int(old_count or 1), int(new_count or 1))

        else:
            key = next((key for key in _SWAPPED if line.startswith(f"{key} ")), None)
            out.append(_SWAPPED[key] + line[len(key) :] if key else line)
    return "".join(_ordered(out))


def _reversed_hunk(lines: Iterator[str], old: int, new: int) -> list[str]:
    body: list[str] = []
    while old > 0 or new > 0:
        line = next(lines, None)
        if line is None:
            raise DiffError("a hunk ends before its counted lines")
        kind = line[:1]
        if kind == "\\":
            body.append(line)
            continue

        if kind not in " +-\n":
            raise DiffError(f"a hunk has a line of unknown kind: {line[:40]!r}")
        old -= kind != "+"
        new -= kind != "-"
        body.append({"+": "-", "-": "+"}.get(kind, kind) + line[1:])
    return body


def _ordered(lines: list[str]) -> Iterator[str]:
    """`rename from` and `old mode` stand before their counterparts again."""
    pairs = {"rename to ": "rename from ", "new mode ": "old mode "}
    at = 0
    while at < len(lines):
        partner = next((pairs[key] for key in pairs if lines[at].startswith(key)), None)
        if partner and at + 1 < len(lines) and lines[at + 1].startswith(partner):
            yield lines[at + 1]
            yield lines[at]
            at += 2
        else:
            yield lines[at]
            at += 1


def _sides(line: str, old: str, new: str, old_side: str, new_side: str) -> str:
    path = line.removeprefix(old)
    return new + (new_side + path.removeprefix(old_side) if path.startswith(old_side) else path)


def _range(start: str, count: str | None) -> str:
    return start if count is None else f"{start},{count}"
