"""What certainly does not solve a task: its fix taken back, and a test that expects another literal."""

from __future__ import annotations

import ast
import random
import re
from dataclasses import replace

from envs.audit.auditor import Change
from envs.sandbox import Sandbox, read_file
from envs.swe.must_fail import another, literals_of
from envs.swe.runners import files_of, must_fail_name
from envs.swe.tasks import SweTask, file_diff

_HUNK = re.compile(r"^@@ ", re.MULTILINE)


def without_its_hunk(patch: str) -> str | None:
    """The patch without its only hunk of code, which it needs; None where there are several, of which one may do."""
    files = re.split(r"(?=^diff --git )", patch, flags=re.MULTILINE)
    code = [each for each in files if re.search(r"^\+\+\+ b/.*\.py$", each, re.MULTILINE)]
    if len(code) != 1 or len(_HUNK.findall(code[0])) != 1:
        return None
    return "".join(each for each in files if each is not code[0])


def other_test(task: SweTask, sandbox: Sandbox, dice: random.Random) -> SweTask | None:
    """The task with another expected literal in a test of FAIL_TO_PASS; None: no such test is sure to reach one."""
    names = {must_fail_name(test) for test in task.fail_to_pass}
    for path in files_of(task.fail_to_pass):
        source = (read_file(sandbox, path) or b"").decode("utf-8", "replace")
        places = literals_of(source, names)
        if places:
            start, end = dice.choice(places)
            data = source.encode()
            value = ast.literal_eval(data[start:end].decode().strip())
            changed = data[:start] + repr(another(value, dice.randrange(10**4, 10**6))).encode() + data[end:]
            return replace(task, test_patch=task.test_patch + file_diff(path, source, changed.decode()))
    return None


def changes(task: SweTask, sandbox: Sandbox, dice: random.Random) -> list[Change]:
    """Blocks. The response is a diff; without a gold patch nothing is certain."""
    if not task.gold_patch:
        return []
    note = file_diff("audit_note.md", "", "A file that no test looks at.\n")
    made = [Change("a file more", True, task, task.gold_patch + note), Change("no fix", False, task, "")]

    short = without_its_hunk(task.gold_patch)
    if short:
        made.append(Change("without its hunk", False, task, short))
    changed = other_test(task, sandbox, dice) if task.runner == "pytest" and not task.test_patch else None
    if changed is not None:
        made.append(Change("another expected literal", False, changed, task.gold_patch))
    return made
