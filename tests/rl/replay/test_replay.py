"""A recorded run trained again: what it computed to the last bit, and what a changed one would have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from launch.cli import main
from rl.config.schema import ConfigError
from rl.replay.recorded import Recorded, dealt
from rl.replay.replay import RECORDED, Request, Row, replayed
from rl.store.checkpoint_folder import steps_of
from tests.rl.learner.learner_harness import Harness
from tests.rl.replay import recording
from tests.rl.replay.recording import STEPS, batch, restart, train, without_sockets


def rows_of(folder: Path, first: int = 0, last: int = STEPS, *overrides: str, **options: object) -> list[Row]:
    recorded = Recorded(folder)
    variants = {"changed": recorded.changed(overrides)} if overrides else {}
    return list(replayed(recorded, Request(first, last, variants, **options)))  # type: ignore[arg-type]


def test_a_run_with_three_deaths_comes_out_to_the_last_bit(deadly_folder: Path) -> None:
    """Two ranks, critic, reference and two minibatches: every metric and every tensor of every version."""
    rows = rows_of(deadly_folder)
    assert [row.n for row in rows] == [0, *range(1, STEPS + 1)]
    assert all(row.identical and row.tensors == [] for row in rows)
    assert min(len(row.values) for row in rows[1:]) > 30
    assert {"critic/loss", "train/grad_norm", "loss/ess"} <= rows[1].values.keys()


def test_the_command_says_that_it_is_identical(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run_folder)]) == 0
    assert f"identical: {STEPS} steps" in capsys.readouterr().out
    assert main(["replay", str(run_folder), "--from", "3", "--to", "5"]) == 0
    assert "identical: 2 steps" in capsys.readouterr().out


def test_one_bit_in_a_batch_is_no_identical_run(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "run")
    lines = (folder / "digests.jsonl").read_text().splitlines()
    told = json.loads(lines[4])
    name = sorted(told["tensors"])[1]
    told["tensors"][name] = f"{int(told['tensors'][name], 16) ^ 1:016x}"
    (folder / "digests.jsonl").write_text("\n".join([*lines[:4], json.dumps(told), *lines[5:]]) + "\n")

    assert main(["replay", str(folder)]) == 1
    said = capsys.readouterr()
    assert f"NOT the run's numbers, first at version 4: {name}" in said.err and "identical: " not in said.out


def test_ranks_that_compute_together_and_save_in_the_background(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They die while a checkpoint may be on its way, go on, and come out to the last bit; so does one rank, nearly."""
    sharing = ("learner.ranks=2", "learner.context_parallel=2", "algo.kl.coef=0.1")
    run = recording.begin(tmp_path, *sharing, "learner.checkpoint_every=1", "learner.checkpoints=background")
    with Harness(run) as harness:
        train(harness, 0, 4)
        begun = restart(harness)
        assert 2 <= begun <= 4
        train(harness, begun, STEPS)
        harness.finish()
    without_sockets(run.folder)
    assert max(steps_of(run.folder / "checkpoints")) == STEPS

    assert all(row.identical and row.tensors == [] for row in rows_of(run.folder))
    assert main(["replay", str(run.folder), "learner.ranks=1", "learner.context_parallel=1"]) == 0
    assert "within 0.001 of the run: the largest difference is" in capsys.readouterr().out


def test_states_on_the_host_are_replayed_there_or_on_the_device(tmp_path: Path) -> None:
    """A run of two ranks that die is trained with them, and by either setting comes out to the last bit."""
    host = ("learner.ranks=2", "learner.optimizer_states=host", "algo.kl.coef=0.1", "alarms.exact=100")
    run = recording.begin(tmp_path, *host)
    with Harness(run) as harness:
        train(harness, 0, 4)
        assert restart(harness) == 3
        train(harness, 3, STEPS)
        harness.finish()
    without_sockets(run.folder)

    assert all(row.identical and row.tensors == [] for row in rows_of(run.folder))
    recorded = (run.folder / "run.json").read_text()
    changed = recorded.replace('"optimizer_states": "host"', '"optimizer_states": "device"')
    assert changed != recorded
    (run.folder / "run.json").write_text(changed)
    assert all(row.identical and row.tensors == [] for row in rows_of(run.folder))


def test_another_number_of_ranks_stays_within_its_bound(
    deadly_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(deadly_folder), "learner.ranks=1"]) == 0
    assert "within 0.001 of the run: the largest difference is" in capsys.readouterr().out


def test_a_batch_is_dealt_for_any_number_of_ranks() -> None:
    parts = batch(2, 2)
    alone = dealt(parts, 0, 1)
    three = [dealt(parts, rank, 3) for rank in range(3)]
    assert sorted(alone.members) == sorted(member for part in three for member in part.members) == list(range(8))
    for part in (alone, *three):
        ends = np.cumsum([0, *part.lengths])
        for member, begin, end, starts in zip(part.members, ends, ends[1:], part.turn_starts, strict=False):
            (own,) = [each for each in parts if member in each.members]
            place = own.members.index(member)
            first = sum(own.lengths[:place])
            assert starts == own.turn_starts[place]
            for name, values in part.columns.items():
                assert (values[begin:end] == own.columns[name][first : first + own.lengths[place]]).all()


def test_a_changed_run_begins_where_the_run_was_and_says_when_it_has_left(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(run_folder, 2, STEPS, "algo.loss=topr")
    base = {row.n: row for row in rows if row.variant == RECORDED}
    changed = {row.n: row for row in rows if row.variant == "changed"}
    assert all(row.identical for row in base.values()) and sorted(changed) == [3, 4, 5, 6]

    first = changed[3].values  # the same weights, before another step
    assert (first["trust/ess"], first["trust/kl"], first["gain"]) == (1.0, 0.0, 0.0)
    assert first["loss/entropy"] == base[3].values["loss/entropy"]
    assert first["train/grad_norm"] != base[3].values["train/grad_norm"]
    assert changed[6].values["trust/ess"] < 1 and changed[6].values["trust/kl"] > 0

    capsys.readouterr()
    main(["replay", str(run_folder), "--from", "2", "algo.loss=topr", "--trust", "0.9999,1"])
    said = [line for line in capsys.readouterr().out.splitlines() if "changed" in line or "BEYOND" in line]
    assert ["BEYOND TRUST" in line for line in said] == [False, True, True, True]


def test_the_same_under_another_name_stays_at_the_run(run_folder: Path) -> None:
    """From a state that was replayed to, not loaded: step 4 has no checkpoint."""
    rows = rows_of(run_folder, 4, STEPS, "algo.loss=grpo")
    same = {row.n: row.values for row in rows if row.variant == RECORDED}
    for row in rows:
        if row.variant == "changed":
            assert {name: row.values[name] for name in same[row.n]} == same[row.n]
            assert row.values["trust/ess"] == 1 and row.values["gain"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rollout.alpha=2"], "rollout.alpha=2: a replay trains what was sampled"),
        (["algo.critic.enabled=true"], "algo.critic.enabled=true: a replay"),
        (["algo.losss=grpo"], "did you mean 'loss'"),
        (["--from", "2", "--to", "9"], "needs that of step 6; it has the batches of steps 0 to 5"),
        (["--trust", "much"], "--trust much: give"),
    ],
)
def test_what_cannot_be_is_said(
    run_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["replay", str(run_folder), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_run_without_batches_is_refused(run_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("batches"))
    with pytest.raises(ConfigError, match=r"no batch in .*batches; run it with tracking.replay=full"):
        Recorded(folder)
