"""What one GPU, torch and transformers can show: `pytest -m gpu`. Elsewhere these tests say that they did not run.

The CPU in float32 is the reference; the other tests of this folder compare it with plain loops.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3ForCausalLM
from transformers.utils.import_utils import is_flash_attn_2_available

from rl.config.schema import LearnerConfig, load_config
from rl.learner.algorithm import make_algorithm
from rl.learner.trainer import Optimizer, Trainer
from rl.learner.update import accumulate_critic, accumulate_gradients
from rl.models.head import token_logprobs
from rl.models.packed_attention import Kernel, has_varlen
from rl.models.packing import Pack, make_packs, sequence_pack
from rl.models.policy import Critic, Policy
from rl.models.protocol import ModelOptions
from rl.weights.host.ends import tensors, write
from rl.weights.host.layout import Manifest
from rl.wire.page_lock import PageLock
from tests.rl.learner.test_moves import make_trainer, steps
from tests.rl.learner.test_trainer_ranks import VARIANTS, weights
from tests.rl.learner.tiny_policies import everywhere, group_batch_part, largest_difference, save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: this machine shows no CUDA device"),
]

ATTENTIONS: list[Any] = [
    "auto",
    "sdpa",
    pytest.param("varlen", marks=pytest.mark.skipif(not has_varlen(), reason="not run: this torch has no varlen_attn")),
    pytest.param(
        "flash",
        marks=pytest.mark.skipif(not is_flash_attn_2_available(), reason="not run: flash-attn is not installed"),
    ),
]
GROUPS = [(40, [9, 30, 5, 70]), (40, [12, 12]), (17, [90, 8, 8, 8])]
"""Tokens of prompts and their answers, which are shorter and longer than the prompts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), tied=False)


def one_pack() -> Pack:
    (pack,) = make_packs(group_batch_part(GROUPS), 10_000, 5)
    return pack


def policy_on(
    folder: Path, device: str, dtype: torch.dtype, attention: Kernel = "auto", compile: bool = False
) -> Policy:
    return Policy.load(folder, None, device, ModelOptions(dtype, attention=attention, compile=compile))


def logp_of(policy: Policy) -> Tensor:
    """(T,) float32, on the CPU."""
    logp: Tensor = policy(one_pack().to(policy.device)).logp.float().cpu()
    return logp


def gradient_of(policy: Policy) -> Tensor:
    """(parameters,) float32, on the CPU, of a weighted sum of log-probabilities."""
    pack = one_pack().to(policy.device)
    (policy(pack).logp * torch.cos(pack.token_ids)).sum().backward()
    gradients = [parameter.grad for _, parameter in policy.trainable() if parameter.grad is not None]
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in gradients]
    return torch.cat([each.flatten() for each in whole]).cpu()


def test_log_probabilities_in_float32_are_those_of_the_cpu(folder: Path) -> None:
    with torch.no_grad():
        reference = logp_of(policy_on(folder, "cpu", torch.float32))
        found = logp_of(policy_on(folder, "cuda", torch.float32))
    assert torch.allclose(found, reference, atol=2e-3)  # TF32 may be on


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_log_probabilities_in_bfloat16_stay_within_the_probes_tolerance(folder: Path, attention: Kernel) -> None:
    with torch.no_grad():
        reference = logp_of(policy_on(folder, "cpu", torch.float32))
        found = logp_of(policy_on(folder, "cuda", torch.bfloat16, attention))
    mask = one_pack().mask
    assert (found - reference)[mask].abs().mean() < 0.1


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gradients_in_bfloat16_point_where_those_of_the_cpu_do(folder: Path, attention: Kernel) -> None:
    reference = gradient_of(policy_on(folder, "cpu", torch.float32))
    found = gradient_of(policy_on(folder, "cuda", torch.bfloat16, attention))
    assert torch.nn.functional.cosine_similarity(found, reference, dim=0) > 0.98


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_window_in_a_tree_is_that_of_the_cpu(tmp_path: Path, attention: Kernel) -> None:
    model = Qwen3ForCausalLM.from_pretrained(save_tiny(tmp_path / "plain"))
    model.config.update({"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention"] * 2})
    model.save_pretrained(tmp_path / "window")
    with torch.no_grad():
        reference = logp_of(policy_on(tmp_path / "window", "cpu", torch.float32))
        found = logp_of(policy_on(tmp_path / "window", "cuda", torch.bfloat16, attention))
    assert (found - reference)[one_pack().mask].abs().mean() < 0.1


