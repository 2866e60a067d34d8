"""The bound of a run on two cores: its arithmetic, what it reads of a run, that a broken bound is named, both sides."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from experiments.bench import _bare_engine, _bare_learner
from experiments.bench._bare_loop import BareLoop, Form
from experiments.bench._bound import Bound, Step, Work, _told, every_of, most_at_once, steps_of, work_of
from experiments.bench._bound_report import SHARED, STOCK, bound_report, cpu_by_side
from experiments.bench._measuring import random_batch_part
from experiments.bench._outcome import RunResult
from experiments.bench._processes import Used
from experiments.bench._ratios import Idle
from experiments.compare.job import Row
from rl.models.packing import Pack, make_packs
from rl.observe.trace import Trace
from rl.observe.trace_events import SamplingBegan, SamplingEnded
from rl.wire.messages import BatchPart
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.experiments.test_compare import job
from tests.rl.learner.tiny_policies import largest_difference

BOUND = Bound(start_s=5.0, stock_s=12.0, shared_s=8.0, engine_s=10.0, every=3, at_once=128)
PROCESSES = {
    "the command": Used(0.0, 1.0),
    "rollout.generator.process 0": Used(4.0, 3.0),
    "engine of rollout.generator.process 0": Used(5.0, 11.0),
    "rollout.broker.process 0": Used(3.0, 2.0),
}


def ended(wall_s: float, learner_s: float = 13.0) -> RunResult:
    """After five steps; `learner_s`: CPU seconds of its learner."""
    rows = [Row(100.0 + wall_s * (step + 1) / 5, 0.9, 50) for step in range(5)]
    return RunResult(rows, 100.0, 5, 30.0, PROCESSES | {"rl.learner.process 0": Used(4.0, learner_s)}, BOUND)


def idle() -> Idle:
    """A machine that was ours."""
    with Idle() as found:
        pass
    found.others = 0.0
    return found


def test_the_bound_is_half_of_both_sides_and_the_start() -> None:
    assert BOUND.stock == pytest.approx((12 + 10) / 2 + 5) and BOUND.shared == pytest.approx((8 + 10) / 2 + 5)


@pytest.mark.parametrize("steps", [1, 39, 40, 41, 81, 254, 400])
def test_at_most_forty_steps_are_measured_and_they_are_evenly_spread(steps: int) -> None:
    every = every_of([Step(13, [6] * 128)] * steps)
    chosen = range(steps)[every // 2 :: every]
    assert 0 < len(chosen) <= 40 and len(chosen) >= min(steps, 20)
    assert chosen[0] < every and steps - chosen[-1] <= every


@pytest.mark.parametrize("steps", [1, 2, 100])
def test_of_long_steps_fewer_are_measured_but_one_at_least(steps: int) -> None:
    every = every_of([Step(100, [1900] * 50)] * steps)  # 100,000 tokens each
    assert every == {1: 1, 2: 1, 100: 50}[steps]
    assert every_of([Step(100, [1900] * 500)] * steps) == steps


def test_five_pairs_have_a_verdict_of_both_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    result, ratios = bound_report([ended(16.8)] * 5, idle())
    assert ratios[STOCK].wall.median == pytest.approx(16.8 / 16) and ratios[SHARED].wall.median == pytest.approx(1.2)
    assert result["verdicts"] == {STOCK: "met: at most 1.15 by wall", SHARED: "missed: at most 1.15 by wall"}
    assert result["against"] == [] and "wrong" not in capsys.readouterr().out
    assert json.loads(json.dumps(result))["runs"][0]["stock"] == pytest.approx(16)


def test_fewer_than_five_pairs_or_a_busy_machine_have_none() -> None:
    few, _ = bound_report([ended(16.8)] * 4, idle())
    watch = idle()
    watch.others = 0.5
    busy, _ = bound_report([ended(16.8)] * 5, watch)
    assert all(verdict.startswith("no verdict") for each in (few, busy) for verdict in each["verdicts"].values())


def test_a_run_below_its_bound_is_said_to_prove_it_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [ended(15.0), ended(16.5)]
    result, _ = bound_report(runs, idle())
    assert result["against"] == [f"{STOCK}: the bound is wrong, in 1 of 2 pairs Fresco was below it"]
    assert result["against"][0] in capsys.readouterr().out


def test_a_learner_that_does_less_than_the_stock_one_is_named() -> None:
    result, _ = bound_report([ended(16.8, 11.0)], idle())
    (line,) = result["against"]
    assert "11.0 CPU seconds" in line and "12.0" in line and SHARED in line


@pytest.mark.parametrize(("learner_s", "told"), [(13.0, False), (14.0, False), (15.0, True), (11.5, True)])
def test_runs_that_do_not_match_their_bounds_alike_are_named(learner_s: float, told: bool) -> None:
    result, _ = bound_report([ended(16.8), ended(16.8, learner_s), ended(16.8)], idle())
    lines = [line for line in result["against"] if "unevenly" in line]
    assert len(lines) == told
    assert all(f"{learner_s / BOUND.shared_s:.3f}" in line and "1.625" in line for line in lines)


def test_processes_are_told_apart() -> None:
    assert cpu_by_side(ended(16.8)) == {"learner": 13.0, "engine": 14.0, "everything else": 3.0}


def test_lengths_and_requests_at_once_are_those_of_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [
        {"eval/reward": 1.0},
        {"train/loss": 0.1, "histogram/length": [5.0, 6.0, 7.0, 6.0], "tokens/trained": 4 * 13 + 24},
        {"train/loss": 0.1, "histogram/length": [1.0, 2.0, 3.0, 4.0], "tokens/trained": 4 * 13 + 10},
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    for number in range(2):
        trace = Trace(folder, "generator", number, 0, "full")
        trace.add(SamplingBegan(1, 7, 0.0), SamplingBegan(2, 8, 0.0), SamplingEnded(1, 7, 5, "stop"))

    asked = job(tmp_path, group_size=2, rows_at_once=4)
    assert steps_of(asked) == [Step(13, [5, 6, 7, 6]), Step(13, [1, 2, 3, 4])]
    assert most_at_once(folder) == 3  # one engine's two while the other's one is left
    every, work = work_of(asked, 1)
    assert every == 1 and work == Work(str(folder), [Step(13, [5, 6, 7, 6])], 2, 4, 3)
    work.save(tmp_path / "work.json")
    assert Work.load(tmp_path / "work.json") == work


@pytest.fixture
def run(make_run: MakeRun, tmp_path: Path) -> RunFile:
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = Qwen3Config(**shape, vocab_size=64, head_dim=32, intermediate_size=64, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    settings = ["sampling.max_tokens=16", "generator.max_model_len=64", "generator.options.kv_cache_bytes=33554432"]
    own = ["model.dtype=float32", "generator.dtype=float32", "generator.max_num_seqs=16"]
    return make_run(*settings, *own, model_folder=tmp_path / "model")


def gradients(run: RunFile, form: Form, packs: list[Pack], tokens: int) -> dict[str, Tensor]:
    """Of one step, before they are clipped."""
    loop = BareLoop(run, form)
    found: dict[str, Tensor] = {}
    for name, parameter in loop.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(keep, found, name))
    packs = [pack.with_columns(advantages=0.1 + 0.1 * pack.logp_behavior) for pack in packs]
    loop.step(loop.prepared(packs), tokens)
    return found


def keep(found: dict[str, Tensor], name: str, parameter: Tensor) -> None:
    assert parameter.grad is not None
    found[name] = parameter.grad.clone()


def test_padding_and_sharing_change_no_gradient(run: RunFile) -> None:
    batch_part = random_batch_part(4, 4, 9, (2, 12), 64, shared=True)
    forms: dict[Form, list[Pack]] = {
        "stock": _bare_learner.padded(batch_part, 6),
        "packed": make_packs(batch_part, 64, 0),
    }
    forms["shared"] = forms["packed"]
    assert [len(pack.rewards) for pack in forms["stock"]] == [6, 6, 4]

    stock, *others = (gradients(run, form, packs, batch_part.loss_tokens) for form, packs in forms.items())
    assert max(float(gradient.abs().max()) for gradient in stock.values()) > 1e-2
    assert all(largest_difference(stock, other) < 1e-5 for other in others)


@pytest.mark.parametrize("form", ["stock", "packed"])
def test_a_bare_loop_computes_in_the_dtype_of_the_run(run: RunFile, form: Form) -> None:
    batch_part = random_batch_part(2, 4, 9, (6, 6), 64)
    packs = _bare_learner.padded(batch_part, 8) if form == "stock" else make_packs(batch_part, 256, 0)
    exact = gradients(run, form, packs, batch_part.loss_tokens)
    run.config.model.dtype = "bfloat16"
    coarse = gradients(run, form, packs, batch_part.loss_tokens)

    largest = max(float(gradient.abs().max()) for gradient in exact.values())
    assert all(gradient.dtype == torch.float32 for gradient in coarse.values())
    assert 1e-5 * largest < largest_difference(exact, coarse) < 0.1 * largest


@pytest.mark.docs
def test_both_bare_sides_do_the_work_of_a_run(run: RunFile) -> None:
    work = Work(str(run.folder), [Step(9, [4, 5, 6, 7] * 4)] * 2, group_size=4, rows_at_once=8, at_once=16)
    requests = _bare_engine.requests_of(work, 64, seed=0)
    assert [length for _, length in requests] == [4, 5, 6, 7] * 8
    assert requests[0][0] == requests[3][0] != requests[4][0] and len(requests[0][0]) == 9

    assert _bare_learner.measure(work, "stock") > 0 and _bare_learner.measure(work, "shared") > 0
    work.save(run.folder / "work.json")
    told = _told(work, run.folder / "work.json")
    assert told.keys() == {"stock", "shared", "engine"} and all(cpu_s > 0 for cpu_s in told.values())


def test_a_bare_side_that_fails_is_named_and_the_other_ends_with_it(run: RunFile) -> None:
    work = Work(str(run.folder), [Step(9, [4, 5, 6, 7] * 4)] * 2, group_size=4, rows_at_once=8, at_once=16)
    with pytest.raises(SystemExit, match=r"(?s)_no_such_side ended with 1.*No module named"):
        _told(work, long_work(run), ("_no_such_side", "_bare_engine"))

    assert not bare_sides(run.folder)


def test_a_bench_that_is_ended_ends_its_bare_sides_and_leaves_no_folder(run: RunFile, tmp_path: Path) -> None:
    path = long_work(run)
    script = f"""
