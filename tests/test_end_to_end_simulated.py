"""The complete system of real processes and sockets with simulated engine and learner: joints, faults, clean ends."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
ENDS = ["trained", "stale", "filtered", "settled", "redundant", "failed"]
SAMPLE_STATES = ["queued", "running", "waiting", "batched", *ENDS]
TOKEN_STATES = [*SAMPLE_STATES[1:], "lost"]
WAITS_FOR = {
    "broker": ["env_server", "learner"],
    "env_server": ["broker", "proxy"],
    "generator": ["work"],
    "learner": ["broker"],
    "proxy": ["environments", "generators"],
}


def start(tmp_path: Path, *overrides: str) -> subprocess.Popen[str]:
    """A busy machine may take its time for an orderly end: what is killed has no closing report."""
    settings = [f"runs={tmp_path}", "timeouts.stop_s=60", *overrides]
    command = [sys.executable, "-m", "launch.cli", "run", "experiments/simulated.yaml", *settings]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], tmp_path: Path, code: int = 0) -> dict[str, Any]:
    output, _ = process.communicate(timeout=240)
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


def metrics_rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Of a run that goes on: those that have been written to their end."""
    text = (tmp_path / "simulated" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.split("\n")[:-1]]


def restarts(tmp_path: Path) -> dict[str, int]:
    """How many processes of each role were started in another's place: every incarnation has a log."""
    logs = [path.name.split(".") for path in (tmp_path / "simulated" / "logs").iterdir()]
    return dict(Counter(role for role, _, incarnation, _ in logs if incarnation != "0"))


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

    rows = metrics_rows(tmp_path)
    trained = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in trained] == list(range(1, 21))

    longest = summary["longest_wait"]
    role = longest["process"].split(".")[0]
    assert longest["whom"] in WAITS_FOR[role]
    assert 0 < longest["seconds"] < summary["seconds"] and 1 <= longest["step"] <= 21
    # Broker and learner know their steps; of others it is the one in which the heartbeat came, after the last row 21.
    told = f"wait/{longest['process']}/{longest['whom']}" in trained[-1]
    assert told or longest["step"] == 21 or role in ("broker", "learner")


def test_a_run_ends_by_its_time(tmp_path: Path) -> None:
    summary = finish(start(tmp_path, "steps=100000", "seconds=2", "learner.ranks=2"), tmp_path)
    check_books(summary, steps=summary["steps"])
    over = [row["time/over"] for row in metrics_rows(tmp_path) if "train/loss" in row]
    assert len(over) == summary["steps"] and over[-1] >= 1 > max(over[:-1], default=0)
    assert summary["eval"].keys() == {"first", "last"}


def test_redundancy_and_tcp_with_curve(tmp_path: Path) -> None:
    overrides = (
        "rollout.redundant_groups=2",
        "rollout.redundant_episodes=1",
        "network.transport=tcp",
        "weights.transport=zmq",
    )

    summary = finish(start(tmp_path, *overrides), tmp_path)
    check_books(summary, steps=20)
    assert summary["ledger"]["samples"]["redundant"] > 0


def test_turns_on_generators_of_different_versions_never_go_backwards(tmp_path: Path) -> None:
    """Six small generators that load slowly, one after another: an episode's turns hop between them."""
    overrides = (
        "steps=5",
        "eval.tasks=0",
        "rollout.groups_per_batch=8",
        "rollout.group_size=2",
        "generator.count=6",
        "generator.max_num_seqs=2",
        "generator.options.load_s=0.4",
        "generator.options.decode_base_s=0.003",
        "generator.options.length_mean=16",
        "env.max_turns=6",
        "env.options.turns=6",
        "learner.options.step_s=0.2",
    )

    summary = finish(start(tmp_path, *overrides), tmp_path)
    check_books(summary, steps=5)
    assert summary["staleness"]["max"] == 1
    assert summary["ledger"]["tokens"]["failed"] == 0, "a trajectory was refused"


