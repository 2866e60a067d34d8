"""The report in headless Chromium: silence, no request, every view, keys, light and dark, a phone's width."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from launch.report.gather import RunPage, gather
from launch.report.page import write_page, write_report
from tests.launch.report.runs import Opened, bare, copied

VIEWS = ("overview", "timeline", "samples", "steps", "compare")
HOSTILE = "</script><script>window.taken = 1</script><img src=x onerror='window.taken = 2'>"


@pytest.fixture(scope="module")
def reports(played: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of the finished run, of one that was killed, and of several: one was killed before its first step."""
    folder = tmp_path_factory.mktemp("reports")
    killed = copied(played, folder / "killed")
    failed = copied(played, folder / "failed", summary={"error": HOSTILE, "steps": 1})
    return {
        "finished": write_report([played]),
        "killed": write_report([killed], folder / "killed.html"),
        "several": write_report([played, killed, bare(played, folder / "bare"), failed], folder / "three.html"),
    }


@pytest.mark.parametrize("name", ["finished", "killed", "several"])
@pytest.mark.parametrize("width", [1280, 360])
def test_every_view_opens(browser: Browser, reports: dict[str, Path], name: str, width: int) -> None:
    scheme = "dark" if width == 360 else "light"
    opened = Opened(browser, reports[name], viewport={"width": width, "height": 800}, color_scheme=scheme)
    for view in VIEWS:
        opened.view(view)
        opened.drawn()
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, f"{view} scrolls sideways"
        assert opened.page.inner_text("main").strip(), f"{view} is empty"
        if view in ("overview", "timeline", "steps"):
            assert opened.page.locator("main canvas").count() > 0, f"{view} has drawn nothing"
    assert opened.page.get_attribute("html", "data-theme") == scheme
    opened.is_quiet()


def test_keys_and_the_switch_of_the_theme(browser: Browser, reports: dict[str, Path]) -> None:
    opened = Opened(browser, reports["finished"], color_scheme="light")
    page = opened.page
    for number, view in enumerate(VIEWS, 1):
        page.keyboard.press(str(number))
        opened.shown(view)

    page.keyboard.press("3")
    opened.shown("samples")
    first = page.inner_text(".talk h3")
    page.keyboard.press("ArrowRight")
    second = page.inner_text(".talk h3")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text(".talk h3") == first != second

    page.keyboard.press("2")
    opened.shown("timeline")
    window = "(() => { const x = [...charts][0].scales.x; return [x.min, x.max]; })()"
    whole = page.evaluate(window)
    for key in ("+", "ArrowRight", "ArrowUp"):
        before = page.evaluate(window)
        page.keyboard.press(key)
        page.wait_for_function(f"JSON.stringify({window}) !== '{str(before).replace(' ', '')}'")
    page.keyboard.press("0")
    page.wait_for_function(f"({window})[1] - ({window})[0] >= {0.999 * (whole[1] - whole[0])}")

    page.click("#theme")
    opened.shown("timeline")
    assert page.get_attribute("html", "data-theme") == "dark"
    opened.is_quiet()


def test_samples_are_found_read_and_coloured(browser: Browser, played: Path, reports: dict[str, Path]) -> None:
    facts = gather(played).facts["samples"]["episodes"]
    opened = Opened(browser, reports["finished"])
    page = opened.page
    opened.view("samples")
    page.select_option("label:has-text('kind') select", "train")
    count = sum(episode["kind"] == "train" for episode in facts)
    assert f"{count} of {len(facts)} episodes" in page.inner_text("main")

    group = (
        facts[-1]["group_id"]
        if facts[-1]["kind"] == "train"
        else next(e["group_id"] for e in facts if e["group_id"] >= 0)
    )
    members = [episode for episode in facts if episode["kind"] == "train" and episode["group_id"] == group]
    page.fill("label:has-text('group') input", str(group))
    page.press("label:has-text('group') input", "Enter")
    page.click("button:has-text('side by side')")
    assert page.locator(".members > .talk").count() == len(members) > 1

    tokens = page.locator(".members s").count()
    assert tokens == sum(episode["generated"] for episode in members)
    for colouring in ("probability", "ratio", "advantage", "entropy", "version", "mask"):
        page.select_option("label:has-text('colour by') select", colouring)
        page.locator(".members s").first.hover()
        assert "probability" in page.inner_text(".inspect")
    opened.is_quiet()


