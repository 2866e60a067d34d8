"""Ratios of pairs with their spread, and no verdict where a machine or a number of pairs does not allow one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from experiments.bench import _ratios
from experiments.bench._measuring import Timing
from experiments.bench._ratios import BUSY, Idle, Spread, machine, provenance, ratio_of

PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


def idle_machine() -> Idle:
    return Idle()


def busy_machine() -> Idle:
    busy = Idle()
    busy.others = 2 * BUSY
    return busy


def timings(*wall_s: float, cpu: float = 1.0) -> list[Timing]:
    return [Timing(seconds, cpu * seconds) for seconds in wall_s]


def test_a_ratio_is_that_of_the_pairs_not_of_the_medians() -> None:
    """The machine was three times slower in the second and fourth pair, for both sides."""
    ratio = ratio_of(timings(1.1, 3.3, 1.0, 3.6, 1.2, cpu=0.5), timings(1, 3, 1, 3, 1))
    assert (ratio.wall.median, ratio.wall.low, ratio.wall.high) == pytest.approx((1.1, 1.0, 1.2))
    assert ratio.cpu.median == pytest.approx(0.55)
    assert ratio.pairs == 5

    with pytest.raises(ValueError):
        ratio_of(timings(1, 2), timings(1))


def test_from_eight_pairs_on_the_spread_is_of_the_quartiles() -> None:
    spread = Spread.of([1, 2, 3, 4, 5, 6, 7, 80])
    assert (spread.median, spread.low, spread.high) == (4.5, 2.25, 6.75)


def test_a_verdict_needs_pairs_and_an_idle_machine() -> None:
    good = ratio_of(timings(*[1.0] * 5), timings(*[1.0] * 5))
    bad = ratio_of(timings(*[1.2] * 5, cpu=0.1), timings(*[1.0] * 5))
    few = ratio_of(timings(*[1.0] * 4), timings(*[1.0] * 4))

    assert good.verdict(at_most=1.05, of="wall", idle=idle_machine()).startswith("met")
    assert bad.verdict(at_most=1.05, of="wall", idle=idle_machine()).startswith("missed")
    assert bad.verdict(at_most=1.05, of="cpu", idle=idle_machine()).startswith("met")

    assert few.verdict(at_most=1.05, of="wall", idle=idle_machine()) == "no verdict: 4 pairs, at least 5 are needed"
    refused = bad.verdict(at_most=1.05, of="wall", idle=busy_machine())
    assert refused == "no verdict: others used 10% of this machine's cores meanwhile"


def test_what_we_burn_is_ours_and_what_others_burn_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 CPU seconds of all cores, 9 of them in use, 7 of those by us."""
    books = iter([(100.0, 50.0, 5.0), (120.0, 59.0, 12.0)])
    monkeypatch.setattr(_ratios, "_books", lambda: next(books))
    with Idle() as idle:
        pass
    assert idle.others == pytest.approx(0.1)


def test_seconds_of_children_are_ours_alive_or_ended() -> None:
    before = _ratios._books()[2]
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    ended = _ratios._books()[2]
    assert ended - before >= 0.4  # the kernel counts in hundredths

    child = subprocess.Popen([sys.executable, "-c", burn + "\nprint(flush=True)\ninput()"], **PIPES)
    assert child.stdout is not None
    child.stdout.readline()
    assert _ratios._books()[2] - ended >= 0.4
    child.communicate("\n")


def test_the_machine_is_named() -> None:
    assert "cores of" in machine()
    ratio = ratio_of(timings(*[1.0] * 5), timings(*[1.0] * 5))
    found = provenance(busy_machine(), {"path over bare": ratio})
    assert found["others_share"] == pytest.approx(0.1) and found["machine"] == machine()
    assert found["ratios"]["path over bare"]["pairs"] == 5
