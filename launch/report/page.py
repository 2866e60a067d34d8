"""The page of a report: template, styles, scripts and data in one file that asks for nothing from anywhere.

The content-security policy allows the scripts and styles that stand here, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from launch.report.blocks import block_of_arrays, block_of_json, layout
from launch.report.gather import RunPage, gather
from rl.config.schema import ConfigError

_VENDOR = ("d3-array.min.js", "d3-sankey.min.js", "uPlot.iife.min.js")
_SCRIPTS = (
    "base.js",
    "charts.js",
    "overview.js",
    "timeline.js",
    "samples.js",
    "steps.js",
    "compare.js",
    "lab.js",
    "live.js",
    "main.js",
)


class Live(NamedTuple):
    """`tag`: of the data that the page has; `poll_s`: how long it waits before it asks for what is new."""

    tag: str
    poll_s: float


def write_page(runs: Sequence[RunPage], path: Path) -> None:
    """Raises OSError. A report that is being read is replaced as a whole."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(render(runs), encoding="utf-8")
    part.replace(path)


def blocks_of(runs: Sequence[RunPage]) -> dict[str, str]:
    """The data of the page by the id under which it has them."""
    blocks = {"facts": block_of_json([_facts(run) for run in runs])}
    for number, run in enumerate(runs):
        blocks |= {f"{name}-{number}": block_of_arrays(arrays) for name, arrays in run.arrays.items()}
    return blocks


def render(runs: Sequence[RunPage], live: Live | None = None) -> str:
    """live: of a page that is served, and asks its server, nobody else, for what is new."""
    ours = files(__package__)
    style = (ours / "vendor" / "uPlot.min.css").read_text() + (ours / "page" / "style.css").read_text()
    libraries = [(ours / "vendor" / name).read_text() for name in _VENDOR]
    script = "\n".join([*libraries, '"use strict";', *[(ours / "page" / name).read_text() for name in _SCRIPTS]])

    asks = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'; connect-src {asks}"
    )
    follows = f'<meta name="live" content="{live.tag}" data-every="{1000 * live.poll_s:.0f}">' if live else ""

    parts = {
        "POLICY": policy,
        "LIVE": follows,
        "TITLE": html.escape(", ".join(run.facts["name"] for run in runs)),
        "STYLE": f"<style>{style}</style>",
        "SCRIPT": f"<script>{script}</script>",
        "DATA": "\n".join(
            f'<script type="text/plain" id="{id}">{block}</script>' for id, block in blocks_of(runs).items()
        ),
    }

    page = (ours / "page" / "page.html").read_text()
    for name, part in parts.items():
        page = page.replace(f"<!--{name}-->", part)
    return page


def _facts(run: RunPage) -> dict[str, object]:
    return run.facts | {"layouts": {name: layout(arrays) for name, arrays in run.arrays.items()}}


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def write_report(folders: list[Path], out: Path | None = None) -> Path:
    """Write a report of runs in whatever state to `out`, else `report.html` in the folder of the first. Raises
    ConfigError."""
    path = out or folders[0] / "report.html"
    page = [gather(folder) for folder in folders]
    try:
        write_page(page, path)
    except OSError as error:
        raise ConfigError(f"--out {str(path)!r}: cannot be written ({error.strerror}); name another file") from None
    return path
