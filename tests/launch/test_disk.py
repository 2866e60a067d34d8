"""What a run writes that is as large as its model: told before, refused where there is no room, waited for."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from launch import preflight
from launch.cli import main
from launch.disk import Written, check_disk, written_by
from launch.machine import GIB
from launch.prepare import Prepared
from rl.config.schema import ConfigError, load_config
from rl.learner import checkpoint
from rl.learner.trainer import Trainer, export_adapter
from rl.models.families import read_config
from rl.models.shape import ModelShape
from rl.store.checkpoint_folder import Meta, begin, commit
from tests.conftest import MakeRun
from tests.launch.test_bad_configuration import EXPERIMENTS, prepared_here
from tests.launch.test_dry_run_elsewhere import NODE, QWEN3, a_laptop, folder_of, planned
from tests.rl.learner.ranks import process_group
from tests.rl.learner.test_trainer_ranks import SETTINGS, STEPS, VARIANTS, train
from tests.rl.learner.tiny_policies import save_tiny

__all__ = ["a_laptop", "prepared_here"]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    with process_group(tmp_path) as made:
        yield made


def larger(start: Path, dtype: torch.dtype, *, tied: bool) -> Path:
    """Of a size beside which torch's own 2 kB for each tensor are little, with a head as large as that of a small
    model."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 4096}
    config = Qwen3Config.from_pretrained(save_tiny(start), **sizes, tie_word_embeddings=tied)
    model = Qwen3ForCausalLM(config)
    torch.nn.Module.to(model, dtype)
    model.save_pretrained(start)
    return start


def usage_of(free: int, total: int = 1000) -> Any:
    """Of a disk, in GiB."""
    return SimpleNamespace(total=total * GIB, free=free * GIB)


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in (".distcp", ".safetensors"))


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, True), (torch.bfloat16, False)], ids=["tied", "bfloat16"])
@pytest.mark.parametrize(
    "settings", [(), VARIANTS["critic"], ("model.lora={rank: 64}",)], ids=["policy", "critic", "adapters"]
)
def test_what_is_written_is_what_was_told(
    settings: tuple[str, ...], dtype: torch.dtype, tied: bool, mesh: Any, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    start = larger(tmp_path / "start", dtype, tied=tied)
    config = load_config(None, [*SETTINGS, *settings])
    trainer = Trainer(config, start, last_step=STEPS, mesh=mesh)
    train(trainer, 0)
    checkpoint.save(tmp_path / "checkpoints", trainer.trained(), Meta(1, 0, 1), b"", keep=1)
    checkpoint.export_hf(trainer.policy, tmp_path / "trained" / "model", start, {})
    if trainer.lora is not None:
        export_adapter(trainer.policy, trainer.lora, config, start, tmp_path / "trained" / "adapter")

    told = read_config(start)
    written = written_by(config, ModelShape.of(told), told)
    assert bytes_of(tmp_path / "checkpoints") == pytest.approx(written.checkpoint, rel=0.03)
    assert bytes_of(tmp_path / "trained") == pytest.approx(written.model, rel=0.03)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ((), 1),  # at its end
        (("learner.checkpoint_every=20",), 3),  # two are kept until the third is there
        (("learner.checkpoint_every=60",), 2),  # the second is that of its end
        (("learner.checkpoint_every=20", "learner.keep_checkpoints=1"), 2),
        (("steps=0", "eval.tasks=1"), 0),
        (("learner.kind=simulated",), 0),
    ],
)
def test_how_many_there_are_at_once(settings: tuple[str, ...], most: int) -> None:
    config = load_config(None, ["steps=100", *settings])
    assert written_by(config, ModelShape.of(QWEN3), QWEN3).checkpoints == most


@pytest.mark.parametrize(("start", "most"), [(0, 3), (60, 2), (79, 2), (80, 1), (99, 1)])
def test_a_run_that_goes_on_writes_what_is_left(start: int, most: int) -> None:
    config = load_config(None, ["steps=100", "learner.checkpoint_every=20"])
    assert written_by(config, ModelShape.of(QWEN3), QWEN3, start).checkpoints == most


