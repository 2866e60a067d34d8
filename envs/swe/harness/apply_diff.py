"""Applies a submitted diff in a fresh sandbox, then puts back what an agent has no say in (`python -s apply_diff.py`).

A JSON job is read from stdin, and JSON is written to stdout:

    {"base": commit, "diff": text, "test_patch": text, "import_roots": [folders],
     "machinery": [paths and folders that end with a slash], "fixed": [paths that the true fix changes]}
    {"applied": bool, "restored": [paths], "kept": [Python files that a diff cannot change], "error": text}

Nothing hostile has run in this sandbox yet, so git and the repository can be trusted here. Whatever the diff's text
does to a parser, what counts is the tree that git made of it.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence

GIT = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=false", "-c", "core.fsmonitor=false"]
LINKS = ("120000", "160000")
_CONFIGURATION = """
    conftest.py sitecustomize.py usercustomize.py pytest.ini .pytest.ini pytest.toml .pytest.toml tox.ini setup.cfg
    setup.py pyproject.toml noxfile.py .coveragerc .gitattributes .gitmodules entry_points.txt
""".split()  # noqa: SIM905
_COMPILED = (".pyc", ".pyo", ".so", ".pth", ".egg-link")
_MACHINERY = {"pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "hypothesis", "attr", "attrs"}
_STDLIB = os.path.dirname(os.__file__)
_TEST_WORD = re.compile(
    r"(base|unit)?tests?|testing|conftest|test(data|utils?|helpers?|libs?|cases?|suites?|tools?|kit)"
)
_TEST_NAME = re.compile(r"^(test_.*|.*_tests?|tests?)\.py$")


def is_test_file(path: str) -> bool:
    """Whether it is one by the usual names: below a `test` or `tests` folder, `test_*.py`, `*_test.py`."""
    *folders, name = path.split("/")
    return any(folder.lower() in ("test", "tests") for folder in folders) or bool(_TEST_NAME.match(name))


def is_test_material(path: str, fixed: "Sequence[str]") -> bool:
    """Whether it is below a folder with a word for tests in its name (`test-data`, `_testing`), or is a file with one
    (`testing.py`). It is not if the true fix changes it, or something in there, as well."""
    parts = path.split("/")
    for place, part in enumerate(parts, 1):
        if any(map(_TEST_WORD.fullmatch, re.split("[-_.]", part.lower()))):
            kept = "/".join(parts[:place])
            return not any(each == kept or each.startswith(kept + "/") for each in fixed)
    return False


def standard_modules() -> "set[str] | frozenset[str]":
    """Names of the standard library's modules; Pythons before 3.10 do not list them."""
    names = getattr(sys, "stdlib_module_names", None)  # type: frozenset[str] | set[str] | None
    if names is None:
        files = os.listdir(_STDLIB) + os.listdir(os.path.join(_STDLIB, "lib-dynload"))
        names = {*sys.builtin_module_names, *(name.split(".")[0] for name in files)}
    return names


_STANDARD_MODULES = standard_modules()


def is_protected(
    path: str,
    import_roots: "Sequence[str]" = ("",),
    machinery: "Sequence[str]" = (),
    fixed: "Sequence[str]" = (),
) -> bool:
    """Whether a change to this path must not reach the tests: tests, their configuration, what shadows their tools."""
    parts = path.split("/")
    name = parts[-1]
    if is_test_file(path) or is_test_material(path, fixed):
        return True
    if name in _CONFIGURATION or name.endswith(_COMPILED) or "__pycache__" in parts:
        return True
    if ".git" in parts or any(part.endswith((".egg-info", ".dist-info")) for part in parts):
        return True
    if any(path.startswith(each) if each.endswith("/") else path == each for each in machinery):
        return True

    return shadows_tools(path, import_roots)


def shadows_tools(path: str, import_roots: "Sequence[str]") -> bool:
    """Whether it would be imported in the place of pytest, of what pytest needs, or of the standard library."""
    parts = path.split("/")
    for root in import_roots:
        below = parts[len(root.split("/")) :] if root and path.startswith(root + "/") else parts
        module = below[0][: -len(".py")] if below[0].endswith(".py") else below[0]
        if module in _MACHINERY or module in _STANDARD_MODULES:
            return True
    return False


def main() -> None:
    job = json.loads(sys.stdin.read())
    answer = {"applied": True, "restored": [], "kept": [], "error": ""}

    def protected(path: str) -> bool:
        return is_protected(path, job["import_roots"], job["machinery"], job["fixed"])

    try:
        if job["diff"].strip():
            git("apply", "--whitespace=nowarn", given=job["diff"])
            answer["restored"] = restore(job["base"], protected)
        if job["test_patch"].strip():
            git("apply", "--whitespace=nowarn", given=job["test_patch"])
        answer["kept"] = [path for path in files() if path.endswith(".py") and protected(path)]
    except subprocess.CalledProcessError as error:
        answer.update(applied=False, error=error.stderr.decode(errors="replace")[-2000:])
    print(json.dumps(answer))


def files() -> "list[str]":
    """All there are, ignored ones too."""
    return git("ls-files", "-z", "--cached", "--others").decode(errors="surrogateescape").split("\0")[:-1]


def restore(base: str, protected: "Callable[[str], bool]") -> "list[str]":
    """Undo every change to a protected path, and every new link."""
    git("add", "--all", "--force")
    raw = git("diff", "--cached", "--raw", "-z", "--no-renames", "--no-abbrev", base).decode(errors="surrogateescape")
    fields = raw.split("\0")[:-1]
    changed = [
        (head.split()[1], head.split()[4], path)
        for head, path in zip(fields[::2], fields[1::2])  # noqa: B905
        if head.split()[1] in LINKS or protected(path)
    ]

    added = [path for _, status, path in changed if status == "A"]
    others = [path for _, status, path in changed if status != "A"]
    if added:
        given = "\0".join(added)
        git("rm", "-r", "--force", "--quiet", "--pathspec-from-file=-", "--pathspec-file-nul", given=given)
    if others:
        others.sort(key=lambda path: not path.endswith(".gitattributes"))
        git("checkout", "--quiet", base, "--pathspec-from-file=-", "--pathspec-file-nul", given="\0".join(others))
    return added + others


def git(*arguments: str, given: str = "") -> bytes:
    command = [*GIT, "--literal-pathspecs", *arguments]
    data = given.encode(errors="surrogateescape")
    ended = subprocess.run(command, input=data, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=True)  # noqa: UP022
    return ended.stdout


if __name__ == "__main__":
    main()
