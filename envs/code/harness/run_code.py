"""Runs a solution inside a sandbox (`python -I -S run_code.py`): a JSON job on stdin, one JSON line on stdout.

Job: {"code", "key", "case_s", "tests": [[kind, text]...]} or {..., "inputs": [...]}. The line is `key` and a list: for
an `assert` whether it held, for a `value` what the expression gave, for an input what the program printed (null where
it failed or ran too long). The key is random: a solution that ends the process or prints a verdict of its own has not
said it. Expected values and outputs never come in here, except inside an `assert`.
"""

import json
import os
import signal
import sys
import time

# Of one output, in bytes.
LIMIT = 1 << 20


def main() -> None:
    job = json.loads(sys.stdin.read())
    report = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if "tests" in job:
        results = run_tests(job["code"], job["tests"])
    else:
        results = [run_program(job["code"], text, job["case_s"]) for text in job["inputs"]]
    os.write(report, (json.dumps({"key": job["key"], "results": results}) + "\n").encode())


def run_tests(code: str, tests: "list[list[str]]") -> "list[object]":
    """Each on its own, in the namespace that the solution left."""
    results = []  # type: list[object]
    namespace = {"__name__": "solution"}
    try:
        exec(compile(code, "solution.py", "exec"), namespace)
    except BaseException:
        return [False] * len(tests)

    for kind, text in tests:
        try:
            if kind == "value":
                results.append(encoded(eval(compile(text, "test.py", "eval"), namespace)))
            else:
                exec(compile(text, "test.py", "exec"), namespace)
                results.append(True)
        except BaseException:
            results.append(["failed", []])
    return results


def encoded(value: object) -> object:
    """Scalars as they are, containers as [kind, items]; raises for anything else."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encoded(item) for item in value]]
    if isinstance(value, dict):
        return ["dict", [encoded(part) for item in value.items() for part in item]]
    # A subclass, or an enumeration, counts as what it compares to.
    if isinstance(value, (bool, int, float, str)):
        return next(kind(value) for kind in (bool, int, float, str) if isinstance(value, kind))
    raise TypeError(type(value).__name__)


def run_program(code: str, text: str, case_s: float) -> "str | None":
    """What the program prints for one input, in a process of its own."""
    given = os.memfd_create("given")
    printed = os.memfd_create("printed")
    try:
        with os.fdopen(os.dup(given), "wb") as file:
            file.write(text.encode())
        os.lseek(given, 0, os.SEEK_SET)

        pid = os.fork()
        if pid == 0:
            become_program(code, given, printed)
        good = wait(pid, case_s)

        os.lseek(printed, 0, os.SEEK_SET)
        return os.read(printed, LIMIT).decode(errors="replace") if good else None
    finally:
        os.close(given)
        os.close(printed)


def become_program(code: str, given: int, printed: int) -> None:
    """Run the solution as a program and end the process."""
    status = 1
    try:
        os.setsid()
        os.dup2(given, 0)
        os.dup2(printed, 1)
        sys.stdin = os.fdopen(0)
        sys.stdout = os.fdopen(1, "w")
        exec(compile(code, "solution.py", "exec"), {"__name__": "__main__"})
        status = 0

    except SystemExit as error:
        status = 0 if error.code in (None, 0) else 1
    except BaseException:
        pass
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(status)


def wait(pid: int, case_s: float) -> bool:
    """Whether the child ended well within its time; kills it otherwise."""
    end = time.monotonic() + case_s
    pause = 0.0002
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.01)


main()
