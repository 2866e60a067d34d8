"""A run with a teacher: every trained token is scored, whatever dies; and the teacher's numbers are the model's own."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model
from rl.store.batch_files import read_batch_parts
from rl.wire.columns import TEACHER_LOGP, register
from rl.wire.messages import BatchPart, ScoreTokens
from rollout.teacher.scoring import stand_in
from tests.test_end_to_end_real import TEMPERATURE, nothing_is_left, system
from tests.test_end_to_end_simulated import check_books, finish, pid_of, start, wait_for_step

pytestmark = pytest.mark.usefixtures("own_table")
TEACHER = "rollout.teacher.process"
TAUGHT = ("algo.loss=reverse_kl", "algo.teacher=simulated", "tracking.replay=full", "learner.options.step_s=0.1")


def batches(tmp_path: Path) -> list[BatchPart]:
    register(TEACHER_LOGP)
    return list(read_batch_parts(tmp_path / "simulated"))


def check_scored(tmp_path: Path, steps: int) -> None:
    """By the stand-in, from ids alone: nothing was lost or came from another sequence."""
    found = batches(tmp_path)
    assert {part.step for part in found} == set(range(steps))
    for part in found:
        (logp,) = stand_in([ScoreTokens(0, part.token_ids, part.loss_mask)])
        np.testing.assert_array_equal(part.columns["teacher_logp"][part.loss_mask != 0], logp)
        assert not part.columns["teacher_logp"][part.loss_mask == 0].any()


@pytest.mark.docs
def test_a_teacher_that_dies_or_hangs_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    process = start(tmp_path, *TAUGHT, "steps=40", "timeouts.hang_s=5")
    wait_for_step(tmp_path, 5)
    others = {role: pid_of(tmp_path, role) for role in ("envs.server", "rollout.broker.process")}
    os.kill(pid_of(tmp_path, TEACHER), signal.SIGKILL)
    wait_for_step(tmp_path, 12)
    os.kill(pid_of(tmp_path, TEACHER, incarnation=1), signal.SIGSTOP)
    wait_for_step(tmp_path, 20)
    assert {role: pid_of(tmp_path, role) for role in others} == others

    summary = finish(process, tmp_path)
    check_books(summary, steps=40)
    assert summary["ledger"]["samples"]["failed"] == 0
    assert set(summary["alarms"]) <= {"process-died"}
    check_scored(tmp_path, 40)
    rows = [json.loads(line) for line in (tmp_path / "simulated" / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("teacher.0/tokens", 0) for row in rows) > 0


@pytest.mark.docs
def test_a_teacher_that_dies_once_too_often_ends_the_run_by_name(tmp_path: Path) -> None:
    process = start(tmp_path, *TAUGHT, "steps=1000", "max_restarts=0")
    wait_for_step(tmp_path, 3)
    os.kill(pid_of(tmp_path, TEACHER), signal.SIGKILL)
    summary = finish(process, tmp_path, code=1)
    assert summary["error"] == "teacher.0 ended: killed by SIGKILL; it was restarted 0 times already"


@pytest.mark.docs
def test_a_resumed_run_is_taught_as_before(tmp_path: Path) -> None:
    finish(start(tmp_path, *TAUGHT, "steps=8"), tmp_path)
    finish(start(tmp_path, *TAUGHT, "steps=16", "resume=auto"), tmp_path)
    assert {part.step for part in batches(tmp_path)} == set(range(8, 16))
    for part in batches(tmp_path):
        assert (part.columns["teacher_logp"][part.loss_mask != 0] <= -1).all()


@torch.no_grad()
def largest_gap(parts: list[BatchPart], teacher: Path) -> float:
    """Between the column and transformers, over every trained token."""
    model: Any = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    worst = 0.0
    for part in parts:
        for begin, end in itertools.pairwise(np.cumsum([0, *part.lengths])):
            ids = torch.tensor(part.token_ids[begin:end], dtype=torch.int64)
            logp = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            mask = torch.tensor(part.loss_mask[begin:end] != 0)[1:]
            told = torch.tensor(part.columns["teacher_logp"][begin:end])[1:]
            worst = max(worst, float((logp - told)[mask].abs().max()))
    return worst


@pytest.mark.docs
def test_a_real_teacher_of_another_size(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "layers": 3, "ffn_size": 96, "sft_steps": 0, "seed": 1}
    teacher = ensure_tiny_model(TinyRecipe(**sizes), tmp_path / "cache", log=lambda _: None)
    taught = ("algo.loss=reverse_kl", f"algo.teacher={teacher}", "steps=3", "eval.tasks=0", "tracking.wandb=disabled")
    (folder := tmp_path / "runs").mkdir()
    with system(folder, *taught) as process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output[-4000:]
    nothing_is_left(folder)

    parts = batches(folder)
    assert {part.step for part in parts} == {0, 1, 2} and largest_gap(parts, teacher) < 1e-4
    rows = [json.loads(line) for line in (folder / "simulated" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["loss/reverse_kl"] > 0 for row in rows if "train/loss" in row)


def test_a_teacher_with_other_tokens_is_refused_before_anything_starts(tmp_path: Path) -> None:
    other = ensure_tiny_model(TinyRecipe(sft_steps=0, hidden_size=32), tmp_path / "cache", log=lambda _: None)
    told = json.loads((other / "tokenizer.json").read_text())
    vocabulary = told["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(told))
    (folder := tmp_path / "runs").mkdir()
    with system(folder, "algo.loss=reverse_kl", f"algo.teacher={other}") as process:
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 2 and f"algo.teacher='{other}': the token" in output.replace("\n", " ")
    assert "a teacher must share the vocabulary of its student" in output
    assert not (folder / "simulated").exists()
