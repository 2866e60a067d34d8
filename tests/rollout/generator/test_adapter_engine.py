"""An engine that is sent adapters alone samples from the very sum that the learner trains, update after update."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rl.config.lora import LoraOptions
from rl.learner.publish import probe_logp
from rl.models.families import FAMILIES, SERVED_MERGED
from rl.models.policy import Policy
from rl.models.protocol import ModelOptions
from rollout.generator.engines.base import Sampled
from rollout.generator.engines.vllm_adapter import load_adapter
from tests.rl.models.tiny_families import save_family
from tests.rollout.generator.vllm_rig import ON_A_GPU, PROBE, TOLERANCE, Rig

VERSIONS = 8
PROMPT = [(7 * i * i + 3 * i + 11) % 250 + 3 for i in range(100)]  # three blocks of the prefix cache


class AdapterRig(Rig):
    """Version n is a model beside the random adapters of seed n; the judge has the weights that the learner merges."""

    def __init__(self, family: str, lora: dict[str, Any], settings: tuple[str, ...] = (), **form: Any) -> None:
        self.start_folder = Path(form.pop("models"))
        self.judged = self.start_folder / "judged"
        save_family(family, self.start_folder / "start", **form.pop("shape", {}))
        options = LoraOptions(**lora, serve="adapter")
        self.policy = Policy.load(self.start_folder / "start", options=ModelOptions(lora=options))
        given = f"model.lora={json.dumps(options.model_dump())}"
        super().__init__(tied=False, settings=[given, *settings], **form)
        self.expected = [self.made(n) for n in range(VERSIONS)]

    def save_base(self, folder: Path) -> None:
        shutil.copytree(self.start_folder / "start", folder)

    @torch.no_grad()
    def made(self, n: int) -> np.ndarray:
        """The files of version n, for the engine and for the judge; the learner's own log-probabilities."""
        random = torch.Generator().manual_seed(n)
        for _, parameter in self.policy.trainable():
            parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.2, generator=random))
        save_file({name: rows.clone() for name, rows, _ in self.policy.adapters()}, self.folder / f"written.{n}")
        merged = self.judged / str(n)
        shutil.copytree(self.start_folder / "start", merged)
        rows = {name: rows.clone() for name, rows, _ in self.policy.export(untie=False)}
        save_file(rows, merged / "model.safetensors", {"format": "pt"})
        return np.array(probe_logp(self.policy, PROBE))

    def model(self, n: int) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.judged / str(n), dtype=torch.float32)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({"own_process": True}, id="own_process"),
        pytest.param({"own_process": False}, id="own_thread"),
        pytest.param({"device": "cuda", "dtype": "bfloat16"}, id="cuda", marks=ON_A_GPU),
    ],
)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterRig]:
    lora = {"rank": 5, "alpha": 8.0, "targets": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
    rig = AdapterRig("qwen3", lora, models=tmp_path_factory.mktemp("models"), **request.param)
    rig.start()
    yield rig
    rig.stop()


def checked(rig: AdapterRig, *prompts: list[int]) -> None:
    """New episodes agree with the newest version, whatever older ones have left in the prefix cache."""
    requests = [rig.request(prompt) for prompt in prompts]
    results = rig.generate(*requests)
    assert {version for sampled in results for version in sampled.policy_version} == {rig.n}
    assert rig.agrees(requests, results)


@pytest.mark.docs
def test_every_token_is_of_the_sum_of_its_version(rig: AdapterRig) -> None:
    """Under each policy of updates, with prompts that the version before has read as well: one nat if it were wrong."""
    for on_update in ("recompute", "abort", "drain", "keep"):  # the last one leaves the cache as it is
        rig.engine.on_update = on_update
        checked(rig, PROMPT, PROMPT[:64])
        found = np.array(rig.update().probe_logp)
        assert rig.close(np.abs(found - rig.expected[rig.n]))
        assert np.abs(found - rig.expected[rig.n - 1]).mean() > 0.1
        checked(rig, PROMPT, PROMPT[:64])
    assert np.abs(rig.reference(rig.n, PROMPT) - rig.reference(rig.n - 1, PROMPT)).mean() > 0.1


@pytest.mark.docs
def test_a_request_that_runs_through_an_update_has_tokens_of_both(rig: AdapterRig) -> None:
    rig.engine.on_update = "recompute"
    rig.update()  # a test before this one may have left something in the cache
    requests = [rig.request(PROMPT[: 40 + i], max_tokens=120) for i in range(4)]

    async def run() -> list[Sampled]:
        tasks, tokens = rig.watch(requests)
        while min(tokens) < 32:
            await asyncio.sleep(0.001)
        await rig.next()
        return [await task for task in tasks]

    results = rig.call(run())
    assert all(len(set(sampled.policy_version)) == 2 for sampled in results)
    assert rig.agrees(requests, results)


@pytest.mark.docs
@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in SERVED_MERGED])
def test_of_every_family_the_engine_adds_what_the_learner_adds(family: str, tmp_path: Path) -> None:
    rig = AdapterRig(family, {"rank": 4, "alpha": 8.0}, models=tmp_path, own_process=False)
    rig.start()
    try:
        for n in (1, 2):
            found = np.array(rig.update().probe_logp)
            assert np.abs(found - rig.expected[n]).max() < TOLERANCE
            assert np.abs(found - rig.expected[n - 1]).max() > 0.1
    finally:
        rig.stop()


class _Manager:
    """As vLLM's: it takes whatever it is given, and uses what it has modules for."""

    def __init__(self) -> None:
        self.modules = {"model.layers.0.mlp.down_proj": None}
        self.told: list[Any] = []

    def remove_adapter(self, number: int) -> None:
        self.told.append(number)

    def add_adapter(self, adapter: Any) -> None:
        self.told.append(adapter)

    def activate_adapter(self, number: int) -> None:
        self.told.append(number)


def test_what_is_loaded_is_a_copy_and_a_layer_that_an_engine_has_not_is_an_error() -> None:
    """vLLM multiplies what it is given by the scale, in place: in a slot that others read."""
    manager = _Manager()
    runner: Any = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    options = LoraOptions(rank=2, alpha=8)

    def pairs(*layers: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((f"{layer}.{part}", slot) for layer in layers for part in ("lora_A", "lora_B"))

    slot = torch.ones(2, 2)
    load_adapter(runner, pairs("model.layers.0.mlp.down_proj"), options)
    removed, adapter, activated = manager.told
    assert removed == activated == adapter.id
    layer = adapter.loras["model.layers.0.mlp.down_proj"].optimize()
    assert torch.equal(layer.lora_b, 4 * slot) and torch.equal(slot, torch.ones(2, 2))

    with pytest.raises(RuntimeError, match=r"no adapter for 1 layers of the published one: \['model.layers.9.x'\]"):
        load_adapter(runner, pairs("model.layers.0.mlp.down_proj", "model.layers.9.x"), options)
