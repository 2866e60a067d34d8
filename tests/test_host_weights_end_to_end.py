"""States on the host in the complete system: vLLM samples from the copies, and a resume or a replay has the float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launch.cli import main
from rl.config.schema import load_config
from rl.learner.trainer import saved_policy
from rl.wire.run import RunFile
from tests.test_end_to_end_real import nothing_is_left, system
from tests.test_lora_end_to_end import steps_of

SETTINGS = (
    "model.dtype=bfloat16",
    "generator.dtype=bfloat16",
    "algo.entropy_coef=0.1",  # an untrained model earns nothing, and would not move
    "sampling.max_tokens=64",
    "eval.tasks=0",
    "tracking.wandb=disabled",
)


def run(folder: Path, *overrides: str) -> list[int]:
    with system(folder, *SETTINGS, *overrides) as process:
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-5000:]
    nothing_is_left(folder)
    return [int(row["step"]) for row in steps_of(folder / "simulated")]


@pytest.mark.docs
def test_a_run_in_bfloat16_is_replayed_and_goes_on_with_states_on_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "simulated"
    assert run(tmp_path, "steps=3", "learner.optimizer_states=host") == [1, 2, 3]
    assert main(["replay", str(folder)]) == 0
    assert "identical: 3 steps" in capsys.readouterr().out

    begun = RunFile.load(folder)
    assert begun.model_folder is not None
    saved = folder / "checkpoints" / "step-3"
    policy = saved_policy(load_config(folder / "config.yaml"), begun.model_folder, saved)
    exact = dict(policy.model.named_parameters())
    exported = load_file(folder / "model" / "model.safetensors")
    rounded = {name: each for name, each in exported.items() if not torch.equal(each, exact[name])}
    assert rounded and all(torch.equal(each, exact[name].bfloat16().float()) for name, each in exported.items())

    assert run(tmp_path, "steps=4", f"resume={saved}") == [1, 2, 3, 4]
