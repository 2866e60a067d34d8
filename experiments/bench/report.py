"""A report of a long run in headless Chromium: how soon it is open, frames while its timeline is zoomed, its size.

    python -m experiments.bench report [--events 1000000] [--tokens 1500000] [--zooms 60] [--out FILE.json]

Trace and conversations are made up. `overview_s` and `timeline_s` begin before the browser reads the file and end when
the view is drawn. A frame is the time from one animation frame to the next, with a zoom by 1.4 in it. On a machine that
does other things as well, `frame_cpu_ms` says what a frame costs.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

from experiments.bench._measuring import family_cpu_s, parser_of, report, temporary_run
from experiments.bench._synthetic_trace import write_trace
from launch.report.page import write_report
from rl.store.samples import FOLDER, LineFile, Sample, SampleTurn

_LENGTH = 500  # tokens of a conversation
_VOCABULARY = 150_000
_ZOOM = """async (zooms) => {
    const frame = () => new Promise(requestAnimationFrame);
    const took = [];
    let before = await frame();
    for (let i = 0; i < zooms; i++) {
        views.timeline.zoom(i % 20 < 10 ? 1 / 1.4 : 1.4, (i % 7) / 6);
        const now = await frame();
        took.push(now - before);
        before = now;
    }
    return took;
}"""


def write_samples(run: Path, tokens: int) -> None:
    """Conversations of random tokens: nothing compresses worse."""
    random = np.random.default_rng(0)
    file = LineFile(run / FOLDER / "env_server.0.0.jsonl")
    for ticket in range(tokens // _LENGTH):
        half = _LENGTH // 2
        sample = Sample(
            time=float(ticket),
            kind="train",
            ticket_id=ticket,
            group_id=ticket // 8,
            task_index=ticket // 8,
            reward=float(ticket % 2),
            success=bool(ticket % 2),
            stop_reason="done",
            seconds=1.0,
            token_ids=random.integers(0, _VOCABULARY, _LENGTH).tolist(),
            logp=[0.0] * half + (-random.exponential(1.0, half)).round(4).tolist(),
            versions=[-1] * half + [ticket // 64] * half,
            turns=[SampleTurn(half, _LENGTH, 0.0, "stop", 0)],
        )

        file.write(sample)
    file.close()


def opened(page: Page, path: Path, zooms: int) -> dict[str, float]:
    begin = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector("main[data-view=overview]")
    overview_s = time.perf_counter() - begin

    page.keyboard.press("2")
    page.wait_for_selector("main[data-view=timeline] canvas")
    page.evaluate("() => new Promise(requestAnimationFrame)")
    timeline_s = time.perf_counter() - begin

    page.keyboard.press("3")
    page.wait_for_selector("main[data-view=samples] .said")
    samples_s = time.perf_counter() - begin
    page.keyboard.press("2")
    page.wait_for_selector("main[data-view=timeline] canvas")

    cpu_s = family_cpu_s()  # what a frame costs, whatever else the machine does
    frames = page.evaluate(_ZOOM, zooms)
    return {
        "overview_s": overview_s,
        "timeline_s": timeline_s,
        "all_views_s": samples_s,
        "frame_cpu_ms": 1e3 * (family_cpu_s() - cpu_s) / zooms,
        "frame_median_ms": statistics.median(frames),
        "frame_p95_ms": statistics.quantiles(frames, n=20)[-1],
    }


def main(argv: list[str]) -> None:
    parser = parser_of("report", __doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=1_500_000)
    parser.add_argument("--zooms", type=int, default=60)
    arguments = parser.parse_args(argv)

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no Chromium here: apt-get install chromium")

    with temporary_run() as run, sync_playwright() as driver:
        write_trace(run.folder, arguments.events)
        write_samples(run.folder, arguments.tokens)
        begin = time.perf_counter()
        path = write_report([run.folder])
        figures = {"events": float(arguments.events), "made_in_s": time.perf_counter() - begin}
        figures["size_mb"] = path.stat().st_size / 1e6

        flags = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = driver.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        figures |= opened(page, path, arguments.zooms)
        browser.close()

    report(figures, "timeline_s at most 2, frame_p95_ms at most 100, size_mb at most 50", arguments.out)
