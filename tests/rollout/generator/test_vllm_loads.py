"""Where a load may write into a model's parameters, and that it does so: an engine on a CPU in float32."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from rl.config.schema import load_config
from rl.wire.run import RunFile
from rollout.generator.engines.cpu.environment import UNPACKED_VARIABLE
from rollout.generator.engines.environment import engine_environment
from rollout.generator.engines.in_place import are_weights_as_loaded
from tests.rollout.generator.vllm_rig import PROBE, TOLERANCE, Rig

pytestmark = pytest.mark.slow


def test_layers_that_pack_their_weights_pack_those_of_each_load() -> None:
    rig = Rig(tied=False, own_process=False)
    os.environ[UNPACKED_VARIABLE] = ""
    rig.start()
    core: Any = rig.engine._core
    runner = core._core.model_executor.driver_worker.model_runner
    assert not are_weights_as_loaded(runner) and not runner.get_model().model.layers[0].mlp.down_proj.weight.numel()

    for _ in range(2):
        rig.update()
        request = rig.request(PROBE)
        (result,) = rig.generate(request)
        assert rig.error(request, result) < TOLERANCE
    rig.stop()


def test_an_engine_in_a_process_of_its_own_keeps_its_weights_as_well() -> None:
    rig = Rig(tied=False)
    rig.start()
    core: Any = rig.engine._core
    assert rig.call(core.rpc("writes_into_parameters")) == [True]
    rig.stop()


def test_a_load_writes_into_the_parameters_that_the_layers_multiply_with() -> None:
    rig = Rig(tied=False, own_process=False)
    rig.start()
    core: Any = rig.engine._core
    runner = core._core.model_executor.driver_worker.model_runner
    before = {name: value.data_ptr() for name, value in runner.get_model().named_parameters()}
    assert are_weights_as_loaded(runner) and all(value.numel() for value in runner.get_model().parameters())

    rig.update()
    assert {name: value.data_ptr() for name, value in runner.get_model().named_parameters()} == before
    request = rig.request(PROBE)
    (result,) = rig.generate(request)
    assert rig.error(request, result) < TOLERANCE
    rig.stop()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_packed_where_that_is_sooner(device: str, dtype: str) -> None:
    told = engine_environment(load_config(None, [f"generator.dtype={dtype}"]), device)
    assert bool(told.get(UNPACKED_VARIABLE)) == (device == "cpu" and dtype == "float32")


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_a_head_that_stays_tied_follows_the_embedding(layer_by_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs: the head gets no weights, and is the embedding."""
    monkeypatch.setattr(RunFile, "untied", False)
    if layer_by_layer:
        monkeypatch.setattr("rollout.generator.engines.in_place.are_weights_as_loaded", lambda runner: False)
    rig = Rig(tied=True, own_process=False)
    rig.start()
    core: Any = rig.engine._core
    model = core._core.model_executor.driver_worker.model_runner.get_model()

    for _ in range(2):
        rig.update()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        request = rig.request(PROBE)
        (result,) = rig.generate(request)
        assert rig.error(request, result) < TOLERANCE
    rig.stop()


class _Prepared(torch.nn.Module):
    def process_weights_after_loading(self, dtype: torch.dtype) -> None: ...


def _layer(
    method: object = None, shape: tuple[int, ...] = (4, 4), dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    layer.quant_method = method
    made: torch.nn.Module = layer
    return made


PLAIN = [_layer(UnquantizedEmbeddingMethod()), _layer()]


def _runner(*layers: torch.nn.Module, **changes: Any) -> Any:
    fields = {"device": torch.device("cpu"), "lora_config": None, "get_model": lambda: torch.nn.ModuleList(layers)}
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(
    "layer",
    [_Prepared(), _layer(method=object()), _layer(shape=(0,)), _layer(dtype=torch.bfloat16)],
    ids=["prepares its weights", "a method of its own", "packed away", "may be packed and still there"],
)
def test_a_model_that_prepares_weights_is_told_of_each_load(
    layer: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    assert are_weights_as_loaded(_runner(*PLAIN))
    assert not are_weights_as_loaded(_runner(*PLAIN, layer))
    assert not are_weights_as_loaded(_runner(*PLAIN, lora_config=object()))

    monkeypatch.setattr(_custom_ops, "_supports_onednn", True)
    assert not are_weights_as_loaded(_runner(*PLAIN))


def test_on_a_gpu_linear_layers_pack_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_custom_ops, "_supports_onednn", True)
    gpu = {"device": torch.device("cuda")}
    assert are_weights_as_loaded(_runner(*PLAIN, _layer(dtype=torch.bfloat16), **gpu))
    for layer in (_Prepared(), _layer(method=object())):
        assert not are_weights_as_loaded(_runner(*PLAIN, layer, **gpu))
    assert not are_weights_as_loaded(_runner(*PLAIN, lora_config=object(), **gpu))
