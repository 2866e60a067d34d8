"""The gold patch of a task as an agent would write it."""

from __future__ import annotations

from envs.swe.tasks import SweTask
from envs.swe.tool_calls import ToolCall, render_call


def gold_turns(task: SweTask) -> list[str] | None:
    """The gold patch as edits, one hunk each, and a submit; None for a patch that creates or deletes files."""
    if "/dev/null" in task.gold_patch:
        return None

    turns: list[str] = []
    path = old = new = ""
    for line in [*task.gold_patch.splitlines(keepends=True), "@@ end"]:
        if line.startswith(("@@ ", "diff --git ")):
            if old != new:
                edit = ToolCall("edit", {"path": path, "old": old.rstrip("\n"), "new": new.rstrip("\n")})
                turns.append(render_call(edit))
            old = new = ""

        elif line.startswith("+++ "):
            path = line[len("+++ b/") :].rstrip("\n")
        elif line.startswith(("--- ", "index ", "\\")):
            continue
        else:
            old += line[1:] if line[:1] in (" ", "-") else ""
            new += line[1:] if line[:1] in (" ", "+") else ""

    return [*turns, render_call(ToolCall("submit", {}))] if turns else None
