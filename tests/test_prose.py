"""Plain words: no long table cell, paragraph or sentence in a page, no long sentence in a docstring."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.structure import prose
from experiments.structure.checkout import FLOORS, modules_of

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
GENERATED = {"configuration.md"}
"""Its cells are the help of each field."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_is_in_plain_words(page: Path) -> None:
    found = prose.too_long(page.read_text())
    if page.name in GENERATED:
        found = [each for each in found if not each.startswith("cell")]
    assert not found, "\n".join(found)


def test_docstrings_have_no_long_sentence() -> None:
    modules = modules_of(ROOT, *FLOORS)
    wrong = [f"{module.path}:{said}" for module in modules for said in prose.long_sentences(module.tree)]
    assert not wrong, "\n".join(wrong)
