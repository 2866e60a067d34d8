"""Copies of a run's folder, as if it had ended otherwise, and its report in a browser."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page


def copied(run: Path, folder: Path, summary: dict[str, Any] | None = None) -> Path:
    """Without a summary: of a run whose supervisor was killed."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints"))
    (folder / "summary.json").unlink()
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def bare(run: Path, folder: Path) -> Path:
    """Of a run that was killed as soon as it had begun."""
    folder.mkdir()
    shutil.copy(run / "run.json", folder)
    return folder


class Opened:
    """A report in a browser that has said nothing and asked for nothing."""

    def __init__(self, browser: Browser, path: Path, **settings: Any) -> None:
        self.page: Page = browser.new_page(**settings)
        self.page.set_default_timeout(240_000)
        self.told: list[str] = []
        self.page.on("console", lambda message: self.told.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.told.append(f"error: {error}"))
        self.page.on("request", lambda request: self.told.append(request.url) if request.url != path.as_uri() else None)
        self.page.goto(path.as_uri())
        self.shown("overview", "compare")

    def shown(self, *views: str) -> None:
        """Wait for one of these views."""
        self.page.wait_for_selector(", ".join(f"main[data-view={view}]" for view in views))

    def drawn(self) -> None:
        """Wait for the next frame: histograms are drawn with it."""
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def view(self, name: str) -> None:
        self.page.click(f"nav button[data-view={name}]")
        self.shown(name)

    def is_quiet(self) -> None:
        assert not self.told
        self.page.close()
