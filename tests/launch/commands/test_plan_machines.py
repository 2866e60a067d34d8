"""`fresco plan` for several machines: who stands where, what an update takes on the cables, what is refused."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from launch.cli import main
from launch.fleet import (
    MEASURED,
    RECEIVED,
    SPARSE_S,
    WHOLE_S,
    Cables,
    Changes,
    bytes_a_second,
    changes_at,
    sends_changes,
    standing,
)
from rl.config.schema import Config, ConfigError, load_config
from tests.launch.test_memory import EIGHT_B

BENCH = Path("experiments/results/bench")
GB = 10**9
ALL_AT_ONE = Changes(1e-6, 0.0, 0.0, float("inf"), float("inf"))


def config_of(machines: int, *overrides: str) -> Config:
    return load_config("experiments/math_8gpu.yaml", ["network.transport=tcp", f"cluster.nodes={machines}", *overrides])


def measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((BENCH / f"{name}.json").read_text())
    return found


def test_figures_are_those_that_were_measured() -> None:
    for each in MEASURED:
        said = measured("deltas")["by_lr"][f"{each.lr:g}"]
        bytes_a_core = (1e9 * said["encode_gb_s"], 1e9 * said["apply_gb_s"])
        assert (each.changed, each.over_dense) == pytest.approx(
            (said["changed_later"], said["over_dense_later"]), rel=0.01
        )
        assert (each.made, each.applied) == pytest.approx(bytes_a_core, rel=0.01)

    link = measured("link")
    whole_s, sparse_s = (statistics.median(link[kind]["update_s"]) / link["gigabytes"] for kind in ("dense", "delta"))
    sent_s = link["bound_s"] * link["delta"]["stats"]["sparse_bytes"] / link["delta"]["stats"]["sparse"] / GB
    patch_s = GB / MEASURED[0].made + GB / MEASURED[0].applied
    assert whole_s - link["bound_s"] == pytest.approx(GB * WHOLE_S, rel=0.02)
    assert sparse_s - sent_s - patch_s == pytest.approx(GB * SPARSE_S, rel=0.02)
    received_s = link["dense"]["engine_cpu_s"] - GB * WHOLE_S
    assert received_s == pytest.approx(GB / RECEIVED, rel=0.02)


@pytest.mark.parametrize(("lr", "changed"), [(1e-6, 0.0116), (1e-5, 0.0788), (1e-8, 0.0116), (1.0, 0.391)])
def test_what_a_step_changes_is_as_measured_and_beyond_that_as_at_the_nearest(lr: float, changed: float) -> None:
    assert changes_at(lr).changed == pytest.approx(changed)


def test_between_two_measured_rates_it_lies_between() -> None:
    middle = changes_at(10**-5.5)
    assert middle.changed**2 == pytest.approx(MEASURED[0].changed * MEASURED[1].changed)
    assert MEASURED[1].made < middle.made < MEASURED[0].made


@pytest.mark.parametrize(
    ("lr", "delta", "sparse"),
    [(1e-6, "auto", True), (1e-4, "auto", False), (1e-4, "always", True), (1e-6, "off", False)],
)
def test_a_run_sends_what_changed_where_its_rule_says_so(lr: float, delta: str, sparse: bool) -> None:
    config = config_of(2, f"learner.lr={lr}", f"weights.delta={delta}")
    assert sends_changes(config, changes_at(lr)) == sparse


def test_processes_stand_where_the_recipe_says_and_ranks_together() -> None:
    config = config_of(3, "generator.count=6", "learner.ranks=4", "env.servers=3", "cluster.place={env_server: [3]}")
    stand = standing(config, 3, 4)
    assert {stand[f"learner.{rank}"] for rank in range(4)} == {1}
    assert [stand[f"generator.{index}"] for index in range(6)] == [2, 2, 2, 2, 3, 3]
    assert {stand[f"env_server.{index}"] for index in range(3)} == {3}
    assert not {"broker.0", "proxy.0"} & set(stand), "which stand at the head"


def test_on_cpus_processes_spread_over_the_machines_of_their_role_as_they_start() -> None:
    """Those with much to import start last, so an environment server takes the first machine."""
    place = "cluster.place={learner: [1, 2], generator: [2, 3], env_server: [1, 3]}"
    config = load_config("experiments/math_cpu.yaml", ["network.transport=tcp", "cluster.nodes=3", place])
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"ranks": 2})})
    stand = standing(config, 3, 1)
    assert (stand["env_server.0"], stand["learner.0"], stand["learner.1"]) == (1, 2, 1)
    assert stand["generator.0"] == 3


def test_an_engine_larger_than_a_machine_is_refused() -> None:
    config = config_of(2, "generator.count=1", "generator.tensor_parallel=8", "learner.ranks=4")
    with pytest.raises(ConfigError, match=r"none of them has 8 of its 6 GPUs left for generator\.0"):
        standing(config, 2, 6)


def test_one_rank_sends_to_one_machine_at_the_cables_rate() -> None:
    config = config_of(2, "generator.count=4", "learner.ranks=4", "rollout.alpha=0")
    cables = Cables(config, standing(config, 2, 4), bytes_a_second("1G"), load_s=0.5)
    whole = cables.whole(GB)
    assert whole.first_s == whole.all_s == pytest.approx(8.0 + GB * WHOLE_S + 0.5)
    assert cables.sparse(GB, ALL_AT_ONE).all_s == pytest.approx(GB * SPARSE_S + 0.5), "no byte crosses a cable"

    fast = Cables(config, standing(config, 2, 4), bytes_a_second("10T"), load_s=0.0)
    assert fast.whole(GB).all_s == pytest.approx(GB / RECEIVED + GB * WHOLE_S), "a process receives no faster"


def test_machines_that_fetch_at_once_share_the_cable_of_who_sends() -> None:
    config = config_of(4, "generator.count=12", "learner.ranks=4", "rollout.alpha=0")
    stand = standing(config, 4, 4)
    assert {stand[f"generator.{index}"] for index in range(12)} == {2, 3, 4}
    assert Cables(config, stand, bytes_a_second("1G"), 0.0).whole(GB).all_s == pytest.approx(3 * 8.0 + GB * WHOLE_S)


def test_ranks_on_two_machines_send_half_each_and_keep_their_own_half_off_the_cable() -> None:
    place = "cluster.place={learner: [1, 2], generator: [1, 2]}"
    config = config_of(2, "generator.count=2", "learner.ranks=2", "rollout.alpha=0", place)
    stand = {"learner.0": 1, "learner.1": 2, "generator.0": 1, "generator.1": 2}
    assert Cables(config, stand, bytes_a_second("1G"), 0.0).whole(GB).all_s == pytest.approx(4.0 + GB * WHOLE_S)


def test_engines_in_turn_fetch_once_a_machine_and_each_pauses_in_its_turn() -> None:
    """Two machines of two engines, one engine at a time."""
    config = config_of(3, "generator.count=4", "learner.ranks=2", "rollout.alpha=1")
    whole = Cables(config, standing(config, 3, 2), bytes_a_second("1G"), load_s=1.0).whole(GB)
    fetch_s = 8.0 + GB * WHOLE_S
    assert (whole.first_s, whole.all_s) == pytest.approx((fetch_s + 1.0, 2 * fetch_s + 4 * 1.0))


def plan(tmp_path: Path, *arguments: str) -> int:
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_B | {"model_type": "qwen3"}))
    times = ["--env-s=0.01,0", "--decode-s=0.02,0.0001", "--plot", str(tmp_path / "plan.png")]
    recipe = ["plan", "math_8gpu", f"model.path={tmp_path}", "rollout.groups_per_batch=4", "--train-s", "30"]
    return main([*recipe, *times, *arguments])


def test_the_command_says_who_runs_what_and_whether_an_update_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, "--gpus", "16x80", "--machines", "2", "--link", "400G") == 0
    told = capsys.readouterr().out
    assert re.search(r"^1 +\d × learner", told, re.M) and re.search(r"^2 .*\d × generator", told, re.M)
    assert re.search(r"^whole +15\.3 GiB ", told, re.M) and re.search(r"^what changed +130 MiB ", told, re.M)
    (engines,) = re.findall(r"generator\.count=(\d+)", told)
    assert f"ranks of engines that read the weights: {engines}; any number of machines may join" in told
    assert "1.16% of the weights" in told and "weights.delta=auto sends what changed" in told
    assert "of 400G" not in told and re.search(r"it (fits|does not fit) within a step of", told)

    assert plan(tmp_path, "--gpus", "16x80", "--machines", "2", "--link", "100M", "weights.delta=off") == 0
    told = capsys.readouterr().out
    assert "weights.delta=off sends all" in told and "does not fit within a step" in told

    assert plan(tmp_path, "--gpus", "16x80", "--machines", "2", "--link", "10G", "generator.dtype=float32") == 0
    told = capsys.readouterr().out
    assert "was measured in bfloat16, not in generator.dtype=float32" in told and "what changed  " not in told

    assert plan(tmp_path, "--gpus", "16x80") == 0
    assert "machines" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--link", "10G"], "--machines 4"),
        (["--machines", "0"], "--machines=0: how many share the GPUs: 1 to 1024"),
        (["--machines", "many"], "--machines=many"),
        (["--machines", "2", "--link", "10"], "--link=10: bits a second of each machine's cable are wanted"),
        (["--machines", "2", "--link", "0G"], "--link=0G"),
        (["--machines", "2", "--link=-1G"], "--link=-1G"),
        (["--machines", "3"], "--gpus=16, in all: each of 3 machines has the same number"),
        (["--machines", "8", "generator.tensor_parallel=8"], "none of them has 8 of its 2 GPUs left"),
    ],
)
def test_machines_that_cannot_be_are_refused_in_one_line(
    tmp_path: Path, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, "--gpus", "16x80", *arguments) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
