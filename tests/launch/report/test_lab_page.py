"""The page Lab in headless Chromium: it is there where something was tried, and its samples open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser

from launch.report.page import write_report
from tests.launch.report.runs import Opened, copied


def loss(name: str, beyond: int | None) -> dict[str, Any]:
    curve = [1.0, 0.9, 0.4, 0.3]
    return {
        **{"name": name, "gradient": 0.5, "cosine": {"recorded": 0.25}, "clipped": {}, "ess": 0.9, "cpu_s": 1.0},
        **{"by_age": {"0": 0.25, "1": 0.75}, "by_reward": {"0": 0.5, "1": 0.5}, "gain": [0.1, 0.01]},
        **{"steps": [3, 4, 5, 6], "curves": {"trust/ess": curve, "loss/entropy": curve}, "beyond": beyond},
    }


LAB = {
    **{"first": 2, "trust": [0.5, 0.05], "reproduced": True},
    "losses": [loss("recorded", None), loss("<b>topr</b>", 5)],
    "samples": [
        {
            **{"row": 1, "group": 7, "ticket": 9, "reward": 1.0, "age": 1},
            **{"share": {"recorded": 0.1, "<b>topr</b>": -0.2}, "text": ["6 * 7", " =", " 42", "</script>"]},
            **{"generated": [2, 3], "pull": {"recorded": [0.5, -1.0], "<b>topr</b>": [0.1, 0.0]}},
        }
    ],
}


def test_what_was_tried_is_shown_and_a_sample_opens(browser: Browser, played: Path, tmp_path: Path) -> None:
    run = copied(played, tmp_path / "run")
    (run / "lab.json").write_text(json.dumps(LAB))
    opened = Opened(browser, write_report([run]), viewport={"width": 1280, "height": 800})
    opened.view("lab")
    opened.drawn()
    page = opened.page
    assert page.locator("main canvas").count() == 2
    said = page.inner_text("main")
    assert "<b>topr</b> from version 5" in said and "beyond trust (ess under 0.5, or KL over 0.05)" in said

    page.locator("details").click()
    page.wait_for_selector(".pulled span")
    assert page.inner_text(".pulled") == "6 * 7 = 42</script>"
    shades = page.eval_on_selector_all(
        ".pulled span", "nodes => nodes.map((node) => node.style.backgroundColor !== '')"
    )
    assert shades == [False, False, True, True]
    opened.is_quiet()


def test_a_run_on_which_nothing_was_tried_has_no_such_page(browser: Browser, played: Path, tmp_path: Path) -> None:
    opened = Opened(browser, write_report([copied(played, tmp_path / "run")]))
    assert opened.page.locator("nav button").count() == 5