@pytest.mark.parametrize("attention", ["varlen", "flash"])
def test_what_a_kernel_refuses_is_named(folder: Path, attention: Kernel) -> None:
    with pytest.raises(ValueError, match=f"attention='{attention}' refuses the dtype float32"):
        logp_of(policy_on(folder, "cuda", torch.float32, attention))


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Each log-probability in float32. In bfloat16, where a kernel's choice moves one by 0.08 nats, their mean."""
    errors = (found - expected).abs()
    return bool(errors.max() < 2e-3 if dtype == torch.float32 else errors.mean() < 0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_of_a_pack_do_not_see_each_other(folder: Path, dtype: torch.dtype) -> None:
    policy = policy_on(folder, "cuda", dtype)
    pack = everywhere(one_pack())
    with torch.no_grad():
        together = policy(pack.to("cuda")).logp
        alone = [
            policy(sequence_pack(pack.token_ids[pack.sample == number].tolist()).to("cuda")).logp
            for number in range(len(pack.rewards))
        ]
    assert near(together, torch.cat(alone), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_say_what_plain_ones_do_and_new_lengths_compile_nothing(
    folder: Path, dtype: torch.dtype
) -> None:
    counters.clear()
    plain, made = (policy_on(folder, "cuda", dtype, compile=each) for each in (False, True))
    counted = []
    for more in range(5):
        groups = [(prompt + 3 * more, [answer + more for answer in answers]) for prompt, answers in GROUPS]
        (pack,) = (each.to("cuda") for each in make_packs(group_batch_part(groups, more), 10_000, 5))
        found = [policy(pack).logp for policy in (plain, made)]
        assert near(found[0], found[1], dtype)
        for logp in found:
            (logp * torch.cos(pack.token_ids)).sum().backward()
        counted.append(counters["stats"]["unique_graphs"])

    assert counted[-1] == counted[1]
    assert dtype == torch.float32 or not counters["graph_break"]  # varlen takes half precision only
    of_plain, of_made = (
        torch.cat([each.grad.flatten() for _, each in policy.trainable() if each.grad is not None])
        for policy in (plain, made)
    )
    assert torch.nn.functional.cosine_similarity(of_plain, of_made, dim=0) > 0.98


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)])
def test_the_head_is_that_of_float64(
    dtype: torch.dtype, tolerance: float, entropy_gradient: bool, compile: bool
) -> None:
    """In chunks, so that the gradient of the matrix is added up."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 64, generator=random).to(dtype) / 4 for rows in (300, 1000))
    targets = torch.randint(1000, (300,), generator=random)

    results = []
    for device, wanted in (("cpu", torch.float64), ("cuda", dtype)):
        own = [each.to(device, wanted).requires_grad_() for each in (hidden, weight)]
        logp, entropy = token_logprobs(
            own[0],
            own[1],
            targets.to(device),
            temperature=0.7,
            chunk=128,
            entropy_gradient=entropy_gradient,
            compile=compile and device == "cuda",
        )
        coefficients = targets.to(device).cos()
        (coefficients * (logp + 0.3 * entropy)).sum().backward()
        results.append([each.double().cpu() for each in (logp, entropy, own[0].grad, own[1].grad) if each is not None])

    for expected, found in zip(*results, strict=True):
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale)


def test_a_sharded_model_is_the_whole_one(folder: Path) -> None:
    """By FSDP over the one rank that is here, with the backends that ranks of a run have."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        sharded = Policy.load(folder, mesh, "cuda", ModelOptions(torch.bfloat16))
        found = gradient_of(sharded)
        with torch.no_grad():
            logp = logp_of(sharded)
            reference = logp_of(policy_on(folder, "cpu", torch.float32))
    finally:
        dist.destroy_process_group()

    assert (logp - reference)[one_pack().mask].abs().mean() < 0.1
    whole = gradient_of(policy_on(folder, "cpu", torch.float32))
    assert torch.nn.functional.cosine_similarity(found, whole, dim=0) > 0.98


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_host_does_not_wait_within_a_pack(folder: Path, dtype: torch.dtype) -> None:
    """Forward, loss, backward and statistics of the policy; forward and backward of a critic."""
    policy, critic = policy_on(folder, "cuda", dtype), Critic.load(folder, None, "cuda", ModelOptions(dtype))
    pack = one_pack().to("cuda")
    algorithm = make_algorithm(load_config(None, ["algo.loss=ppo", "algo.kl={coef: 0.1}", "algo.entropy_coef=0.01"]))
    pack = pack.with_columns(logp_reference=pack.logp_behavior, values=pack.logp_behavior, returns=pack.logp_behavior)
    for again in (False, True):  # the first pass makes what is kept: handles of libraries, plans
        with reads_refused(again):
            accumulate_gradients(policy, [pack], algorithm, temperature=0.7, global_tokens=pack.tokens, first_step=True)
            accumulate_critic(critic, [pack], global_tokens=pack.tokens)