def pid_of(tmp_path: Path, role: str, index: int = 0, incarnation: int = 0) -> int:
    """The process of a role, once it has been started."""
    wanted = [f"-m {role}", f"--index {index}", f"--incarnation {incarnation}"]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for process in psutil.process_iter(["pid", "cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if str(tmp_path) in line and all(part in line for part in wanted):
                return int(process.info["pid"])
        time.sleep(0.05)

    raise AssertionError(f"{role} did not appear")


def wait_for_step(tmp_path: Path, step: int, deadline_s: float = 240, name: str = "simulated") -> None:
    path = tmp_path / name / "metrics.jsonl"
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


@pytest.mark.parametrize("role", ["rollout.generator.process", "envs.server"])
def test_a_killed_worker_costs_nothing_but_time(tmp_path: Path, role: str) -> None:
    process = start(tmp_path, "steps=40", "learner.options.step_s=0.1")
    wait_for_step(tmp_path, 5)
    os.kill(pid_of(tmp_path, role), signal.SIGKILL)
    summary = finish(process, tmp_path)
    check_books(summary, steps=40)


def test_a_death_that_is_one_too_many_names_the_cause(tmp_path: Path) -> None:
    process = start(tmp_path, "steps=1000", "max_restarts=0")
    wait_for_step(tmp_path, 2)
    os.kill(pid_of(tmp_path, "rl.learner.simulated"), signal.SIGKILL)
    summary = finish(process, tmp_path, code=1)
    assert "killed by SIGKILL" in summary["error"]


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    process = start(tmp_path, "steps=1000")
    wait_for_step(tmp_path, 3)  # the broker has heard of version 2
    process.send_signal(signal.SIGINT)
    summary = finish(process, tmp_path, code=130)

    samples = summary["ledger"]["samples"]  # also an interrupted run has its books
    assert samples["issued"] == sum(samples[state] for state in SAMPLE_STATES) and samples["trained"] >= 32
    assert summary["weight_sync"]["count"] > 0


def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(tmp_path, "steps=1000", "rollout.alpha=2", "name=run one")
    wait_for_step(tmp_path, 3, name="run one")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130, output[-2000:]

    (line,) = [line for line in output.splitlines() if line.startswith("to go on from step ")]
    head, _, told = line.partition(": ")
    step = int(head.split()[-1])
    assert told == "the same command, or resume=auto"

    settings = f"runs={shlex.quote(str(tmp_path))} steps={step + 2} rollout.alpha=2 name='run one' resume=auto"
    command = f"{sys.executable} -m launch.cli run simulated {settings}"
    again = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stdout[-2000:] + again.stderr
    summary = json.loads((tmp_path / "run one" / "summary.json").read_text())
    assert step >= 3 and summary["start_step"] == step and summary["steps"] == 2


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """The learner is stopped, so the checkpoint that the first one asks for cannot be saved."""
    process = start(tmp_path, "steps=1000", "timeouts.hang_s=500", "timeouts.stop_s=3")
    wait_for_step(tmp_path, 3)
    os.kill(pid_of(tmp_path, "rl.learner.simulated"), signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    for line in process.stdout:
        if "Ctrl-C again ends at once" in line:
            break

    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130 and "to go on" not in output


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
    output, _ = process.communicate(timeout=240)
    (line,) = [line for line in output.splitlines() if line.startswith("fresco:")]
    assert process.returncode == 2 and text in line
    assert not (tmp_path / "simulated").exists()


def test_two_runs_over_tcp_at_one_address_need_no_ports_from_anybody(tmp_path: Path) -> None:
    """Each process binds what is free, and says where."""
    tcp = ("network.transport=tcp", "steps=5", "eval.tasks=0")
    runs = [tmp_path / "one", tmp_path / "other"]
    processes = [start(folder, *tcp, "generator.count=3", "learner.ranks=2") for folder in runs]
    for process, folder in zip(processes, runs, strict=True):
        check_books(finish(process, folder), steps=5)


def test_two_nodes_of_another_launcher(tmp_path: Path) -> None:
    """Generators and environment servers listen at another address than broker, proxy and learner."""
    overrides = (
        "launcher=tests.launch.agent_launcher:AgentLauncher",
        "network.transport=tcp",
        "learner.ranks=2",
        "learner.options.step_s=0.3",  # it is not over before whoever looks has seen it
    )

    process = start(tmp_path, *overrides)
    wait_for_step(tmp_path, 2)
    hosts = {
        "rollout.broker.process": {"127.0.0.1"},
        "rollout.proxy.process": {"127.0.0.1"},
        "rl.learner.simulated": {"127.0.0.1"},
        "rollout.generator.process": {"127.0.0.2"},
    }

    found: dict[str, set[str]] = {}
    while found != hosts:  # the first generator may still start when the other one has sampled two batches
        assert process.poll() is None, found
        found = {role: _listens_at(pid_of(tmp_path, role)) for role in hosts}

    summary = finish(process, tmp_path)
    check_books(summary, steps=20)
    assert summary["weight_sync"]["dense"] > 2  # parts of ranks; a simulated learner's weights change all


def _listens_at(pid: int) -> set[str]:
    """Addresses of this machine."""
    connections = psutil.Process(pid).net_connections("tcp")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("192.0.2.1", "no address of this machine"),
        ("no.such.host.invalid", "no address"),
        ("0.0.0.0", "that others use"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_line_before_anything_starts(
    tmp_path: Path, host: str, text: str
) -> None:
    process = start(tmp_path, "network.transport=tcp", f"network.host={host}")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2 and f"network.host='{host}': " in output and text in output
