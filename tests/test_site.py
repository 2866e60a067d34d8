"""The site that the pages and docstrings make: every link leads somewhere, search works from a folder, all is local."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.chromium import chromium

ROOT = Path(__file__).parent.parent
COMMAND = "python -m sphinx -W -c docs . build/site"
REFERENCE = {
    "losses": ("algos.types.LossInputs.masked", "algos.registry.register_loss", "algos.correction"),
    "environments": ("rollout.episodes.environment.Environment.step", "rollout.episodes.environment.EnvironmentFamily"),
    "hooks": ("rollout.broker.hooks.BrokerHook.completed", "rollout.broker.tasks.TaskSource.restore"),
    "configuration": ("rl.config.section.Section", "rl.config.plugins.load"),
    "columns": ("rl.wire.columns.Column", "rl.wire.columns.register"),
    "seams": ("rl.models.protocol.PolicyModel", "rl.weights.channel.Sender", "launch.launcher.protocol.Launcher.start"),
}
pytestmark = pytest.mark.docs


class Page(HTMLParser):
    """What a page loads and links to, and where it can be entered."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value and name in ("id", "name"):
                self.anchors.add(value)
            elif value and name in ("src", "href"):
                (self.links if tag == "a" else self.loads).append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the documented command makes, in a folder elsewhere."""
    folder = tmp_path_factory.mktemp("site")
    _, *words, _ = shlex.split(COMMAND)
    done = subprocess.run([sys.executable, *words, folder], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_the_command_is_documented() -> None:
    assert COMMAND in (ROOT / "CONTRIBUTING.md").read_text()


def test_every_link_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links + page.loads:
            address, _, anchor = link.partition("#")
            name = address.partition("?")[0]
            if re.match(r"\w+:", link):
                continue
            target = (path.parent / unquote(name)).resolve() if name else path
            if not target.is_file() or (anchor and target in pages and unquote(anchor) not in pages[target].anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert len(pages) > 60 and not dead, "\n".join(dead)


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page], site: Path) -> None:
    assert not [load for page in pages.values() for load in page.loads if re.match(r"(\w+:)?//", load)]
    assert not [path for path in site.rglob("*.css") if re.search(r"(@import|url\()\W*(https?:)?//", path.read_text())]


def test_a_link_to_code_shows_its_line(pages: dict[Path, Page], site: Path) -> None:
    links = [link for link in pages[site / "docs/architecture.html"].links if "/source/" in link]
    assert "../source/rollout/broker/core.py.html#L-100" in links


@pytest.mark.parametrize("topic", REFERENCE)
def test_the_reference_has_what_users_extend(pages: dict[Path, Page], site: Path, topic: str) -> None:
    missing = [name for name in REFERENCE[topic] if not anchored(name, pages[site / f"docs/api/{topic}.html"])]
    assert not missing


def anchored(name: str, page: Page) -> bool:
    return name in page.anchors or f"module-{name}" in page.anchors


def test_search_works_from_a_folder(site: Path) -> None:
    with chromium() as browser:
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.fill("input[name=q]", "staleness")
        page.press("input[name=q]", "Enter")
        page.wait_for_selector("ul.search li a")
        found = page.locator("ul.search li a").all_inner_texts()
        assert len(found) > 3 and all(url.startswith(("file:", "data:")) for url in asked), asked
