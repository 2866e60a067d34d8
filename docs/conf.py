"""The site: the pages as they stand in the repository, and a reference made from docstrings.

    python -m sphinx -W -c docs . build/site

`-W` makes every dead link an error. What pages link to of the code is shown line by line, under `source/`.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

project = html_title = "Fresco"
html_theme = "furo"
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md", "experiments/**/README.md"]
exclude_patterns = [".*", "build", "runs"]
html_copy_source = False

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4
myst_url_schemes = {"http": None, "https": None, "source": "{{path}}#{{fragment}}"}
default_role = "code"  # docstrings quote code as Markdown does
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"

NAVIGATION = {
    "Begin": ["tutorial", "coming-from", "faq", "report", "results", "glossary"],
    "Train": ["configuration", "models", "losses", "advantages", "freshness"],
    "Watch": ["gpu", "operations", "kubernetes", "recovery", "replay", "silent-faults"],
    "Environments": ["environments", "agents", "alfworld", "maths", "swe"],
    "Extend": ["adding-a-loss", "adding-an-environment", "hooks", "adding-a-channel", "adding-a-launcher"],
    "Inside": ["architecture", "simulator", "/CONTRIBUTING", "/CHANGELOG", "/experiments/**"],
    "Reference": ["api/losses", "api/environments", "api/hooks", "api/configuration", "api/columns", "api/seams"],
}
_named = {page for pages in NAVIGATION.values() for page in pages}
NAVIGATION["Inside"] += sorted(page.stem for page in Path(__file__).parent.glob("*.md") if page.stem not in _named)
_CODE = re.compile(r"\]\(((?:\.\./)*)([\w/]+\.py)(?:#L(\d+))?\)")
_linked: set[str] = set()


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    """Links to code lead to its page here. The first page gets the navigation, which a repository does not need."""
    below = "../" * name.count("/")

    def moved(link: re.Match[str]) -> str:
        path = Path(app.srcdir, name, "..", link[1] + link[2]).resolve().relative_to(app.srcdir)
        _linked.add(str(path))
        return f"](source:{below}source/{path}.html#L-{link[3] or 1})"

    source[0] = _CODE.sub(moved, source[0])
    if name == root_doc:
        for caption, pages in NAVIGATION.items():
            listed = "\n".join(page if page.startswith("/") else f"docs/{page}" for page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{listed}\n```\n"


def _code_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path in sorted(_linked):
        text = Path(app.srcdir, path).read_text()
        shown = app.builder.highlighter.highlight_block(text, "python", lineanchors="L")  # type: ignore[attr-defined]
        yield f"source/{path}", {"title": path, "body": f"<h1>{path}</h1>{shown}"}, "page.html"


def _first_page(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        shutil.copy(app.outdir / f"{root_doc}.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read)
    app.connect("html-collect-pages", _code_pages)
    app.connect("build-finished", _first_page)
