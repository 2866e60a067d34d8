"""The page's weight: what a conversation costs in it, and that the page reads it back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from playwright.sync_api import Browser

from experiments.bench.report import write_samples
from launch.report.blocks import block_of_arrays, block_of_json
from launch.report.gather import gather
from launch.report.page import write_report
from launch.report.samples import gather_samples
from rl.store.samples import read_samples
from tests.conftest import MakeRun
from tests.launch.report.runs import Opened

TOKENS = 100_000
MOST_BYTES = 7.0
"""Of one random token, whose text nearly always occurs once; 8.8 before 2026-11-27."""


def test_a_token_weighs_little(make_run: MakeRun) -> None:
    run = make_run()
    write_samples(run.folder, TOKENS)
    page = gather_samples(run.folder, run)
    assert len(block_of_json(page.facts)) + len(block_of_arrays(page.arrays)) < MOST_BYTES * TOKENS

    ids = np.cumsum(page.arrays["vocabulary"])[page.arrays["place"]]
    assert ids.tolist() == [id for sample in read_samples(run.folder) for id in sample.token_ids]
    assert len(page.facts["texts"]) == len(set(ids.tolist()))


def test_the_page_reads_each_tokens_id_and_text(browser: Browser, played: Path, tmp_path: Path) -> None:
    opened = Opened(browser, write_report([played], tmp_path / "one.html"))
    opened.view("samples")
    shown = opened.page.evaluate(
        """async () => {
            const tokens = await arraysOf("samples"), run = report.runs[0], episode = run.samples.episodes[0];
            return [...Array(episode.tokens).keys()].map((place) => idAt(tokens, episode, place));
        }"""
    )
    first = gather(played).facts["samples"]["episodes"][0]
    (sample,) = [each for each in read_samples(played) if each.ticket_id == first["ticket_id"]]
    assert shown == sample.token_ids
    opened.is_quiet()
