"""Engines and learner ranks on GPUs of their own or on the same: what is planned, budgeted, told and refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu import fits
from launch.gpus import Gpu
from launch.machine import GIB, Machine
from launch.memory import check_memory, estimate, shared_with_learner
from launch.plan import gpus_needed, make_plan
from rl.config.schema import ConfigError, load_config
from rl.models.shape import ModelShape
from rl.wire.run import RunFile
from rollout.generator.engines.environment import device_memory
from tests.conftest import MakeRun
from tests.launch.test_bad_configuration import EXPERIMENTS, prepared_here
from tests.launch.test_dry_run_elsewhere import BY_SIZE, QWEN3, a_laptop, folder_of, planned
from tests.launch.test_memory import THIRTY_B_A3B

__all__ = ["a_laptop", "prepared_here"]

HALF_B = ModelShape.of(BY_SIZE["0.5B"])


def config(recipe: str, *overrides: str) -> Any:
    return load_config(EXPERIMENTS / f"{recipe}.yaml", list(overrides))


def on(count: int, gib: float = 80) -> Machine:
    return Machine(
        [Gpu(str(number), int(gib * GIB)) for number in range(count)], 512 * GIB, {0: list(range(64))}, "here"
    )


def where(recipe: str, count: int, *overrides: str) -> dict[str, tuple[str, ...]]:
    plan = make_plan(config(recipe, *overrides), "cuda", on(count).gpus, {0: list(range(64))})
    return {spec.name: spec.gpus for spec in plan if spec.gpus}


def test_one_gpu_is_shared_and_more_are_not_unless_asked() -> None:
    one_each = ("generator.count=1", "learner.ranks=1", "placement=auto")
    assert where("math_8gpu", 1, *one_each) == {"generator.0": ("0",), "learner.0": ("0",)}
    assert where("math_8gpu", 2, *one_each) == {"generator.0": ("0",), "learner.0": ("1",)}
    assert where("math_8gpu", 2, *one_each[:2], "placement=shared") == {"generator.0": ("0",), "learner.0": ("0",)}

    # A shortage of an eight-GPU recipe is no wish to share.
    assert gpus_needed(config("math_8gpu"), 7) == 8
    assert gpus_needed(config("math_8gpu", "placement=shared"), 7) == 5
    assert gpus_needed(config("math_1gpu", "steps=0"), 1) == 1


def test_ranks_are_on_the_first_gpus_of_engines_of_several() -> None:
    shared = where("math_8gpu", 4, "placement=shared", "generator.count=2", "generator.tensor_parallel=2")
    assert shared == {
        "generator.0": ("0", "1"),
        "generator.1": ("2", "3"),
        "learner.0": ("0",),
        "learner.1": ("1",),
        "learner.2": ("2",),
    }


def test_the_shares_are_the_whole_and_each_has_what_it_needs() -> None:
    needs = estimate(config("math_1gpu"), "cuda", HALF_B, on(1, 23.8))
    engine, learner = (need for need in needs if need.where == "gpu")
    gpu = 23.8 * GIB
    assert engine.share + learner.share == pytest.approx(1)
    starting = 768 << 20  # that vLLM does not find free
    assert learner.each * 1.05 + starting <= learner.share * gpu <= learner.each * 1.05 + starting + gpu / 500
    assert 0 <= engine.left(int(gpu)) < 1 << 20
    assert shared_with_learner(needs) == (engine.share, engine.parts["KV cache"])
    check_memory(needs, on(1, 23.8))
    assert shared_with_learner(estimate(config("math_2gpu"), "cuda", HALF_B, on(2, 48))) is None


def test_versions_that_stand_on_a_shared_gpu_are_in_the_learners_share() -> None:
    of = {}
    for channel in ("shm", "ipc"):
        needs = estimate(config("math_1gpu", f"weights.transport={channel}"), "cuda", HALF_B, on(1, 23.8))
        of[channel] = {need.what: need for need in needs}
    slots = 3 * 2 * HALF_B.trained
    engine, learner = "engine's share of a GPU", "learner's share of a GPU"
    assert of["ipc"][learner].each - of["shm"][learner].each == of["ipc"][learner].parts["weight slots"] == slots
    assert of["shm"][engine].parts["KV cache"] - of["ipc"][engine].parts["KV cache"] == pytest.approx(
        1.05 * slots, 0.03
    )
    assert "weight slot" in of["shm"] and "weight slot" not in of["ipc"]


def test_the_page_says_what_the_estimate_says() -> None:
    page = (EXPERIMENTS.parent / "docs" / "gpu.md").read_text()
    assert all(table in page for table in (fits.table(), fits.table(*fits.ON_HOST), fits.turns()))
    assert fits.shape("8B").trained == pytest.approx(8.19e9, rel=0.01)


def test_a_share_of_the_users_own_is_kept() -> None:
    own = "generator.options={gpu_memory_utilization: 0.25, kv_cache_bytes: 1000000000}"
    given = config("math_1gpu", own)
    assert shared_with_learner(estimate(given, "cuda", HALF_B, on(1))) == (0.25, 1_000_000_000)

    greedy = config("math_1gpu", "generator.options.gpu_memory_utilization=0.9")
    with pytest.raises(ConfigError, match=r"learner's share of a GPU: .* shared with an engine, which leaves 2\.4 GiB"):
        check_memory(estimate(greedy, "cuda", HALF_B, on(1, 23.8)), on(1, 23.8))


def gpu_needs(*overrides: str, model: ModelShape = HALF_B, gib: float = 80) -> tuple[Any, Any]:
    """Of an engine and of a learner that take turns on one GPU."""
    needs = estimate(config("math_1gpu", "placement=alternate", *overrides), "cuda", model, on(1, gib))
    engine, learner = (need for need in needs if need.where == "gpu")
    return engine, learner


def test_by_turns_each_has_the_gpu_but_for_what_the_other_keeps() -> None:
    assert where("math_8gpu", 2, "generator.count=1", "learner.ranks=1", "placement=alternate") == {
        "generator.0": ("0",),
        "learner.0": ("0",),
    }
    engine, learner = gpu_needs()
    assert 0.98 < engine.share < 0.99 and 0.97 / 1.05 < learner.share < 0.99 / 1.05
    assert 0 <= engine.left(80 * GIB) < 1 << 20
    assert "an engine keeps 1.5 GiB, and a learner 1.3 GiB" in engine.remarks[0]

    # What is trained is moved, unless it is on the host already: then the weights stay.
    kept, _ = gpu_needs("learner.optimizer_states=host")
    assert (1 - kept.share) * 80 * GIB == pytest.approx(1.05 * (2 * HALF_B.trained + 1.33 * GIB), rel=0.05)


def test_by_turns_4b_trains_in_full_on_a_gpu_of_80_gb() -> None:
    model = fits.shape("4B")
    gpu = on(1, 79.2)
    needs = {
        way: estimate(config("math_1gpu", f"placement={way}"), "cuda", model, gpu) for way in ("shared", "alternate")
    }
    check_memory(needs["alternate"], gpu)
    with pytest.raises(ConfigError, match=r"a GPU has 79\.2 GiB, shared with a learner.*, placement=alternate"):
        check_memory(needs["shared"], gpu)

    hosts = {way: sum(need.count * need.each for need in each if need.where == "host") for way, each in needs.items()}
    moved = hosts["alternate"] - hosts["shared"]
    assert moved == pytest.approx(1.41 * 12 * model.trained, rel=0.01), (
        "weights and moments, rounded up by page-locking"
    )


def test_by_turns_adapters_stay_with_their_weights_on_the_host_of_a_sleeping_engine() -> None:
    lora = ("model.lora={rank: 8, serve: adapter}", "generator.options={}")
    given = config("math_1gpu", "placement=alternate", *lora)
    needs = estimate(given, "cuda", HALF_B, on(1))
    (generator,) = [need for need in needs if need.what == "generator"]
    assert generator.parts["weights while it sleeps"] > 2 * HALF_B.trained


def test_the_host_keeps_the_experts_of_all_tokens_of_the_cache_and_of_as_many_aborted_ones() -> None:
    """48 layers, 8 experts a token, a byte each."""
    given = config("math_30b_a3b_8gpu")
    needs = estimate(given, "cuda", ModelShape.of(THIRTY_B_A3B), on(8))
    (generator,) = [need for need in needs if need.what == "generator"]
    (engine,) = [need for need in needs if need.what == "engine's GPU"]
    tokens = int(re.search(r"(\d+) tokens of KV cache", engine.remarks[-1])[1])  # type: ignore[index]
    assert tokens > 100_000 and generator.parts["routed experts"] == pytest.approx(2 * 48 * 8 * tokens, rel=1e-4)


def test_by_turns_a_share_of_the_users_own_leaves_room_for_a_learner_at_rest() -> None:
    engine, _ = gpu_needs("generator.options.gpu_memory_utilization=0.5")
    assert engine.share == 0.5
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization=0\.999: .* a learner at rest keeps 1\.3 GiB .*at most 0\.98"
    ):
        gpu_needs("generator.options.gpu_memory_utilization=0.999")


def test_turns_are_of_one_machine_and_of_runs_that_train() -> None:
    network = ("network.transport=tcp", "network.host=10.0.0.1")
    with pytest.raises(ConfigError, match=r"placement=alternate: .* a lock of one machine, and cluster.nodes=2; set"):
        config("math_8gpu", "placement=alternate", "cluster.nodes=2", *network)
    assert config("math_8gpu", "placement=alternate").alternates
    assert not config("math_8gpu", "placement=alternate", "steps=0").alternates
    assert not config("math_8gpu", "placement=shared").alternates


@pytest.mark.parametrize(("beside", "told"), [((0.4, 123_456_789), (0.4, 123_456_789)), (None, (0.9, None))])
def test_the_engine_is_told_its_share_and_its_cache(
    beside: tuple[float, int] | None, told: tuple[float, int | None], make_run: MakeRun
) -> None:
    run = make_run(device="cuda", beside_learner=beside)
    assert device_memory(RunFile.load(run.folder)) == told


@pytest.mark.parametrize(
    ("recipe", "arguments", "code", "words"),
    [
        ("math_1gpu", ["--gpus", "1x24"], 0, r"learner \(cuda:0\), 1 × generator \(cuda:0\)"),
        ("math_2gpu", ["--gpus", "2x48"], 0, r"learner \(cuda:1\), 1 × generator \(cuda:0\)"),
        ("alfworld_1gpu", ["--gpus", "1x80"], 0, "1 GPU of 79.2 GiB"),
        (
            "math_1gpu",
            ["--gpus", "1x24", "placement=alternate"],
            0,
            "they take turns: meanwhile an engine keeps 1.5 GiB",
        ),
        ("math_2gpu", ["--gpus", "1x80"], 2, "needs 2 GPUs, --gpus 1x80 shows 1; set placement=shared"),
        ("math_1gpu", ["--gpus", "1x8"], 2, r"learner.ranks: 1 × learner's share of a GPU: .* a GPU has 7\.\d GiB"),
        ("math_1gpu", ["--gpus", "1"], 2, "placement=shared: --gpus 1 does not say how much memory a GPU has"),
    ],
)
def test_plans_of_small_machines(
    recipe: str, arguments: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = QWEN3 | {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 28, "intermediate_size": 3072}
    path = folder_of(told, tmp_path / "m")
    assert re.search(
        words, planned(capsys, recipe, path, *arguments, "--host-memory", "128G", "--cores", "16", code=code)
    )
