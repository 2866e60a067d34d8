"""The complete system of real processes and sockets with simulated engine and learner: joints, faults, clean ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import BASE_PORT

ROOT = Path(__file__).parent.parent
SAMPLE_STATES = ("queued", "running", "waiting", "batched", "trained", "stale", "filtered", "redundant", "failed")
TOKEN_STATES = ("running", "waiting", "batched", "trained", "stale", "filtered", "redundant", "failed", "lost")


def start(tmp_path: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launch.cli", "run", "experiments/simulated.yaml", f"runs={tmp_path}", *overrides]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], tmp_path: Path, code: int = 0) -> dict[str, Any]:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output[-4000:]
    summary: dict[str, Any] = json.loads((tmp_path / "simulated" / "summary.json").read_text())
    run = json.loads((tmp_path / "simulated" / "run.json").read_text())
    assert not list(Path("/dev/shm").glob(f"fresco-{run['run_id']}*")), "shared memory was left behind"
    assert not Path(run["socket_folder"]).exists(), "sockets were left behind"

    left = [
        p.info for p in psutil.process_iter(["pid", "cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])
    ]
    assert not left, "processes were left behind"

    return summary


def check_books(summary: dict[str, Any], steps: int) -> None:
    samples = summary["ledger"]["samples"]
    tokens = summary["ledger"]["tokens"]
    assert samples["issued"] == sum(samples[state] for state in SAMPLE_STATES)
    assert tokens["generated"] == sum(tokens[state] for state in TOKEN_STATES)
    assert tokens["trained"] > 0
    assert summary["freshness_violations"] == 0
    assert summary["steps"] == steps and samples["trained"] == steps * 16


@pytest.mark.parametrize("alpha", [0, 0.5, 1, 2])
def test_a_run_closes_its_books(tmp_path: Path, alpha: float) -> None:
    summary = finish(start(tmp_path, f"rollout.alpha={alpha}"), tmp_path)
    check_books(summary, steps=20)
    assert summary["alpha"] == alpha and summary["staleness"]["max"] <= -(-alpha // 1)
    if alpha == 0:
        assert summary["staleness"]["mean"] == 0

    assert summary["eval"].keys() == {"first", "last"}
    assert summary["weight_sync"]["count"] >= 2 and summary["weight_sync"]["bytes"] > 0
    for key in (
        "seconds",
        "seconds_to_first_update",
        "reward",
        "useful_tokens_per_second",
        "kept_over_issued_length",
        "learner_wait_fraction",
        "generator_idle_fraction",
    ):
        assert summary[key] is not None, key

    rows = [json.loads(line) for line in (tmp_path / "simulated" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 21))


def test_redundancy_and_tcp_with_curve(tmp_path: Path) -> None:
    overrides = (
        "rollout.redundant_groups=2",
        "rollout.redundant_episodes=1",
        "network.transport=tcp",
        "weights.transport=zmq",
        f"network.base_port={BASE_PORT}",
    )

    summary = finish(start(tmp_path, *overrides), tmp_path)
    check_books(summary, steps=20)
    assert summary["ledger"]["samples"]["redundant"] > 0


def pid_of(tmp_path: Path, role: str, index: int = 0) -> int:
    """The process of a role, once its log exists and it has registered."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for process in psutil.process_iter(["pid", "cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if str(tmp_path) in line and f"-m {role}" in line and f"--index {index}" in line:
                return int(process.info["pid"])
        time.sleep(0.05)

    raise AssertionError(f"{role} did not appear")


def wait_for_step(tmp_path: Path, step: int, deadline_s: float = 30) -> None:
    path = tmp_path / "simulated" / "metrics.jsonl"
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


@pytest.mark.parametrize("role", ["rollout.generator.process", "envs.server"])
def test_a_killed_worker_costs_nothing_but_time(tmp_path: Path, role: str) -> None:
    process = start(tmp_path, "steps=40")
    wait_for_step(tmp_path, 5)
    os.kill(pid_of(tmp_path, role), signal.SIGKILL)
    summary = finish(process, tmp_path)
    check_books(summary, steps=40)


@pytest.mark.parametrize("role", ["rollout.broker.process", "rollout.proxy.process", "rl.learner.simulated"])
def test_the_death_of_a_single_role_names_the_first_cause(tmp_path: Path, role: str) -> None:
    process = start(tmp_path, "steps=1000")
    wait_for_step(tmp_path, 2)
    os.kill(pid_of(tmp_path, role), signal.SIGKILL)
    summary = finish(process, tmp_path, code=1)
    assert "killed by SIGKILL" in summary["error"]


def test_a_run_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """After the death of a role that cannot be replaced: the ledger rolls back with the checkpoint, and closes."""
    process = start(tmp_path, "steps=40", "learner.checkpoint_every=5")
    wait_for_step(tmp_path, 8)
    os.kill(pid_of(tmp_path, "rollout.broker.process"), signal.SIGKILL)
    summary = finish(process, tmp_path)
    assert summary["start_step"] in (5, 10)

    summary["steps"] += summary["start_step"]
    check_books(summary, steps=40)
    steps = [json.loads(line)["step"] for line in (tmp_path / "simulated" / "metrics.jsonl").read_text().splitlines()]

    assert min(steps) >= summary["start_step"] and max(steps) == 40
    assert (tmp_path / "simulated.1" / "metrics.jsonl").exists()


def test_ctrl_c_ends_everything_within_ten_seconds(tmp_path: Path) -> None:
    process = start(tmp_path, "steps=1000")
    wait_for_step(tmp_path, 2)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    summary = finish(process, tmp_path, code=130)
    assert time.monotonic() - begin < 10

    samples = summary["ledger"]["samples"]  # also an interrupted run has its books
    assert samples["issued"] == sum(samples[state] for state in SAMPLE_STATES) and samples["trained"] >= 32
    assert summary["weight_sync"]["count"] > 0


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("rollout.alfa=1", "unknown key 'rollout.alfa'; did you mean 'alpha'?"),
        ("env.options={turn: 1}", "turns"),
        ("env.name=syntetic", "synthetic"),
        ("rollout.groups_per_batch=0", "groups_per_batch"),
    ],
)
def test_bad_configuration_is_one_line_before_anything_starts(tmp_path: Path, override: str, text: str) -> None:
    process = start(tmp_path, override)
    output, _ = process.communicate(timeout=30)
    (line,) = [line for line in output.splitlines() if line.startswith("fresco:")]
    assert process.returncode == 2 and text in line
    assert not (tmp_path / "simulated").exists()


def test_a_port_in_use_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        # A connection of an earlier test may linger on this port.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", BASE_PORT + 1))
        taken.listen()
        process = start(tmp_path, "network.transport=tcp", f"network.base_port={BASE_PORT}")
        output, _ = process.communicate(timeout=30)

    assert process.returncode == 2 and f"port {BASE_PORT + 1} " in output and "choose another base_port" in output


def test_ports_beyond_the_last_one_are_one_line_before_anything_starts(tmp_path: Path) -> None:
    process = start(tmp_path, "network.transport=tcp", "network.base_port=65000", "generator.count=600")
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 2 and "network.base_port=65000" in output and "at most 64924" in output
