"""What `fresco doctor` and a run say of a vLLM that is not the one that has run."""

from __future__ import annotations

import importlib.metadata
import re
import sys

import pytest

from launch.cli import main
from rl.config.schema import ConfigError
from rl.wire.run import ProcessContext
from rollout.generator.engines import make_engine
from tests.conftest import MakeRun

REFUSED = "vllm 0.33.1 is installed, and Fresco has run with 0.32 alone: pip install 'vllm==0.32.*'"


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.1" if name == "vllm" else found(name))


def test_another_vllm_is_a_finding(another: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 1
    assert f"  ! vLLM: {REFUSED}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "fine"),
    [((3, 10), False), ((3, 11), True), ((3, 12), True), ((3, 13), True), ((3, 14), False)],
)
def test_the_pythons_of_the_pins(
    version: tuple[int, int], fine: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (*version, 1))
    main(["doctor"])
    assert capsys.readouterr().out.startswith("  + Python" if fine else "  ! Python")


def test_another_vllm_is_refused_before_a_run(another: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "math_cpu", "--dry-run"]) == 2
    assert REFUSED in capsys.readouterr().err


def test_the_engine_of_another_machine_refuses_it_as_well(another: None, make_run: MakeRun) -> None:
    run = make_run("generator.engine=vllm")
    with pytest.raises(ConfigError, match=re.escape(REFUSED)):
        make_engine(ProcessContext(run, 0, 0))
