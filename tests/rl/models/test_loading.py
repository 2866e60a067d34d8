"""A model read by parts is, to the last bit, what transformers reads as a whole, and takes less memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from rl.models.families import FAMILIES
from rl.models.loading import local_part, saved_buffers
from rl.models.packing import sequence_pack
from rl.models.policy import Critic, Policy
from tests.rl.learner.ranks import process_group, results_of_ranks
from tests.rl.models.tiny_families import save_family

RANKS = 2
FILES = {  # name -> (family, dtype of the files, largest file)
    "untied": ("qwen3", "float32", "1GB"),
    "tied": ("gemma3_text", "float32", "1GB"),
    "several files of bfloat16": ("qwen2", "bfloat16", "40KB"),
    "experts": ("mixtral", "bfloat16", "40KB"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (family, dtype, size) in FILES.items():
        folder = made[name] = tmp_path_factory.mktemp(family)
        save_family(family, folder, dtype=dtype, max_file=size)
    return made


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with process_group(tmp_path_factory.mktemp("one")) as mesh:
        yield mesh


def whole(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def faulty_buffers(model: nn.Module, judge: nn.Module) -> list[str]:
    """Those that are not what the model's own code computes on a CPU."""
    found, expected = dict(model.named_buffers()), dict(judge.named_buffers())
    assert found.keys() == expected.keys()
    return [
        name
        for name, buffer in expected.items()
        if found[name].dtype != buffer.dtype or not torch.equal(found[name], buffer)
    ]


# ---------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("sharded", [False, True])
def test_one_rank_has_what_transformers_reads(
    folders: dict[str, Path], mesh: DeviceMesh, files: str, sharded: bool
) -> None:
    judge = whole(folders[files])
    policy = Policy.load(folders[files], mesh=mesh if sharded else None)
    found = dict(policy.model.named_parameters())
    assert found.keys() == dict(judge.named_parameters()).keys() and policy.tied == (files == "tied")
    for name, parameter in judge.named_parameters():
        rows, first = local_part(found[name])
        assert first == 0 and rows.dtype == torch.float32 and torch.equal(rows, parameter) and found[name].requires_grad
    assert not faulty_buffers(policy.model, judge)


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with process_group(folder, rank, RANKS) as mesh:
        for name, path in json.loads(Path(folder, "folders.json").read_text()).items():
            policy, critic = Policy.load(path, mesh=mesh), Critic.load(path, mesh=mesh)
            parts = {key: local_part(value) for key, value in policy.model.named_parameters()}
            decoder = {key: local_part(value) for key, value in critic.model.named_parameters()}
            pack = sequence_pack(range(3, 40))
            with torch.no_grad():
                logp = policy(pack).logp
                values = critic(pack)
            buffers = {key: value.clone() for key, value in policy.model.named_buffers()}
            results[name] = {"parts": parts, "decoder": decoder, "buffers": buffers, "logp": logp, "values": values}
        torch.save(results, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "folders.json").write_text(json.dumps({name: str(path) for name, path in folders.items()}))
    return results_of_ranks(rank_main, folder, RANKS)


def joined(parts: list[dict[str, tuple[Tensor, int]]], name: str) -> Tensor:
    rows = [part[name] for part in parts]
    assert [first for _, first in rows] == [0, len(rows[0][0])]
    return torch.cat([each for each, _ in rows])


@pytest.mark.parametrize("files", FILES)
def test_two_ranks_have_its_rows_between_them(
    folders: dict[str, Path], ranks: list[dict[str, Any]], files: str
) -> None:
    judge = whole(folders[files])
    decoder = dict(judge.get_decoder().named_parameters())
    found = [rank[files] for rank in ranks]
    for name, parameter in judge.named_parameters():
        assert torch.equal(joined([each["parts"] for each in found], name), parameter)
    for name, parameter in decoder.items():
        assert torch.equal(joined([each["decoder"] for each in found], name), parameter)

    alone = Policy.load(folders[files])
    pack = sequence_pack(range(3, 40))
    with torch.no_grad():
        expected = alone(pack).logp
    for each in found:
        assert all(torch.equal(each["buffers"][name], buffer) for name, buffer in judge.named_buffers())
        torch.testing.assert_close(each["logp"], expected, rtol=0, atol=1e-6)
        assert not each["values"].any()  # the critic's head, which is in no file, begins at zero on every rank


