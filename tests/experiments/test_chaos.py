"""Faults from a seed: the schedule, what is checked afterwards, what is counted, and a short schedule on a live run."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
import zmq

from experiments.chaos.checks import left_behind, violations
from experiments.chaos.inject import cut_connection
from experiments.chaos.play import Played, play
from experiments.chaos.report import costs, played_before, report
from experiments.chaos.schedule import EVERYWHERE, MODULES, Fault, Kind, make_schedule, roles_of
from rl.config.schema import load_config
from rl.store.batch_files import write_batch_part
from rl.wire.columns import masked_columns
from rl.wire.messages import BatchPart, SampleRow


def test_a_schedule_comes_from_its_seed_and_meets_every_role() -> None:
    schedule = make_schedule(7, 100, 300)
    assert schedule == make_schedule(7, 100, 300) != make_schedule(8, 100, 300)
    assert [fault.step for fault in schedule] == sorted(fault.step for fault in schedule)
    assert schedule[0].step >= 1 and schedule[-1].step <= 299

    kinds = Counter(fault.kind for fault in schedule)
    assert kinds.keys() == set(get_args(Kind)) and max(kinds.values()) - min(kinds.values()) <= 1
    killed = Counter(fault.role for fault in make_schedule(7, 50, 300, ["kill"]))
    assert killed == dict.fromkeys(EVERYWHERE, 10)

    roles = roles_of(load_config(None, ["chat.parser=vllm:hermes"]))
    killed = Counter(fault.role for fault in make_schedule(7, 60, 300, ["kill"], roles))
    assert killed == dict.fromkeys(MODULES, 10) and roles_of(load_config(None, [])) == EVERYWHERE


def batch_part(step: int, samples: list[int]) -> BatchPart:
    rows = [SampleRow(sample, 0, 1.0, 1, 1, step) for sample in samples]
    columns = masked_columns({"token": 0, "turn": 0, "sequence": 0, "sample": 0})
    return BatchPart(
        step=step, rank=0, timeline=0, rows=rows, members=[], lengths=[], turn_starts=[], loss_tokens=1, columns=columns
    )


def write_run(folder: Path, **changes: Any) -> None:
    ends = ["running", "waiting", "batched", "stale", "filtered", "settled", "redundant", "failed"]
    samples = dict.fromkeys(["queued", *ends], 1)
    tokens = dict.fromkeys([*ends, "lost"], 1)
    ledger = {"samples": samples | {"issued": 11, "trained": 2}, "tokens": tokens | {"generated": 11, "trained": 2}}
    summary = {"start_step": 2, "steps": 3, "freshness_violations": 0, "ledger": ledger} | changes
    (folder / "summary.json").write_text(json.dumps(summary))


def test_what_does_not_hold_is_named(tmp_path: Path) -> None:
    assert "without a summary" in violations(tmp_path, 5, 1)[0]
    write_run(tmp_path)
    write_batch_part(tmp_path, batch_part(3, [1, 2]))
    write_batch_part(tmp_path, batch_part(4, [3, 4]))
    assert violations(tmp_path, 5, 0) == []

    write_batch_part(tmp_path, batch_part(5, [4]))
    assert violations(tmp_path, 5, 0) == ["sample 4 was trained in 2 steps"]
    write_run(tmp_path, freshness_violations=1, steps=1, error="why")
    assert violations(tmp_path, 5, 1)[:3] == [
        "exit code 1: why",
        "step 3 of 5 was reached",
        "freshness_violations is 1",
    ]

    books = json.loads((tmp_path / "summary.json").read_text())["ledger"]
    books["tokens"]["lost"] += 1
    write_run(tmp_path, ledger=books)
    assert "11 tokens were generated, 12 are accounted for" in violations(tmp_path, 5, 0)


def test_what_is_left_behind_is_named(tmp_path: Path) -> None:
    assert left_behind(set(), {"no such run"}, tmp_path) == []
    (tmp_path / "dropped").touch()
    with psutil.Popen(["sleep", "600"]) as sleeper:
        found = left_behind({psutil.Process(sleeper.pid)}, {"no such run"}, tmp_path, gone_s=0.1)
        sleeper.kill()
    assert found == [f"processes left behind: [{sleeper.pid}]", "temporary files left behind: ['dropped']"]


def test_costs_are_the_time_beyond_that_of_a_run_without_faults(tmp_path: Path) -> None:
    free = Played(steps=[0.0, 1.0, 2.0, 3.0, 4.0], summary={"eval": {"last": 0.5}})
    fault = Fault(1, "kill", "broker", 0.0)
    played = Played(
        steps=[10.0, 11.0, 14.0, 15.0, 16.5],  # 2 s lost after the first fault, half a second after the second
        faults=[(11.0, fault, "kill broker"), (15.0, Fault(3, "pause", "proxy", 0.0), "pause proxy")],
        summary={"eval": {"last": 0.25}},
    )
    found = report(played, free, tasks=1024)
    assert found["effective_training_time"] == round(4 / 6.5, 3)
    assert costs(played, free)["any broker"] == {"faults": 1, "mean_s": 2.0, "worst_s": 2.0}
    assert "do not overlap" in found["violations"][0]
    played.summary["eval"]["last"] = 0.48
    assert report(played, free, tasks=1024)["violations"] == []

    (tmp_path / "free.json").write_text(json.dumps(report(free, None, tasks=1024)))
    again = report(played, played_before(tmp_path / "free.json"), tasks=1024)
    assert again == report(played, free, tasks=1024)


def test_a_connection_is_cut_between_two_that_go_on(only_new_connections: None) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as here, context.socket(zmq.PUSH) as there:
        port = here.bind_to_random_port("tcp://127.0.0.1")
        monitor = there.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        there.connect(f"tcp://127.0.0.1:{port}")
        there.send(b"before")
        assert here.poll(60_000) and here.recv() == b"before"
        assert cut_connection(os.getpid(), random.Random(0))
        assert monitor.poll(60_000)
        there.send(b"after")
        assert here.poll(60_000) and here.recv() == b"after"
        there.disable_monitor()


@pytest.mark.parametrize("seed", [1])
@pytest.mark.docs
def test_a_short_schedule_on_a_live_run(seed: int) -> None:
    # Steps take longer than two looks at the run: each fault comes while there is one left.
    overrides = ["steps=40", "learner.checkpoint_every=2", "timeouts.hang_s=10", f"seed={seed}"]
    overrides += ["learner.options.step_s=0.2", "max_restarts=9"]
    schedule = make_schedule(seed, 9, 40, ["kill", "raise", "pause"])
    played = play("experiments/simulated.yaml", overrides, schedule, stuck_s=240)
    assert played.violations == [] and len(played.faults) == 9


@pytest.mark.docs
def test_a_worker_below_an_environment_server_dies(tmp_path: Path) -> None:
    rows = [{"prompt": f"{1 + number // 100} {1 + number % 100}", "long": 200} for number in range(200)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"source": str(source), "eval_count": 8, "reward": "tests.envs.dataset_rewards:length"}

    changes = ["steps=30", "learner.options.step_s=0.1", "env.name=dataset", f"env.options={json.dumps(options)}"]
    schedule = [Fault(step, "child", "grandchild", 0.0) for step in (3, 12)]
    played = play("experiments/simulated.yaml", changes, schedule, stuck_s=40)
    assert played.violations == [] and len(played.faults) == 2


@pytest.mark.docs
@pytest.mark.skipif(os.geteuid() != 0, reason="not run: mounting a small file system needs root")
def test_a_full_disk_ends_a_run_with_one_line_and_leaves_nothing() -> None:
    changes = ["steps=1000", "learner.options.step_s=0.1"]  # the disk ends it long before
    played = play("experiments/simulated.yaml", changes, [Fault(3, "disk", "machine", 0.0)], stuck_s=40)
    assert played.violations == [] and played.full_disk and len(played.steps) < 1000


@pytest.mark.docs
def test_what_is_lost_with_connections_is_asked_for_again() -> None:
    """Responses of some length, so that there is always something on its way."""
    changes = ["steps=30", "learner.options.step_s=0.3", "generator.options.decode_base_s=0.003", "seed=1"]
    schedule = make_schedule(1, 30, 30, ["cut"])
    played = play("experiments/simulated.yaml", changes, schedule, stuck_s=240)
    assert played.violations == [] and len(played.faults) == 30
