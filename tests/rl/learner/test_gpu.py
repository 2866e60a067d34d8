"""What one GPU, torch and transformers can show: `pytest -m gpu`. Elsewhere these tests say that they did not run.

The CPU in float32 is the reference; the other tests of this folder compare it with plain loops.
"""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.utils.import_utils import is_flash_attn_2_available

from rl.config.schema import LearnerConfig
from rl.learner.optimizer import Optimizer
from rl.learner.publish import weight_pieces
from rl.models import packed_attention
from rl.models.packing import Pack, make_packs
from rl.models.policy import Policy, load_policy, shard_policy
from rl.weights.host.layout import Manifest
from rl.weights.host.page_lock import PageLock
from rl.weights.host.tensors import tensors, write
from tests.rl.learner.tiny_policies import make_shards, save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: this machine shows no CUDA device"),
]

ATTENTIONS = [
    packed_attention.NAME,
    pytest.param(
        "flash_attention_2",
        marks=pytest.mark.skipif(not is_flash_attn_2_available(), reason="not run: flash-attn is not installed"),
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), tied=False)


def one_pack() -> Pack:
    (shard,) = make_shards(1)
    (pack,) = make_packs(shard, 10_000, shard.step)
    return pack


def policy_on(folder: Path, device: str, dtype: torch.dtype, attention: str = packed_attention.NAME) -> Policy:
    policy = load_policy(folder, attention=attention, device=device)
    return shard_policy(policy, compute_dtype=dtype, device=device)


def logp_of(policy: Policy, device: str) -> Tensor:
    """(T,) float32, on the CPU."""
    pack = one_pack().to(device)
    logp: Tensor = policy(pack.token_ids, pack.position_ids, select=pack.mask).logp
    return logp.float().cpu()


def test_log_probabilities_in_float32_are_those_of_the_cpu(folder: Path) -> None:
    with torch.no_grad():
        reference = logp_of(policy_on(folder, "cpu", torch.float32), "cpu")
        found = logp_of(policy_on(folder, "cuda", torch.float32), "cuda")
    assert torch.allclose(found, reference, atol=2e-3)  # TF32 may be on


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_log_probabilities_in_bfloat16_stay_within_the_probes_tolerance(folder: Path, attention: str) -> None:
    with torch.no_grad():
        reference = logp_of(policy_on(folder, "cpu", torch.float32), "cpu")
        found = logp_of(policy_on(folder, "cuda", torch.bfloat16, attention), "cuda")
    mask = one_pack().mask
    assert (found - reference)[mask].abs().mean() < 0.1


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.05)])
def test_samples_of_a_pack_do_not_see_each_other(folder: Path, dtype: torch.dtype, tolerance: float) -> None:
    policy = policy_on(folder, "cuda", dtype)
    pack = one_pack().to("cuda")
    with torch.no_grad():
        together = policy(pack.token_ids, pack.position_ids).logp
        alone = [
            policy(pack.token_ids[chosen], pack.position_ids[chosen]).logp
            for chosen in (pack.sample == number for number in range(len(pack.rewards)))
        ]
    assert torch.allclose(together, torch.cat(alone), atol=tolerance)


def test_a_step_moves_every_matrix_and_lowers_the_loss(folder: Path) -> None:
    policy = policy_on(folder, "cuda", torch.bfloat16)
    optimizer = Optimizer(policy, LearnerConfig(lr=1e-3), last_step=10)
    pack = one_pack().to("cuda")
    before = {name: value.detach().clone() for name, value in policy.named_parameters()}

    losses = []
    for step in range(4):
        loss = -policy(pack.token_ids, pack.position_ids, select=pack.mask).logp[pack.mask].mean()
        loss.backward()
        optimizer.step(step)
        losses.append(loss.item())

    assert losses[-1] < losses[0]
    moved = {name for name, value in policy.named_parameters() if not torch.equal(value, before[name])}
    assert moved >= {name for name, value in before.items() if value.ndim >= 2 and "embed" not in name}


def test_weights_go_through_a_locked_slot_as_they_are(folder: Path) -> None:
    """A slot as a run has it: a file in shared memory, mapped once for writing and once for reading only."""
    policy = policy_on(folder, "cuda", torch.float32)
    manifest = Manifest.layout([(name, placement.shape, "bfloat16") for name, _, placement in weight_pieces(policy)])
    writer, reader = PageLock("cuda"), PageLock("cuda:0")

    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(manifest.total_bytes)
        slot = memoryview(mmap.mmap(file.fileno(), manifest.total_bytes))
        seen = memoryview(mmap.mmap(file.fileno(), manifest.total_bytes, prot=mmap.PROT_READ))
        writer.add(slot)
        reader.add(seen)
        assert torch.frombuffer(slot, dtype=torch.uint8).is_pinned()

        write(slot, manifest, weight_pieces(policy))
        arrived = {name: tensor.to("cuda") for name, tensor in tensors(manifest, seen)}
        reader.close()
        writer.close()
        assert not torch.frombuffer(slot, dtype=torch.uint8).is_pinned()

    for name, rows, _ in weight_pieces(policy):
        assert torch.equal(arrived[name], torch.as_tensor(rows).to(torch.bfloat16)), name
