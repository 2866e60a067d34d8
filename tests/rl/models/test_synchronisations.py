"""The host never waits for the device within a pack: no forward, loss, backward or statistic reads a tensor.

On a CPU by what torch dispatches and by the methods that read; `tests/rl/learner/test_gpu.py` does it on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from algos.registry import registered
from rl.config.schema import load_config
from rl.learner.algorithm import make_algorithm
from rl.learner.credit import assign
from rl.learner.guards import StepGuards
from rl.learner.token_log import TokenLog
from rl.learner.trainer import Trainer
from rl.learner.update import accumulate_critic, accumulate_gradients, with_logp, with_values
from rl.models.packing import Pack, make_packs
from rl.models.policy import Critic, Policy
from rl.models.protocol import ModelOptions
from rl.store.samples import read_trained
from rl.wire.columns import COLUMNS, TEACHER_LOGP
from tests.rl.learner.tiny_policies import group_batch_part, save_tiny

READING = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique", "is_nonzero", "equal")
METHODS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


class NothingIsRead(TorchDispatchMode):
    """Raises where a GPU would have to answer before the host goes on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        assert not name.startswith(READING), f"{operation} reads a tensor"
        if name.startswith("index") and len(arguments) > 1 and isinstance(arguments[1], (list, tuple)):
            masks = [each for each in arguments[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
            assert not masks, f"{operation} with a mask counts how many are set"
        return operation(*arguments, **(options or {}))


@contextmanager
def nothing_is_read() -> Iterator[None]:
    def refused(name: str) -> Callable[..., Any]:
        def read(self: Tensor, *_: object, **__: object) -> Any:
            raise AssertionError(f"Tensor.{name} of {tuple(self.shape)}")

        return read

    mode: Any = NothingIsRead  # whose base is untyped
    with pytest.MonkeyPatch.context() as patch, mode():
        for name in METHODS:
            patch.setattr(torch.Tensor, name, refused(name))
        yield


GROUPS = [(9, [3, 5, 3, 1]), (9, [3, 2]), (6, [4, 4, 4])]
"""Tokens of each prompt, and of its answers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def packs_for(folder: Path, *settings: str) -> list[Pack]:
    """Complete for any loss, as `Trainer.minibatches` makes them."""
    batch_part = group_batch_part(GROUPS)
    packs = make_packs(batch_part, 48, version=5)
    policy = Policy.load(folder)
    for column in ("logp_proximal", "logp_reference"):
        packs = with_logp(policy, packs, column, temperature=0.7)
    packs = [pack.with_columns(returns=torch.ones(pack.tokens)) for pack in with_values(Critic.load(folder), packs)]
    minibatches = assign(batch_part, [packs], make_algorithm(load_config(None, [*settings])))
    return [pack.laid_out() for pack in minibatches[0].packs]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("loss", registered("loss"))
def test_of_the_policy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, checkpointing: bool
) -> None:
    correction = "algo.correction={weight: token, cap: 1.05, mask: geometric, low: 0.9, high: 1.1}"
    taught = ["algo.teacher=any"] if loss == "reverse_kl" else []
    settings = [f"algo.loss={loss}", "algo.kl={coef: 0.1}", "algo.entropy_coef=0.01", correction, *taught]
    algorithm = make_algorithm(load_config(None, settings))
    packs = packs_for(folder)
    if taught:
        monkeypatch.setitem(COLUMNS, TEACHER_LOGP.name, TEACHER_LOGP)
        packs = [pack.with_columns(teacher_logp=pack.logp_behavior) for pack in packs]
    assert any(pack.layout is not None and pack.layout.segments.keys is not None for pack in packs)
    policy = Policy.load(folder, options=ModelOptions(activation_checkpointing=checkpointing))

    log = TokenLog(tmp_path, "learner.0.0", 1.0)
    log.batch(group_batch_part(GROUPS))

    with nothing_is_read():
        stats = accumulate_gradients(policy, packs, algorithm, temperature=0.7, global_tokens=100, observe=log)
    log.write_batch()
    log.close()
    assert read_trained(tmp_path)
    assert stats.metrics()["loss/entropy"] > 0
    assert all(parameter.grad is not None for _, parameter in policy.trainable())


def test_of_the_critic(folder: Path) -> None:
    packs = packs_for(folder)
    critic = Critic.load(folder)
    with nothing_is_read():
        valued = with_values(critic, packs)
        stats = accumulate_critic(critic, valued, global_tokens=100, clip=0.2)
    assert stats.metrics()["critic/loss"] > 0


def test_of_a_forward_without_gradients(folder: Path) -> None:
    packs = packs_for(folder)
    policy = Policy.load(folder)
    with nothing_is_read():
        packs = with_logp(policy, packs, "logp_proximal", temperature=0.7)
    assert all(pack.logp_proximal is not None and pack.logp_proximal.any() for pack in packs)


def test_in_bfloat16(folder: Path) -> None:
    policy = Policy.load(folder, options=ModelOptions(torch.bfloat16))
    packs = packs_for(folder)
    with nothing_is_read():
        for pack in packs:
            policy(pack, temperature=0.7, entropy_gradient=True).logp.sum().backward()


def test_the_test_sees_what_it_forbids() -> None:
    values = torch.arange(4.0)
    mask = values > 1
    reads: list[Callable[[], object]] = [
        lambda: values.sum().item(),
        lambda: int(values.sum()),
        lambda: bool(mask.any()),
        lambda: values[mask],
        lambda: values.masked_select(mask),
        lambda: mask.nonzero(),
        lambda: torch.nonzero(mask),
        lambda: values.tolist(),
        lambda: values.index_put((mask,), torch.zeros(())),
    ]
    for read in reads:
        with pytest.raises(AssertionError), nothing_is_read():
            read()


def test_guards_read_the_optimizers_steps_of_all_tensors_at_once(folder: Path) -> None:
    trainer = Trainer(load_config(None, ["model.dtype=float32"]), folder, last_step=3)
    guards = SimpleNamespace(_trainer=trainer)
    assert StepGuards._counted_steps(cast(Any, guards)) == 0
    for _, parameter in trainer.policy.trainable():
        parameter.grad = torch.ones_like(parameter)
    trainer.optimizer.step(0)

    mode: Any = Reads
    reads = mode()
    with reads:
        assert StepGuards._counted_steps(cast(Any, guards)) == 1
    assert reads.count == 1


class Reads(TorchDispatchMode):
    """Counts tensors of which the host reads a number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += operation.overloadpacket.__name__ == "_local_scalar_dense"
        return operation(*arguments, **(options or {}))