def test_a_disk_without_room_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def usage(folder: Path) -> Any:
        asked.append(folder)
        return usage_of(100)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    config = load_config(None, [f"runs={tmp_path / 'not' / 'there'}"])
    check_disk(Written(40 * GIB, 2, 20 * GIB), config)
    assert asked == [tmp_path]

    with pytest.raises(ConfigError) as refused:
        check_disk(Written(40 * GIB, 3, 20 * GIB), config)
    line = (
        f"runs='{config.runs}': its disk has 100.0 GiB free, and the run writes 3 checkpoints at once of 40.0 GiB, and "
        "20.0 GiB of the trained model: 140.0 GiB; lower learner.keep_checkpoints, or make room, or choose another "
        "folder"
    )
    assert str(refused.value) == line


def test_a_file_system_that_does_not_say_what_is_free_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As FUSE answers for a program that leaves it out."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage_of(0, total=0))
    check_disk(Written(40 * GIB, 2, 20 * GIB), load_config(None, [f"runs={tmp_path}"]))


@pytest.mark.usefixtures("prepared_here")
def test_a_run_asks_for_room_and_so_does_its_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of another machine is not this one's."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage_of(100))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=4096 * GIB))
    recipe = str(EXPERIMENTS / "math_8gpu.yaml")
    model = folder_of(QWEN3 | {"dtype": "bfloat16"}, tmp_path / "model")
    told = planned(capsys, recipe, model, *NODE)
    assert re.search(r"^on the disk: 3 checkpoints at once of 4\d\.\d GiB, and 7\.\d GiB of the trained", told, re.M)

    assert "on the disk" in planned(capsys, recipe, model)  # a laptop has none of its GPUs
    assert (
        main(
            [
                "run",
                recipe,
                model,
                f"runs={tmp_path / 'runs'}",
                "device=cpu",
                "generator.options.kv_cache_bytes=1000000000",
            ]
        )
        == 2
    )
    told = capsys.readouterr().err
    assert "its disk has 100.0 GiB free" in told and not (tmp_path / "runs" / "math_8gpu").exists()


def test_a_run_that_goes_on_near_its_end_asks_for_room_for_its_end_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage_of(100))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=4096 * GIB))
    begin(tmp_path / "before", 950)
    checkpoint_of_950 = commit(tmp_path / "before", Meta(950, 0, 1), b"", keep=1)
    model = folder_of(QWEN3 | {"dtype": "bfloat16"}, tmp_path / "model")
    words = [model, "steps=1000", "device=cpu", "generator.options.kv_cache_bytes=1000000000"]
    told = planned(capsys, str(EXPERIMENTS / "math_8gpu.yaml"), *words, f"resume={checkpoint_of_950}")
    assert re.search(r"^on the disk: 1 checkpoint of 4\d\.\d GiB", told, re.M)


def test_a_model_that_takes_the_room_while_it_is_fetched_is_noticed_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = [usage_of(1000)]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage[-1])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=4096 * GIB))

    def prepare(*_: object, **__: object) -> Prepared:
        usage.append(usage_of(50))
        return Prepared(None, 0)

    monkeypatch.setattr(preflight, "prepare", prepare)
    words = [folder_of(QWEN3, tmp_path / "model"), f"runs={tmp_path / 'runs'}", "generator.options={}"]
    with pytest.raises(ConfigError, match=r"its disk has 50\.0 GiB free"):
        preflight.check(load_config(EXPERIMENTS / "math_cpu.yaml", words), dry=False)


def test_a_save_is_waited_for_by_its_bytes(make_run: MakeRun) -> None:
    """At 8B a checkpoint and the model are 115 GB: a network disk of 100 MB/s needs twenty minutes to write them, and
    half as long again where it reads them twice as fast."""
    run = make_run()
    assert run.save_s == run.config.timeouts.hang_s
    larger = run.model_copy(update={"saved_bytes": 115 * 10**9})
    assert larger.save_s > 1.5 * 115e9 / 100e6
