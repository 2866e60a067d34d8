"""What a reader sees at a glance: colours that differ, cards that fill their row, a sample on a phone's screen."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser

from launch.report.gather import gather
from launch.report.page import write_page, write_report
from tests.launch.report.runs import Opened, copied

APART = 0.06  # in OKLab: about three differences that are just seen
_TO_LMS = ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300))
_TO_LAB = ((0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087))


def oklab(code: str) -> np.ndarray:
    rgb = np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    found: np.ndarray = np.array(_TO_LAB) @ np.cbrt(np.array(_TO_LMS) @ linear)
    return found


def alike(colours: dict[str, str]) -> Iterator[str]:
    for (one, first), (other, second) in itertools.combinations(colours.items(), 2):
        if np.linalg.norm(oklab(first) - oklab(second)) < APART:
            yield f"{one} {first} and {other} {second}"


def page_file(name: str) -> str:
    return (files("launch.report") / "page" / name).read_text()


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_no_two_colours_of_a_picture_are_alike(theme: int) -> None:
    named = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", page_file("style.css").split("}")[theme]))
    curves = {name: code for name, code in named.items() if re.fullmatch(r"c\d+", name)}
    assert len(curves) == 16 and not list(alike(curves))

    table = re.search(r"const TINTS = \{(.*?)\};", page_file("timeline.js"), re.DOTALL)
    assert table is not None
    tints = dict(re.findall(r"(\w+): \"(\w+)\"", table[1])) | {"waiting": "busy"}
    assert len(set(tints.values())) == len(tints), "each kind of bar has a colour of its own"
    assert not list(alike({kind: named[tint] for kind, tint in tints.items()}))


@pytest.mark.parametrize("width", [1440, 1000, 390])
def test_cards_fill_their_row(browser: Browser, played: Path, tmp_path: Path, width: int) -> None:
    opened = Opened(browser, write_report([played], tmp_path / "one.html"), viewport={"width": width, "height": 900})
    for view in ("overview", "steps"):
        opened.view(view)
        opened.drawn()
        ragged = opened.page.evaluate(
            """[...document.querySelectorAll(".grid")].flatMap((grid) => {
                const end = grid.getBoundingClientRect().right, cards = [...grid.children];
                const last = cards.filter((card, i) => i + 1 === cards.length
                    || cards[i + 1].getBoundingClientRect().left <= card.getBoundingClientRect().left);
                return last.filter((card) => Math.abs(card.getBoundingClientRect().right - end) > 1);
            }).map((card) => card.textContent.slice(0, 60))"""
        )
        assert not ragged, f"{view}: {ragged}"
    opened.is_quiet()


def test_a_phone_shows_the_first_sample_without_scrolling(browser: Browser, played: Path, tmp_path: Path) -> None:
    report = write_report([played], tmp_path / "one.html")
    opened = Opened(browser, report, viewport={"width": 390, "height": 844})
    opened.view("samples")
    box = opened.page.locator(".turn").first.bounding_box()
    assert box is not None and box["y"] + 20 < 844
    opened.page.click("summary")
    opened.page.select_option("label:has-text('kind') select", "eval")
    opened.page.click("summary")
    assert opened.page.inner_text("summary") == "Filters (1 set)"
    opened.is_quiet()


def test_legends_name_what_occurs(browser: Browser, played: Path, tmp_path: Path) -> None:
    page = gather(played)
    opened = Opened(browser, write_report([played], tmp_path / "one.html"))
    opened.view("timeline")
    named = opened.page.locator(".legend").first.locator(".key").all_inner_texts()
    kinds = page.facts["timeline"]["kinds"]
    arrays = page.arrays["timeline"]
    ends = {kinds[code] for code in np.unique(arrays["episodes.kind"])}
    assert ends <= set(named) and not {"redundant", "filtered", "settled", "failed"} - ends & set(named)
    assert "waiting" in named and named.count("waiting") == 1 and "train" in named
    opened.is_quiet()


def test_smoothing_draws_the_mean_over_what_was_seen(browser: Browser, played: Path, tmp_path: Path) -> None:
    page = gather(played)
    count = len(page.facts["rows"]["step"])
    page.facts["rows"]["rollout/reward"] = [float(i % 2) for i in range(count)]
    write_page([page], tmp_path / "smooth.html")
    opened = Opened(browser, tmp_path / "smooth.html")
    rewards = """(() => { const chart = [...charts].find((each) => each.series.some((one) => one.label === "reward"));
        return chart.series.map((one, i) => [one.label, one.class === "bound", chart.data[i]])
            .filter(([label]) => label === "reward"); })()"""
    ((_, silent, raw),) = opened.page.evaluate(rewards)
    assert not silent and raw == [0.0, 1.0, 0.0][:count]
    opened.page.select_option("label:has-text('curves') select", "5")
    opened.shown("overview")
    (_, faint, same), (_, silent, mean) = opened.page.evaluate(rewards)
    assert faint and same == raw and not silent and mean == pytest.approx([0.0, 1 / 2, 1 / 3][:count])
    opened.is_quiet()


def runs_of(played: Path, *facts: dict[str, Any]) -> list[Any]:
    """The same run, once for each, with other facts and another seed."""
    pages = []
    for number, told in enumerate(facts):
        page = gather(played)
        config = page.facts["config"] | {"name": f"run-{number}", "seed": told.pop("seed")}
        page.facts = page.facts | {"name": f"run-{number}", "config": config} | told
        pages.append(page)
    return pages


def test_seeds_are_counted_by_seed_and_unequals_are_marked(browser: Browser, played: Path, tmp_path: Path) -> None:
    last = {"step": 3, "seconds": 1.0, "low": 0.0, "high": 1.0}

    def told(seed: int, accuracy: float, **more: Any) -> dict[str, Any]:
        return {"seed": seed, "evaluations": [last | {"accuracy": accuracy}]} | more

    write_page(runs_of(played, told(1, 0.6), told(1, 0.8)), tmp_path / "one.html")
    opened = Opened(browser, tmp_path / "one.html")
    outcome = "main table:has-text('steps trained')"
    assert "2 runs of 1 seed" in opened.page.inner_text(outcome)
    accuracy = opened.page.inner_text(f"{outcome} tr:has-text('held-out')")
    assert accuracy.split("\t")[1] == "0.7", "one seed has no interval"
    opened.is_quiet()

    killed = told(3, 0.1, state="killed")
    write_page(runs_of(played, told(1, 0.6), told(1, 0.8), told(2, 0.9), killed), tmp_path / "more.html")
    opened = Opened(browser, tmp_path / "more.html")
    said = opened.page.inner_text("main")
    assert "run-3: unfinished (killed at step 3 of 3), not in the outcomes" in said
    assert "3 runs of 2 seeds" in opened.page.inner_text(outcome)
    accuracy = opened.page.inner_text(f"{outcome} tr:has-text('held-out')")
    assert accuracy.split("\t")[1] == "0.8 ± 1.27", "a mean for each seed, then Student's t of two"
    opened.is_quiet()


def test_finished_runs_of_unequal_length_are_marked(browser: Browser, played: Path, tmp_path: Path) -> None:
    shorter = gather(played).facts["rows"]
    shorter = {name: values[:2] for name, values in shorter.items()}
    write_page(runs_of(played, {"seed": 1}, {"seed": 2, "rows": shorter}), tmp_path / "unequal.html")
    opened = Opened(browser, tmp_path / "unequal.html")
    assert "its runs are of unequal length, 2, 3 steps" in opened.page.inner_text("main")
    opened.is_quiet()


def test_a_hard_task_leads_to_its_conversations(browser: Browser, played: Path, tmp_path: Path) -> None:
    page = gather(copied(played, tmp_path / "copy"))
    hardest = page.facts["tasks"]["hardest"]["train"][0]
    write_page([page], tmp_path / "hard.html")
    opened = Opened(browser, tmp_path / "hard.html")
    opened.page.click(f"section:has-text('Training tasks solved least') button:text-is('{hardest['task']}')")
    opened.shown("samples")
    assert f"{hardest['tries']} of" in opened.page.inner_text("main")
    opened.is_quiet()


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_is_wider_than_the_screen_and_steps_are_whole(
    browser: Browser, played: Path, tmp_path: Path, width: int, scheme: Any
) -> None:
    """Wide tables scroll within their card, whose edge is shaded where more of them stands behind it."""
    report = write_report([played, played], tmp_path / "two.html")
    opened = Opened(browser, report, viewport={"width": width, "height": 844}, color_scheme=scheme)
    for view in ("overview", "timeline", "samples", "steps", "compare"):
        opened.view(view)
        opened.drawn()
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, view
        opened.page.wait_for_function(
            "![...charts].some((chart) => chart.axes[0].label === 'step' && !chart.axes[0]._values)"
        )
        ticks = opened.page.evaluate(
            "[...charts].filter((chart) => chart.axes[0].label === 'step').flatMap((chart) => chart.axes[0]._values)"
        )
        assert all(float(tick) % 1 == 0 for tick in ticks if tick), (view, ticks)

    opened.view("overview")
    shades = opened.page.evaluate("getComputedStyle(document.querySelector('.scroll')).backgroundAttachment")
    assert shades == "local, local, scroll, scroll"
    opened.is_quiet()


def test_a_column_that_would_be_empty_is_left_out(browser: Browser, played: Path, tmp_path: Path) -> None:
    """The tasks of the simulated recipe have no types."""
    opened = Opened(browser, write_report([played], tmp_path / "one.html"))
    heads = opened.page.locator("section:has-text('tasks solved least') th").all_inner_texts()
    assert heads and "type" not in heads
    opened.is_quiet()