# ---------------------------------------------------------------- buffers


@pytest.mark.parametrize("family", FAMILIES)
def test_every_buffer_is_as_built_on_a_cpu(family: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    """Or as the files have it."""
    save_family(family, tmp_path)
    judge = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)
    saved = load_file(tmp_path / "model.safetensors")
    for name, buffer in saved_buffers(judge):
        buffer.copy_(saved[name])
    for policy in (Policy.load(tmp_path), Policy.load(tmp_path, mesh=mesh)):
        assert not faulty_buffers(policy.model, judge)
        assert not [name for name, each in policy.named_parameters() if each.is_meta]


def test_the_comparison_sees_what_to_empty_leaves(folders: dict[str, Path]) -> None:
    """Garbage may by chance be the right bytes; here it is written."""
    policy = Policy.load(folders["untied"])
    policy.model._apply(lambda each: torch.full_like(each, torch.nan))
    names = dict(policy.model.named_buffers()).keys()
    assert names and faulty_buffers(policy.model, whole(folders["untied"])) == list(names)


def test_scaled_rotary_frequencies_are_kept(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    told["rope_parameters"] = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert not faulty_buffers(Policy.load(tmp_path).model, whole(tmp_path))


# ---------------------------------------------------------------- memory

MEASURE = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from rl.models.policy import Policy, shard_policy

def kib(field):
    return int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1])

folder, how = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)  # loading asks the other ranks for nothing
mesh = init_device_mesh("cpu", (4,))
Policy.load(folder + "/small", mesh=mesh)  # what is imported and kept at a first load
Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins again
before = kib("VmRSS")
if how == "parts":
    kept = Policy.load(folder, mesh=mesh)
else:
    kept = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
print(kib("VmHWM") - before)
"""


@pytest.mark.docs
def test_a_rank_of_four_never_holds_the_whole_model(tmp_path: Path) -> None:
    """Highest resident memory over the start's, as a share of the model in float32; files count while they are open."""
    save_family("qwen3", tmp_path / "small")
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 30_000}
    save_family("qwen3", tmp_path, dtype="bfloat16", max_file="30MB", **large)
    size: float = sum(each.numel() for each in whole(tmp_path).parameters()) * 4 / 1024

    def share(how: str) -> float:
        command = [sys.executable, "-c", MEASURE, str(tmp_path), how]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, ended.stderr
        return float(ended.stdout.split()[-1]) / size

    assert share("parts") < 0.5  # its own quarter, and the pages of one file
    assert share("whole") > 0.9  # the measure sees a model that is read as a whole


# ---------------------------------------------------------------- files


def test_a_decoder_that_was_saved_without_its_head_is_read(tmp_path: Path) -> None:
    save_family("gemma3_text", tmp_path / "model")
    decoder = AutoModel.from_pretrained(tmp_path / "model", dtype=torch.float32)
    decoder.save_pretrained(tmp_path / "decoder")
    (tmp_path / "decoder" / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    found, expected = (dict(Policy.load(tmp_path / each).named_parameters()) for each in ("decoder", "model"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_what_files_lack_is_named(tmp_path: Path) -> None:
    """transformers fills it with random numbers, and says so among many lines."""
    save_family("qwen3", tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    lacking = {name: value for name, value in saved.items() if name != "model.layers.1.mlp.up_proj.weight"}
    save_file(lacking, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"has no tensor 'model.layers.1.mlp.up_proj.weight'"):
        Policy.load(tmp_path)

    saved["lm_head.weight"] = saved["lm_head.weight"][:-1].clone()
    save_file(saved, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head.weight in .* shape \(255, 64\) in model.safetensors.*\(256, 64\)"):
        Policy.load(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    save_family("qwen3", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no safetensors file .*, and pytorch_model.bin is not read; "):
        Policy.load(tmp_path)


def test_a_file_that_the_index_names_and_that_is_not_there(folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["several files of bfloat16"]
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"lacks {gone.name}, which model.safetensors.index.json names"):
        Policy.load(tmp_path)


def test_files_beside_those_that_the_index_names_are_left_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    """Mistral's repositories hold the weights twice."""
    source = folders["several files of bfloat16"]
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    save_file({"model.embed_tokens.weight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    found = dict(Policy.load(tmp_path).model.named_parameters())
    assert all(torch.equal(found[name], value) for name, value in whole(source).named_parameters())