@contextmanager
def reads_refused(refused: bool) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error" if refused else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_moves_every_matrix_and_lowers_the_loss(folder: Path) -> None:
    policy = policy_on(folder, "cuda", torch.bfloat16)
    optimizer = Optimizer(policy.trainable(), LearnerConfig(lr=1e-3), last_step=10)
    pack = one_pack().to("cuda")
    before = {name: value.detach().clone() for name, value in policy.named_parameters()}

    losses = []
    for step in range(4):
        loss = -policy(pack).logp[pack.mask].mean()
        loss.backward()
        optimizer.step(step)
        losses.append(loss.item())

    assert losses[-1] < losses[0]
    moved = {name for name, value in policy.named_parameters() if not torch.equal(value, before[name])}
    assert moved >= {name for name, value in before.items() if value.ndim >= 2 and "embed" not in name}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("elsewhere", ["placement=alternate", "learner.optimizer_states=host"])
def test_what_is_trained_does_not_depend_on_where_its_states_are(tmp_path: Path, elsewhere: str, dtype: str) -> None:
    """With tied embeddings, a critic and moments. CPU and GPU round AdamW otherwise, whose steps are of 0.01."""
    folder = save_tiny(tmp_path, tied=True)
    settings = (*VARIANTS["critic"], f"model.dtype={dtype}")
    placement = "alternate" if elsewhere == "placement=alternate" else "shared"
    still = make_trainer(folder, settings, "shared", device="cuda")
    moved = make_trainer(folder, (*settings, elsewhere), placement, device="cuda")
    began = on_cpu(still)
    for _ in zip(steps(still), steps(moved), strict=True):
        pass

    expected = on_cpu(still)
    assert largest_difference(on_cpu(moved), expected) < 5e-3 < largest_difference(expected, began)


def on_cpu(trainer: Trainer) -> dict[str, Tensor]:
    return {name: each.cpu() for name, each in weights(trainer).items()}


def test_weights_go_through_a_locked_slot_as_they_are(folder: Path) -> None:
    """A slot as a run has it: a file in shared memory, mapped once for writing and once for reading only."""
    policy = policy_on(folder, "cuda", torch.float32)
    manifest = Manifest.layout([(name, placement.shape, "bfloat16") for name, _, placement in policy.export()])
    device = torch.device("cuda", 0)
    writer, reader = PageLock("cuda"), PageLock("cuda:0")

    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(manifest.total_bytes)
        slot = memoryview(mmap.mmap(file.fileno(), manifest.total_bytes))
        seen = memoryview(mmap.mmap(file.fileno(), manifest.total_bytes, prot=mmap.PROT_READ))
        writer.add(slot)
        reader.add(seen)
        assert torch.frombuffer(slot, dtype=torch.uint8).is_pinned()

        write(slot, manifest, policy.export())
        arrived = {name: tensor.to(device) for name, tensor in tensors(manifest, seen)}
        reader.close()
        writer.close()
        assert not torch.frombuffer(slot, dtype=torch.uint8).is_pinned()

    for name, rows, _ in policy.export():
        assert torch.equal(arrived[name], rows.to(torch.bfloat16)), name
