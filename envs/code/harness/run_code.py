"""Judges a solution inside a sandbox (`python -I -S run_code.py`): a JSON job on stdin, one JSON line on stdout.

Job: {"key", "code", "prelude", "functions", "tests": [[kind, text]...]} or {"key", "code", "case_s", "inputs": [...]}.
The line is `key` and a list with an entry for each test or input. For an `assert` it says whether it held, for any
other test what the expression gave, for an input what the program printed. It is null where that failed or ran too
long.

There are two processes. The solution runs in a child, forked before the job was read, so that it never holds the key or
the tests. Statements run here, where nothing of the solution ever does. The functions that they call are asked for over
a pipe, and what comes back is JSON, of which `decoded` makes exact builtin values. What is neither a plain value nor an
iterator stays in the child and is a `Remote` here: it can be called and passed back, and equals nothing but itself.
Expected values of expressions and of inputs are not even in this process.
"""

from __future__ import annotations

import builtins
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from types import CodeType

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Loading it takes as long as a short solution.
    from typing import Any

# Of one output, and of one answer, in bytes.
LIMIT = 1 << 20
ANSWER_LIMIT = 8 * LIMIT
_CONTAINERS = {kind.__name__: kind for kind in (list, tuple, set, frozenset, iter)}
_SCALARS = (bool, int, float, str)
_PR_SET_DUMPABLE = 4


def main() -> None:
    solution = Solution()
    job = json.loads(sys.stdin.read())

    if "tests" in job:
        if any(kind == "assert" for kind, _ in job["tests"]):
            hide_memory()
        begun = solution.ask("run", job["code"]) == "begun"
        results = [result_of(solution, job, kind, text) if begun else None for kind, text in job["tests"]]
    else:
        results = [solution.ask("program", job["code"], text, job["case_s"]) for text in job["inputs"]]

    print(json.dumps({"key": job["key"], "results": results}))


def hide_memory() -> None:
    """Processes of the same user cannot read or write ours from here on (prctl(2), ptrace(2))."""
    import ctypes

    if ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_DUMPABLE)")


def result_of(solution: Solution, job: dict[str, Any], kind: str, text: str) -> object:
    """The result of one test, on its own, in the namespace that the solution left."""
    if kind != "assert":
        return solution.ask("value", text)
    try:
        run_test(solution, text, job["prelude"], job["functions"])
    except BaseException:
        return False
    return True


def run_test(solution: Solution, text: str, prelude: str, functions: list[str]) -> None:
    """Names that neither the prelude nor Python knows are the solution's, and so are `functions`."""
    namespace = {"__name__": "tests"}  # type: dict[str, Any]
    exec(compile(prelude, "prelude.py", "exec"), namespace)
    code = compile(text, "test.py", "exec")

    for name in names_in(code):
        if name not in functions:
            if name in namespace or hasattr(builtins, name):
                continue
            if name in sys.stdlib_module_names:
                namespace[name] = __import__(name)
                continue

        try:
            namespace[name] = solution.value("value", name)
        except NameError:
            # An attribute, or a name that the test gives itself.
            namespace.pop(name, None)

    exec(code, namespace)


def names_in(code: CodeType) -> set[str]:
    """Every global name that the code may look up, functions in it included."""
    below = [names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*below)


class Solution:
    """The child, seen from the judge. Everything that it says is hostile."""

    def __init__(self) -> None:
        ours, self._questions = os.pipe()
        self._answers, theirs = os.pipe()
        if os.fork() == 0:
            os.close(self._questions)
            os.close(self._answers)
            become_solution(ours, theirs)

        os.close(ours)
        os.close(theirs)
        self._rest = b""
        self._ended = False

    def ask(self, *question: object) -> object:
        """The answer as it came: JSON. None where there is none."""
        try:
            data = json.dumps(question).encode() + b"\n"
            while data:
                data = data[os.write(self._questions, data) :]
            return json.loads(self._line())
        except (OSError, ValueError, RecursionError):
            return None

    def value(self, *question: object) -> Any:
        """The answer as a builtin value or a Remote. Raises what the solution raised, if that is a builtin error."""
        answer = self.ask(*question)
        if not isinstance(answer, dict):
            raise RuntimeError("no answer")
        if "value" in answer:
            return decoded(answer["value"], lambda number: Remote(self, number))

        kind = getattr(builtins, str(answer.get("error")), None)
        # These would end a loop of the test instead of failing it.
        ends_loop = (StopIteration, StopAsyncIteration)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ends_loop):
            raise kind()
        raise RuntimeError("the solution raised")

    def _line(self) -> bytes:
        while b"\n" not in self._rest:
            data = b"" if self._ended or len(self._rest) > ANSWER_LIMIT else os.read(self._answers, LIMIT)
            if not data:
                self._ended = True
                raise OSError("no whole answer")
            self._rest += data

        line, _, self._rest = self._rest.partition(b"\n")
        return line


