"""What the start of an engine with an own process costs: vLLM is imported once, and what was compiled is found."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import envs
from vllm.usage.usage_lib import UsageContext

from launch.cli import main
from rl.config.schema import Config, GeneratorConfig
from rl.store.made_once import cache_folder
from rl.wire.messages import GeneratorHello
from rl.wire.run import ProcessContext
from rollout.generator.engines import copied
from rollout.generator.engines.environment import HOW_TO_BEGIN, engine_environment
from rollout.generator.engines.vllm_settings import engine_arguments
from tests.conftest import MakeRun
from tests.rollout.generator.test_generator import Outside
from tests.rollout.generator.vllm_rig import SETTINGS, SHAPE

COUNTS = """
import os, sys


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm":
            with open(os.environ["VLLM_IMPORTED_BY"], "a") as file:
                file.write(f"{os.getpid()}\\n")


sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False)).save_pretrained(folder)
    return folder


@pytest.mark.docs
@pytest.mark.slow
@pytest.mark.parametrize(("how", "imports"), [("fork", 1), ("spawn", 3)])
def test_vllm_is_imported_once(
    make_run: MakeRun, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, imports: int
) -> None:
    """As on GPUs, in the first start of all: vLLM knows nothing of the model yet. Begun anew, that is one import more,
    and the engine's process is another one."""
    counted = tmp_path / "imported"
    (tmp_path / "sitecustomize.py").write_text(COUNTS)
    run = make_run(*SETTINGS[:3], "generator.options.own_process=true", "generator.dtype=float32", model_folder=model)
    told = {"VLLM_IMPORTED_BY": counted, "VLLM_CACHE_ROOT": tmp_path / "vllm", "TMPDIR": run.folder, HOW_TO_BEGIN: how}
    told["PYTHONPATH"] = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    for name, value in (engine_environment(run.config, "cpu") | told).items():
        monkeypatch.setenv(name, str(value))

    outside = Outside(run)
    try:
        outside.get(outside.backend, lambda each: isinstance(each, GeneratorHello), seconds=240)
        below = psutil.Process(outside.process.pid).children(recursive=True)
        assert below, "the engine has a process of its own"
        assert len(set(counted.read_text().split())) == imports
    finally:
        outside.close()  # by SIGKILL
    assert not psutil.wait_procs(below, timeout=60)[1], "an engine that is a copy ends with its generator as well"


def test_an_engine_begins_as_a_copy_where_that_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in engine_environment(Config(generator=GeneratorConfig(engine="vllm")), "cuda").items():
        monkeypatch.setenv(name, value)
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1", "to count GPUs must not begin to use them"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not copied.may_be_copies(1), "threads of OpenMP are not copied"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert copied.may_be_copies(1)

    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    copied.set_how_to_begin(True, "cpu")
    assert os.environ[HOW_TO_BEGIN] == "fork"
    copied.set_how_to_begin(True, "cuda")
    assert os.environ[HOW_TO_BEGIN] == "spawn", "a copy could not use CUDA"
    assert not copied.may_be_copies(1)

    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    copied.set_how_to_begin(True, "cuda")
    assert os.environ[HOW_TO_BEGIN] == "fork"


@pytest.mark.parametrize("work", ["return False", "raise ValueError", "os._exit(0)", "wait for ever"])
def test_what_a_copy_answers(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied, "_PATIENCE_S", 1.0)

    def answer() -> bool:
        if work == "raise ValueError":
            raise ValueError
        if work == "os._exit(0)":
            os._exit(0)
        while work == "wait for ever":
            pass
        return False

    before = {child.pid for child in psutil.Process().children()}
    assert copied._in_copy(answer) == (work == "os._exit(0)")
    assert {child.pid for child in psutil.Process().children()} <= before


def test_what_vllm_has_compiled_is_found_by_every_generator_of_every_run(
    make_run: MakeRun, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key holds nothing of a run, its seed, its folders or the place of its engine."""
    keys = []
    for seed, index, memory in ((1, 0, 32 << 20), (2, 3, 64 << 20)):
        cache = f"generator.options.kv_cache_bytes={memory}"
        run = make_run(*SETTINGS[:2], cache, f"seed={seed}", "generator.dtype=float32", model_folder=model)
        monkeypatch.setenv("TMPDIR", str(run.folder))
        monkeypatch.setattr(tempfile, "tempdir", None)
        for name, value in engine_environment(run.config, "cpu").items():
            monkeypatch.setenv(name, value)

        arguments, _ = engine_arguments(ProcessContext(run, index, index))
        config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        envs.disable_envs_cache()
        keys.append((config.compute_hash(), envs.compile_factors()))
    assert keys[0] == keys[1]


def test_what_is_compiled_stays_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setenv("FRESCO_CACHE", str(tmp_path))
    monkeypatch.setattr("launch.cli.resolve_name", lambda _: lambda _: seen.update(os.environ) or 0)
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
    for name in names:
        monkeypatch.delenv(name, raising=False)

    assert main(["doctor"]) == 0 and cache_folder() == tmp_path
    assert all(Path(seen[name]).parent == tmp_path for name in names)

    monkeypatch.setenv("VLLM_CACHE_ROOT", "/elsewhere")
    assert main(["doctor"]) == 0 and seen["VLLM_CACHE_ROOT"] == "/elsewhere", "one's own is kept"