def test_a_bar_of_the_timeline_says_what_it_is(browser: Browser, reports: dict[str, Path]) -> None:
    opened = Opened(browser, reports["finished"], viewport={"width": 1200, "height": 900})
    opened.view("timeline")
    place = opened.page.evaluate(
        """() => {
            const chart = [...charts][0], facts = report.runs[0].timeline;
            const found = layer(report.blocks.get("timeline-0"), "episodes");
            const row = [...found.rows].findIndex((first, i) => found.rows[i + 1] > first);
            const lane = views.timeline.bounds.find((each) => row < each.first + each.count);
            const down = lane.top + ((row - lane.first + 0.5) / lane.count) * lane.height;
            const middle = (found.begin[found.rows[row]] + found.length[found.rows[row]] / 2) * facts.tick;
            const box = chart.over.getBoundingClientRect();
            return [box.left + chart.valToPos(middle, "x"), box.top + chart.valToPos(down, "y")];
        }"""
    )

    opened.page.mouse.move(*place)
    assert "ticket" in opened.page.inner_text(".inspect")
    opened.page.mouse.click(*place)
    opened.page.click("button:has-text('read it')")
    opened.shown("samples")
    opened.is_quiet()


def test_what_a_model_wrote_is_never_markup(browser: Browser, played: Path, tmp_path: Path) -> None:
    page: RunPage = gather(played)
    samples = page.facts["samples"]
    samples["texts"] = [HOSTILE] * len(samples["texts"])
    page.facts |= {"name": HOSTILE, "error": HOSTILE, "state": "failed"}
    page.facts["alarms"] = [
        {
            "time": 0.0,
            "step": 1,
            "name": HOSTILE,
            "who": "",
            "detail": HOSTILE,
            "cause": HOSTILE,
            "change": HOSTILE,
            "last_step": 1,
            "count": 1,
        }
    ]
    path = tmp_path / "hostile.html"
    write_page([page], path)
    assert HOSTILE not in path.read_text()

    opened = Opened(browser, path)
    for view in VIEWS:
        opened.view(view)
        assert opened.page.evaluate("window.taken === undefined") and opened.page.locator("main img").count() == 0
    opened.view("samples")
    assert HOSTILE in opened.page.inner_text(".said")
    opened.is_quiet()


def test_seeds_of_one_configuration_are_one_set(browser: Browser, played: Path, tmp_path: Path) -> None:
    pages = [gather(played) for _ in range(6)]
    for number, page in enumerate(pages):
        own = {"seed": number, "name": f"run-{number}", "rollout.alpha": 1.0 if number < 3 else 2.0}
        page.facts = page.facts | {"name": f"run-{number}", "config": page.facts["config"] | own}
    path = tmp_path / "seeds.html"
    write_page(pages, path)

    opened = Opened(browser, path)
    head = opened.page.locator("main table").first.locator("th").all_inner_texts()
    assert head == ["field", "alpha=1 (3 seeds)", "alpha=2 (3 seeds)"]
    fields = opened.page.locator("main table").first.locator("tbody tr").all_inner_texts()
    assert fields == ["rollout.alpha\t1\t2"]
    for metric in ("rollout/reward", "held-out accuracy"):
        for over in ("seconds", "samples", "steps"):
            opened.page.locator("main select").nth(0).select_option(metric)
            opened.page.locator("main select").nth(1).select_option(over)
            lines = opened.page.locator(".u-legend .u-series:not(.bound)")
            assert lines.count() == 3, "the axis and two sets"
    opened.is_quiet()
