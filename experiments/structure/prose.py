"""Words, sentences, paragraphs and table cells of Markdown and of docstrings, as a reader counts them.

A quoted piece of code is one word, a link is its text, and blocks of code, pictures and comments are nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

LONGEST_CELL = 25
LONGEST_PARAGRAPH = 90
LONGEST_SENTENCE = 30

_ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "cf.", "vs.", "eq.", "Eq.", "Sec.", "Fig.", "No.", "p.")
_ITEM = re.compile(r"^\s*(?:[*+-]|\d+[.)])\s+")
_END = re.compile(r"(?<=[.!?])[)\"'”*_]*\s+(?=[A-Z0-9(\"'“*_\u0370-\u03ff])")
_RULE = re.compile(r"[\s|:-]+")


@dataclass
class Text:
    """A page in pieces."""

    paragraphs: list[str] = field(default_factory=list)
    """Each item of a list is one; headings are none."""
    cells: list[str] = field(default_factory=list)


def read(markdown: str) -> Text:
    """The prose of a page."""
    found = Text()
    lines: list[str] = []

    def end() -> None:
        if text := plain(" ".join(lines)):
            found.paragraphs.append(text)
        lines.clear()

    for line in _without_code(markdown):
        if line.lstrip().startswith("|"):
            end()
            if not _RULE.fullmatch(line):
                found.cells += [plain(cell) for cell in re.split(r"(?<!\\)\|", _quoted(line.strip().strip("|")))]
            continue
        if not line.strip() or line.startswith("#") or _ITEM.match(line):
            end()
        if line.strip() and not line.startswith("#"):
            lines.append(_ITEM.sub("", line, count=1).lstrip("> "))
    end()
    return found


def _without_code(markdown: str) -> Iterator[str]:
    """The lines outside of fences and comments."""
    fence = ""
    for line in re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL).splitlines():
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if fence:
            fence = "" if mark and mark[1].startswith(fence) else fence
            yield ""
        elif mark:
            fence = mark[1]
            yield ""
        else:
            yield line


def _quoted(text: str) -> str:
    """Each quoted piece of code is one word, so that nothing in it is read as a mark."""
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "Code", text)


def plain(text: str) -> str:
    """The text without links, pictures, tags and quoted code; a link may begin a sentence, whatever its text begins
    with."""
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", _quoted(text))
    text = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", lambda link: link[1][:1].upper() + link[1][1:], text)
    text = re.sub(
        r"https?://[^\s)>]*[^\s)>.,:;]", "Link", re.sub(r"</?(?:a|b|br|i|img|kbd|p|sub|sup)\b[^<>]*>", "", text)
    )
    return " ".join(text.split())


def words(text: str) -> int:
    """What has a letter or a digit in it."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def sentences(paragraph: str) -> list[str]:
    """They end with a mark before a capital letter or a number; abbreviations end none."""
    for place, short in enumerate(_ABBREVIATIONS):
        paragraph = re.sub(rf"(?<!\w){re.escape(short)}", f"\0{place}\0", paragraph)

    found = _END.split(paragraph)
    for place, short in enumerate(_ABBREVIATIONS):
        found = [sentence.replace(f"\0{place}\0", short) for sentence in found]
    return [sentence for sentence in found if sentence.strip()]


def too_long(markdown: str) -> list[str]:
    """What a page has above the limits, each with its number of words."""
    text = read(markdown)
    wrong = [f"cell of {words(cell)} words: {cell}" for cell in text.cells if words(cell) > LONGEST_CELL]
    for paragraph in text.paragraphs:
        if words(paragraph) > LONGEST_PARAGRAPH:
            wrong.append(f"paragraph of {words(paragraph)} words: {paragraph[:80]} …")
    every = [sentence for paragraph in [*text.paragraphs, *text.cells] for sentence in sentences(paragraph)]
    return wrong + [f"sentence of {words(each)} words: {each}" for each in every if words(each) > LONGEST_SENTENCE]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of each, also of fields; indented blocks in it, which are commands or layouts, are left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, _, rest = node.value.value.partition("\n")
            kept = [line[node.col_offset :] for line in rest.splitlines()]
            yield node.lineno, "\n".join([first, *("" if line.startswith("    ") else line for line in kept)])


def long_sentences(tree: ast.Module) -> list[str]:
    """The long sentences of docstrings, with their lines."""
    return [
        f"{line}: {words(sentence)} words: {sentence}"
        for line, text in docstrings(tree)
        for paragraph in [*read(text).paragraphs, *read(text).cells]
        for sentence in sentences(paragraph)
        if words(sentence) > LONGEST_SENTENCE
    ]
