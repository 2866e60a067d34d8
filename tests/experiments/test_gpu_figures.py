"""The figures of the kit that measures a GPU compare like with like."""

from __future__ import annotations

import json
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from experiments.bench.rollout import Measured
from experiments.compare import fresco, trl
from experiments.compare.job import Job
from experiments.gpu import __main__ as kit
from experiments.gpu import engine, learner, part, runs
from experiments.gpu.models import save_model, shape_of
from experiments.results.pages import RESULTS
from launch.gpus import Gpu
from launch.machine import Machine, gpu_bytes
from launch.memory import estimate
from rl.config.schema import load_config
from rl.models.packing import make_packs
from rl.wire.messages import BatchPart

small = learner._batch_part


def told(out: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return found


def test_a_step_is_compared_with_the_same_work_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    seconds = iter([9.0, *(each for first in (1.0, 2.0, 3.0, 4.0, 5.0) for each in (1.1 * first, first))])

    def timed(_step: object, batch_part: BatchPart, _device: str) -> float:
        seen.append(sum(batch_part.lengths))
        return next(seconds)

    monkeypatch.setattr(learner, "_timed", timed)
    monkeypatch.setattr(learner, "_batch_part", lambda size, _device, seed: small(size, "cpu", seed))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 0)
    found = learner._measured(lambda _: None, "tiny", "cuda", repeated=True)
    assert seen[1::2] == seen[2::2] and len(set(seen)) > 3
    assert found["fresh_over_repeated"] == pytest.approx(1.1) and found["repeated"]["seconds"] == 3


def test_what_the_page_shows_of_the_learner_is_what_is_measured() -> None:
    sections = yaml.safe_load((RESULTS / "measured.yaml").read_text())["sections"]
    rows = [row for section in sections for row in section["rows"] if row.get("file") == "gpu/learner.json"]
    shown = {name for row in rows for name in re.findall(r"whole\[([^]]+)\]", row["figure"])}

    cases = {learner.case_of(*case) for case in learner._CASES["cuda"]}
    assert {name for name in shown if "over" not in name and "a pack" not in name} <= cases
    packs = {f"{learner.case_of('1.5b', 'fresco', compile)}, a pack" for compile in (False, True)}
    assert {name for name in shown if "a pack" in name} == packs


def test_the_bare_loop_has_our_dtype_between_its_layers(tmp_path: Path) -> None:
    config = learner.config_of("tiny", "cpu", True, ["model.dtype=bfloat16", "generator.dtype=bfloat16"])
    loop = learner._Bare(config, save_model("tiny", tmp_path, "cpu"), "cpu")
    seen: list[torch.dtype] = []
    for module in (loop.model.model.embed_tokens, *loop.model.model.layers, loop.model.model.norm):
        module.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    batch_part = small("tiny", "cpu", 0)
    packs = [pack.with_columns(advantages=torch.ones(pack.tokens)) for pack in make_packs(batch_part, 256, 0)]
    loop.step(loop.prepared(packs), batch_part.loss_tokens)
    assert set(seen) == {torch.bfloat16} and loop.model.model.embed_tokens.weight.dtype == torch.float32


@pytest.mark.docs
def test_an_update_is_told_by_its_stages_while_requests_run(tmp_path: Path) -> None:
    assert kit.main(["weights", "--device", "cpu", "--minutes", "8", "--out", str(tmp_path)]) == 0
    found = told(tmp_path, "weights")
    assert found["ipc between two processes"] == "works" and found["ipc gap_nats"]["largest"] < 1e-3
    for channel in ("ipc", "shm"):
        updates = [found[f"{channel} update {n}"] for n in range(engine._UPDATES)]
        assert [update["running"] for update in updates] == [0, 0, 0, 0, 4, 4, 4, 4]
        median = found[f"{channel} median"]
        for stage in ("publish", "engine_pause"):
            assert median[f"{stage}_ms"] == pytest.approx(
                sorted(1e3 * each["seconds"][stage] for each in updates[5:])[1]
            )


def test_what_no_other_process_can_read_is_said_before_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine._read_elsewhere("cpu")
    monkeypatch.setattr(engine, "_READS", "raise OSError('invalid device context')")
    with pytest.raises(RuntimeError, match="OSError: invalid device context"):
        engine._read_elsewhere("cpu")


def test_what_each_round_measured_is_there_before_the_next(tmp_path: Path) -> None:
    result, sides = part.Result(tmp_path / "a.json"), {"bare": Measured(), "path": Measured()}
    for rates in ((100.0, 90.0), (100.0, 80.0)):
        for side, rate in zip(sides.values(), rates, strict=True):
            side.tokens_per_s.append(rate)
        engine._note_round(result, "1.5b", sides)
        assert told(tmp_path, "a")["1.5b"]["bare"]["tokens_per_s"] == sides["bare"].tokens_per_s
    assert told(tmp_path, "a")["1.5b"]["path_over_bare"] == pytest.approx(0.85)


def test_trl_has_no_larger_cache_to_empty_than_we(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vllm = types.ModuleType("trl.generation.vllm_generation")
    vllm.LLM = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, vllm.__name__, vllm)
    for name in ("trl", "trl.generation"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    job = Job(
        tmp_path / "run",
        tmp_path,
        tmp_path,
        steps=1,
        seed=0,
        lr=1,
        groups=1,
        group_size=1,
        max_tokens=1,
        rows_at_once=1,
    )
    job = replace(job, device="cuda")
    trl._on_device(job)
    asked = vllm.LLM(model="m")
    assert asked == {"model": "m", "dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 28}
    assert f"generator.options.kv_cache_bytes={1 << 28}" in fresco.settings(job)


def test_memory_is_promised_for_the_turn_that_takes_more() -> None:
    machine = Machine([Gpu("0", gpu_bytes(80))])
    kept = {"learner": 1536, "engine": 1368}  # MiB of the other one at rest, by the preflight
    for size, larger in (("1.5b", "learner"), ("tiny", "engine")):
        config = load_config(None, ["placement=alternate", "generator.count=1", "learner.ranks=1", *runs._LARGE])
        needs = [need for need in estimate(config, "cuda", shape_of(size), machine) if need.where == "gpu"]
        (own,) = (need.each for need in needs if larger in need.what)
        assert runs._promised(needs, turns=True) == own + (kept[larger] << 20)
        assert runs._promised(needs, turns=False) == sum(need.each for need in needs)
