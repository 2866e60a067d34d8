"""The documents: links lead somewhere, links to lines show what they say, and commands are such as can be typed."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from launch.cli import parse

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md")])
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def links(document: Path) -> list[tuple[str, str]]:
    """Text and target of each link that points into the repository."""
    found = LINK.findall(document.read_text())
    return [(text, target) for text, target in found if not target.startswith(("http", "#", "mailto"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    broken = [target for _, target in links(document) if not (document.parent / target.split("#")[0]).exists()]
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_lines_show_what_they_say(document: Path) -> None:
    """`[Class.method](file.py#L12)`: line 12 defines `method`, or names it where it is not a definition."""
    wrong = []

    for text, target in links(document):
        path, _, anchor = target.partition("#L")
        if not anchor:
            continue
        line = (document.parent / path).read_text().splitlines()[int(anchor) - 1]
        name = text.strip("`").split(".")[-1].removesuffix("()")
        if name not in line:
            wrong.append(f"{text} -> {target}: {line.strip()}")

    assert not wrong, "\n".join(wrong)


def commands(document: Path) -> list[list[str]]:
    """The words of each command, in a block or quoted; `…` stands for what a reader knows, a bare name for itself."""
    spans = [*re.findall(r"`((?:fresco|bash|python -m) [^`]+)`", document.read_text())]
    for block in re.findall(r"^```bash\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
        spans += re.findall(r"(?:^|&& )((?:fresco|bash|python -m) [^\n]+)", block, re.MULTILINE)
    return [shlex.split(span.replace("…", "").partition(" | ")[0], comments=True) for span in spans]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_can_be_typed(document: Path) -> None:
    wrong = []

    for program, *words in commands(document):
        if program == "bash" and not (ROOT / words[0]).exists():
            wrong.append(f"no script {words[0]}")
        if program == "python" and importlib.util.find_spec(words[1]) is None:
            wrong.append(f"no module {words[1]}")
        if program == "fresco" and words[0].isidentifier() and len(words) > 1 and words[1:] != ["check"]:
            try:
                parse(words)
            except SystemExit:
                wrong.append(f"fresco does not take {words}")

    assert not wrong, "\n".join(wrong)


def test_no_document_cites_one_that_is_not_there() -> None:
    """Comments and docstrings name documents by path; each must exist."""
    cited = re.compile(r"\b(docs/[\w./-]+\.md)\b")
    missing = []

    for package in ("algos", "rl", "rollout", "envs", "launch", "experiments", "tests"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            missing += [f"{path}: {name}" for name in cited.findall(text) if not (ROOT / name).exists()]
            missing += [f"{path}: DESIGN" for _ in re.findall(r"\bDESIGN\b", text) if path != Path(__file__)]

    assert not missing, "\n".join(missing)
