"""What the page says of alarms, of what was not recorded, and of numbers that a chart could show wrongly."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from launch.report.gather import RunPage, gather
from launch.report.page import write_page
from tests.launch.report.runs import Opened

TILE = ".tile:has-text('{}')"
ALARM = {
    "time": 0.0,
    "step": 2,
    "name": "old-samples",
    "who": "broker.0",
    "detail": "",
    "cause": "",
    "change": "",
    "last_step": 7,
    "count": 3,
}


def opened(browser: Browser, page: RunPage, path: Path, **facts: Any) -> Opened:
    page.facts |= facts
    write_page([page], path)
    return Opened(browser, path, viewport={"width": 1280, "height": 800}, color_scheme="light")


def test_alarms_are_counted_drawn_and_lead_to_a_view(browser: Browser, played: Path, tmp_path: Path) -> None:
    report = opened(
        browser, gather(played), tmp_path / "alarms.html", alarms=[ALARM, ALARM | {"name": "clock", "count": 1}]
    )
    state = report.page.locator(TILE.format("state"))
    assert state.locator("b").inner_text() == "finished, 2 alarms" and "stopped" in (state.get_attribute("class") or "")
    first, second = report.page.locator(".alarms li").all_inner_texts()
    assert "first after step 2" in first and "3 times, last after step 7" in first and "times" not in second

    report.page.click("button:has-text('see Steps')")
    report.shown("steps")
    colours = report.page.evaluate(
        """[...charts].filter((chart) => chart.axes[0].label === "step").map((chart) => {
            const { left, top, width } = chart.bbox, x = chart.valToPos(2, "x", true);
            const [red, green, blue] = chart.ctx.getImageData(Math.round(x) - 1, top + 2, 1, 1).data;
            return `#${[red, green, blue].map((part) => part.toString(16).padStart(2, "0")).join("")}`;
        })"""
    )
    assert colours and set(colours) == {report.page.evaluate("colour('warn')")}
    report.is_quiet()


def test_no_number_is_minus_zero(browser: Browser, played: Path, tmp_path: Path) -> None:
    report = opened(browser, gather(played), tmp_path / "zero.html", gain=[-0.0004, -0.06, 0.05])
    assert report.page.evaluate("[percent(-0.0004), whole(-0.2), short(-0), percent(-0.01)]") == [
        "0.0\u00a0%",
        "0",
        "0",
        "-1.0\u00a0%",
    ]
    report.is_quiet()


def test_a_run_without_a_trace_says_so_in_one_line(browser: Browser, played: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(played, run, ignore=shutil.ignore_patterns("checkpoints", "trace"))
    failed = {"episodes": 60, "seconds": 1.5}
    report = opened(browser, gather(run), tmp_path / "bare.html", failed=failed)
    said = report.page.inner_text("main")
    assert "null" not in said.split() and "time and work: not recorded" in said
    assert "60 attempts, 1.5 s" in said
    report.is_quiet()


def test_one_evaluation_is_one_value_and_one_point(browser: Browser, played: Path, tmp_path: Path) -> None:
    page = gather(played)
    first = page.facts["evaluations"][0]
    report = opened(browser, page, tmp_path / "one.html", evaluations=[first], gain=None)
    shown = report.page.locator(TILE.format("held-out accuracy")).locator("b").inner_text()
    assert shown.split() == [f"{100 * first['accuracy']:.1f}", "%"]
    chart = "[...charts].find((chart) => chart.series[1].label === 'accuracy')"
    assert report.page.evaluate(f"[{chart}.series[1].points.show(), {chart}.scales.x.max]") == [True, 1]
    report.is_quiet()


def test_chance_of_simulated_engines_is_no_gain(browser: Browser, played: Path, tmp_path: Path) -> None:
    report = opened(browser, gather(played), tmp_path / "simulated.html", gain=[0.1, 0.0, 0.2])
    assert "gain" not in report.page.inner_text(TILE.format("held-out accuracy"))
    report.is_quiet()


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [0.9995, 0.9998, 1.0], [3e-6, 1e-6, 2e-6]])
def test_numbers_of_an_axis_have_room(browser: Browser, played: Path, tmp_path: Path, values: list[float]) -> None:
    page = gather(played)
    staleness = {"0": 500, "1": 700} if values[0] else {"0": 500}
    page.facts["rows"] |= {"loss/ess": values, "loss/kl_behavior": values}
    report = opened(browser, page, tmp_path / "axes.html", staleness=staleness)
    bars = "[...charts].find((chart) => chart.axes[0].label === 'versions').scales"
    assert report.page.evaluate(f"{bars}.y.min") == 0, "bars begin at zero"
    assert report.page.evaluate(f"{bars}.x.max") == len(staleness) - 0.5, "and fill the chart"

    report.view("steps")
    charts = report.page.evaluate(
        """[...charts].filter((chart) => ["ess", "k3"].includes(chart.series[1].label)).map((chart) => {
            const axis = chart.axes[1];
            chart.ctx.font = "12px sans-serif";
            const widest = Math.max(...axis._values.map((text) => chart.ctx.measureText(text).width));
            return [chart.scales.y.max, axis._size - widest, axis._values.join()];
        })"""
    )
    assert len(charts) == 2
    for highest, room, numbers in charts:
        assert room >= 10, numbers
        assert highest <= 1.1 and "000 %" not in numbers
    report.is_quiet()


def test_a_failed_sample_says_what_was_expected_and_what_was_read(
    browser: Browser, played: Path, tmp_path: Path
) -> None:
    page = gather(played)
    failed = [episode for episode in page.facts["samples"]["episodes"] if not episode["success"]]
    report = opened(browser, page, tmp_path / "failed.html")
    report.view("samples")
    report.page.select_option("label:has-text('solved') select", "no")
    assert f"{len(failed)} of" in report.page.inner_text("main")
    said = report.page.inner_text(".notes.bad").split("\n")
    assert said == ["expected", "at least 0.5 in the last turn", "read", failed[-1]["notes"]["read"]]
    report.is_quiet()


def test_samples_by_type_of_task_and_without_the_group_of_an_evaluation(
    browser: Browser, played: Path, tmp_path: Path
) -> None:
    page = gather(played)
    episodes = page.facts["samples"]["episodes"]
    for place, episode in enumerate(episodes):
        episode["types"] = ["add"] if place % 3 else ["multiply"]
    report = opened(browser, page, tmp_path / "types.html")
    report.view("samples")
    assert "group -1" not in report.page.inner_text("main") and "eval · task" in report.page.inner_text("main")

    report.page.select_option("label:has-text('type of task') select", "multiply")
    assert f"{len(episodes[::3])} of {len(episodes)} episodes" in report.page.inner_text("main")
    report.is_quiet()