import shutil, tempfile
from pathlib import Path
from experiments.bench._bound import Work, _told
from experiments.bench._processes import end_on_sigterm
end_on_sigterm()
with tempfile.TemporaryDirectory(prefix="fresco-bound-", dir={str(tmp_path)!r}) as folder:
    path = shutil.copy({str(path)!r}, folder)
    _told(Work.load(path), Path(path))
"""
    bench = psutil.Popen([sys.executable, "-c", script])
    until = time.monotonic() + 60
    while len(bare_sides(tmp_path)) < 2:
        assert bench.is_running() and time.monotonic() < until
        time.sleep(0.05)

    bench.terminate()
    assert bench.wait(60) == 128 + signal.SIGTERM
    assert not bare_sides(tmp_path) and not list(tmp_path.glob("fresco-bound-*"))


def long_work(run: RunFile) -> Path:
    """Saved: more than a bare side does in a minute."""
    path = run.folder / "work.json"
    steps = [Step(9, [4, 5, 6, 7] * 4)] * 20_000
    Work(str(run.folder), steps, group_size=4, rows_at_once=8, at_once=16).save(path)
    return path


def bare_sides(folder: Path) -> list[str]:
    """Command lines of those that work in this folder; what has ended has none, even if nobody has waited for it."""
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if "experiments.bench._bare" in line and str(folder) in line]


def test_a_stock_learner_takes_the_cheapest_size_of_a_batch(run: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(str(run.folder), [Step(9, [4, 5, 6, 7] * 4)] * 5, group_size=4, rows_at_once=16, at_once=16)
    made: list[tuple[int, int]] = []

    def cost(_loop: object, batch_parts: Sequence[BatchPart], packed: Callable[[BatchPart], list[Pack]]) -> float:
        rows = len(packed(batch_parts[0])[0].rewards)
        made.append((rows, len(batch_parts)))
        return abs(rows - 4)

    monkeypatch.setattr(_bare_learner, "_cpu_s", cost)
    assert _bare_learner.measure(work, "stock") == 0
    assert made == [(16, 3), (8, 3), (4, 3), (2, 3), (4, 5)]
    assert _bare_learner.batch_sizes(3) == [3, 1]
