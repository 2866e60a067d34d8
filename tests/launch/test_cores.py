"""Cores of engines and ranks: as many as they need, of one NUMA node, near their GPU, or none for anybody."""

from __future__ import annotations

from launch.gpus import Gpu
from launch.plan import Need, engine_cores, make_plan, numa_nodes, rank_cores, share_cores
from rl.config.schema import load_config
from tests.launch.test_bad_configuration import EXPERIMENTS

TWO_NODES = {0: [*range(0, 16), *range(32, 48)], 1: [*range(16, 32), *range(48, 64)]}


def test_eight_gpus_on_two_nodes_of_a_large_machine() -> None:
    gpus = [Gpu(str(number), None, numa=number // 4) for number in range(8)]
    config = load_config(EXPERIMENTS / "math_8gpu.yaml")
    plan = [spec for spec in make_plan(config, "cuda", gpus, TWO_NODES) if spec.gpus]
    assert len(plan) == 8

    taken = [core for spec in plan for core in spec.cores]
    assert len(taken) == len(set(taken)) <= 62
    for spec in plan:
        (node,) = {node for node, cores in TWO_NODES.items() if set(spec.cores) & set(cores)}
        assert node == int(spec.gpus[0]) // 4
        assert len(spec.cores) >= 4


def test_sixteen_cores_do_not_leave_one_for_each_engine() -> None:
    config = load_config(EXPERIMENTS / "math_8gpu.yaml")
    gpus = [Gpu(str(number), None) for number in range(8)]
    plan = make_plan(config, "cuda", gpus, {0: list(range(16))})
    assert all(spec.cores == () for spec in plan)  # all share all


def test_a_run_without_gpus_has_a_plan() -> None:
    config = load_config(EXPERIMENTS / "simulated.yaml", ["generator.count=20"])
    assert len([spec for spec in make_plan(config, "cpu", (), {0: [0, 1]}) if spec.role == "generator"]) == 20


def test_a_share_never_spans_two_nodes() -> None:
    assert share_cores([Need(3), Need(3)], {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}) == [(0, 1, 2), (4, 5, 6)]
    assert share_cores([Need(5)], {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}) == [()]
    assert share_cores([Need(2, near=1)], {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}) == [(4, 5, 6, 7)]


def test_what_an_engine_and_a_rank_need() -> None:
    assert engine_cores("cuda", threads=1, tensor_parallel=1) == 2
    assert engine_cores("cuda", threads=1, tensor_parallel=4) == 6
    assert engine_cores("cpu", threads=2, tensor_parallel=1) == 3
    assert (rank_cores("cuda", 1), rank_cores("cpu", 1)) == (2, 1)


def test_the_cores_of_this_machine_are_found() -> None:
    assert sorted(core for cores in numa_nodes().values() for core in cores)
