"""`fresco export`: what a checkpoint computes is what transformers, and peft on the base, compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from launch.cli import main
from rl.config.lora import lora_options
from rl.learner import checkpoint
from rl.learner.trainer import Trainer
from rl.models.loading import weight_files
from rl.models.packing import sequence_pack
from rl.models.policy import Policy
from rl.models.protocol import local
from rl.store.checkpoint_folder import Meta
from rl.store.digests import DIGESTS, damage, digest_of
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.rl.learner.ranks import process_group
from tests.rl.models.tiny_families import VOCABULARY, save_family

IDS = torch.randint(3, VOCABULARY, (40,), generator=torch.Generator().manual_seed(1)).tolist()
LORA = "model.lora={rank: 4, alpha: 6, targets: [q_proj, down_proj, lm_head]}"


def trained(make_run: MakeRun, folder: Path, *overrides: str) -> tuple[RunFile, Policy]:
    """A run with one checkpoint, and its policy."""
    run = make_run("learner.kind=fsdp", "model.dtype=float32", f"model.path={folder}", *overrides, model_folder=folder)
    (run.folder / "config.yaml").touch()
    with process_group(folder) as mesh:
        trainer = Trainer(run.config, folder, last_step=1, mesh=mesh)
        random = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for _, parameter in trainer.policy.trainable():
                rows = local(parameter)
                rows.add_(torch.empty(rows.shape).normal_(0, 0.1, generator=random))

        options = lora_options(run.config.model)
        base = digest_of({*weight_files(folder).values()})
        meta = Meta(3, 0, 1, options.identity() | {"base": base} if options else None)
        checkpoint.save(run.folder / "checkpoints", trainer.trained(), meta, b"", keep=1)

        merged = Policy.load(folder)
        weights = {name: rows.clone() for name, rows, _ in trainer.policy.export(untie=False)}
    with torch.no_grad():
        for name, rows, _ in merged.export(untie=False):
            rows.copy_(weights.pop(name))
    assert not weights
    return run, merged


@torch.no_grad()
def logp(model: Any) -> torch.Tensor:
    ids = torch.tensor(IDS)
    logits = model(ids[None]).logits[0, :-1]
    found: torch.Tensor = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return found


@torch.no_grad()
def expected(policy: Policy) -> torch.Tensor:
    found: torch.Tensor = policy(sequence_pack(IDS)).logp[1:]
    return found


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("overrides", [(), (LORA,)], ids=["whole", "adapters"])
def test_a_merged_checkpoint_is_a_model_of_transformers(
    overrides: tuple[str, ...], make_run: MakeRun, tmp_path: Path
) -> None:
    start = save_family("qwen3", tmp_path / "start")
    run, policy = trained(make_run, start, *overrides)
    out = tmp_path / "out"
    assert main(["export", str(run.folder), str(out), "--merge"]) == 0
    torch.testing.assert_close(logp(load(out)), expected(policy), rtol=0, atol=5e-5)
    assert (logp(load(out)) - logp(load(start))).abs().max() > 0.1
    assert damage(out, out / DIGESTS) is None and "3 steps of" in (out / "README.md").read_text()


@pytest.mark.parametrize("family", ["qwen3", "phi3", "qwen3_moe"])
def test_peft_reads_the_adapters(family: str, make_run: MakeRun, tmp_path: Path, own_table: None) -> None:
    start = save_family(family, tmp_path / "start")
    given = {"qwen3": LORA, "qwen3_moe": "model.lora={rank: 4, targets: [q_proj, experts]}"}
    run, policy = trained(make_run, start, given.get(family, "model.lora={rank: 4}"))
    out = tmp_path / "out"
    assert main(["export", str(run.folder / "checkpoints" / "step-3"), str(out), "--adapter"]) == 0

    told = json.loads((out / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(start) and told["r"] == 4 and told["lora_dropout"] == 0
    model = peft.PeftModel.from_pretrained(load(start), out)
    theirs = {name for name in peft.get_peft_model_state_dict(model) if "lora_" in name}
    assert (
        set(load_file(out / "adapter_model.safetensors")) == theirs
    )  # it would pass over a name that it does not know
    torch.testing.assert_close(logp(model.eval()), expected(policy), rtol=0, atol=5e-5)
    torch.testing.assert_close(logp(model.merge_and_unload()), expected(policy), rtol=0, atol=5e-5)


def test_an_export_that_was_interrupted_leaves_nothing(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    run, _ = trained(make_run, save_family("qwen3", tmp_path / "start"))
    monkeypatch.setattr(checkpoint, "write_digests", interrupted)
    main(["export", str(run.folder), str(tmp_path / "out"), "--merge"])
    assert {path.name for path in tmp_path.iterdir()} == {"start"}


def test_what_cannot_be_exported_is_one_line(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = save_family("qwen3", tmp_path / "start")
    run, _ = trained(make_run, start)

    def refused(*arguments: str) -> str:
        assert main(["export", *arguments]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fresco:")]
        return line

    out = str(tmp_path / "out")
    assert "was trained without model.lora; --merge writes its model" in refused(str(run.folder), out, "--adapter")
    assert "exists; name a new folder" in refused(str(run.folder), str(tmp_path), "--merge")
    (tmp_path / "mine.tmp").mkdir()
    assert "mine.tmp' exists; name a new folder" in refused(str(run.folder), str(tmp_path / "mine"), "--merge")
    assert (tmp_path / "mine.tmp").exists(), "what lies where an export would write is not its own"
    assert "is no checkpoint in its own run" in refused(str(start), out, "--merge")
    assert f"there is no {f'{start}/nowhere'!r}" in refused(f"{start}/nowhere", out, "--merge")
    assert "'/proc/out' cannot be written: " in refused(str(run.folder), "/proc/out", "--merge")
    (tmp_path / "ended" / "model").mkdir(parents=True)
    assert "how it ended is in its folders model and adapter" in refused(str(tmp_path / "ended"), out, "--merge")

    run, _ = trained(make_run, start, LORA)
    weights = load_file(start / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, start / "model.safetensors", {"format": "pt"})
    for how in ("--merge", "--adapter"):
        assert "other weights than those that the adapters of this run belong to" in refused(str(run.folder), out, how)
    assert not Path(out).exists()