class Remote:
    """An object in the solution's process."""

    def __init__(self, solution: Solution, number: int) -> None:
        self._solution = solution
        self._number = number

    def __call__(self, *arguments: object, **named: object) -> Any:
        given = [encoded(each, number_of_remote) for each in (arguments, named)]
        return self._solution.value("call", self._number, *given)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._solution.value("attribute", self._number, name)


def number_of_remote(value: object) -> int:
    if type(value) is not Remote:
        raise TypeError(f"{type(value).__name__} cannot be given to a solution")
    return value._number


def encoded(value: object, number: Callable[[object], int]) -> object:
    """The value as JSON: scalars as they are, others as [kind, items]; what is no plain value as its `number`."""
    if value is None or type(value) in _SCALARS:
        return value
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encoded(item, number) for item in value]]
    if isinstance(value, dict):
        return ["dict", [encoded(part, number) for item in value.items() for part in item]]

    # A subclass, or an enumeration, counts as what it compares to.
    for plain in _SCALARS:
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, bytes):
        return ["bytes", list(value)]
    if isinstance(value, Iterator | KeysView | ValuesView | ItemsView | range):
        return ["iter", [encoded(item, number) for item in itertools.islice(iter(value), LIMIT)]]
    return ["object", [number(value)]]


def decoded(value: object, instance: Callable[[int], object]) -> Any:
    """The builtin value that `encoded` wrote. Raises ValueError or TypeError for anything else."""
    if value is None or isinstance(value, _SCALARS):
        return value
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], list):
        raise ValueError("no value")
    kind, parts = value
    if kind == "object" and len(parts) == 1 and type(parts[0]) is int:
        return instance(parts[0])

    items = [decoded(item, instance) for item in parts]
    if kind == "dict":
        return dict(zip(items[::2], items[1::2], strict=True))
    if kind == "complex":
        return complex(*items)
    if kind == "bytes":
        return bytes(items)
    if not isinstance(kind, str) or kind not in _CONTAINERS:
        raise ValueError("no value")
    return _CONTAINERS[kind](items)


def become_solution(questions: int, answers: int) -> None:
    """Answer until the judge goes. Whatever the solution replaces from here on, it replaces for itself."""
    for descriptor, flag in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, flag), descriptor)
    namespace = {"__name__": "solution"}  # type: dict[str, Any]
    objects = []  # type: list[object]

    def number(value: object) -> int:
        objects.append(value)
        return len(objects) - 1

    with os.fdopen(questions, "rb") as file, os.fdopen(answers, "wb") as out:
        for line in file:
            kind, *given = json.loads(line)
            try:
                answer = json.dumps(answer_of(kind, given, namespace, objects, number))
            except BaseException as error:
                answer = json.dumps({"error": type(error).__name__})
            out.write(answer.encode() + b"\n")
            out.flush()
    os._exit(0)


def answer_of(
    kind: str,
    given: list[Any],
    namespace: dict[str, Any],
    objects: list[Any],
    number: Callable[[object], int],
) -> object:
    """`given`: of run the code, of program code, input and seconds, of call an object's number and two of arguments."""
    if kind == "run":
        exec(compile(given[0], "solution.py", "exec"), namespace)
        return "begun"
    if kind == "program":
        return run_program(*given)

    if kind == "value":
        value = eval(compile(given[0], "test.py", "eval"), namespace)
    elif kind == "attribute":
        value = getattr(objects[given[0]], given[1])
    else:
        arguments, named = (decoded(each, objects.__getitem__) for each in given[1:])
        value = objects[given[0]](*arguments, **named)
    return {"value": encoded(value, number)}


def run_program(code: str, text: str, case_s: float) -> str | None:
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


if __name__ == "__main__":
    main()
