"""One real vLLM engine (tiny random Qwen3), its event loop in a thread, and transformers in float32 as the judge.

`rig` comes in both forms of vLLM's core: in a process of its own, and in a thread of this one.

Policy version n is the random model of seed n: neighbouring versions differ by nats per token, so a token
tagged with the wrong version cannot pass a 1e-4 comparison.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import torch
from msgspec.structs import replace

from rl.config.schema import load_config
from rl.weights.updater import tolerance
from rl.wire.messages import Generate, Version, WeightStatus
from rl.wire.run import ProcessContext, RunFile
from rl.wire.sockets import make_curve_key
from rollout.generator.engines.base import Sampled
from rollout.generator.engines.environment import engine_environment

T = TypeVar("T")

VOCABULARY = 256
MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 32
KV_BYTES = 32 << 20
STOP = 0
TOLERANCE = 1e-4  # nats
PROBE = list(range(1, 40))
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
}
SETTINGS = [
    f"generator.max_model_len={MAX_MODEL_LEN}",
    f"generator.max_num_seqs={MAX_NUM_SEQS}",
    f"generator.options.kv_cache_bytes={KV_BYTES}",
    "weights.transport=tests.rollout.generator.file_weights:FILES",
    "weights.deadline_s=120",
]
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: this machine shows no CUDA device"),
]
ON_EACH_DEVICE = [
    pytest.param("cpu", marks=[pytest.mark.docs, pytest.mark.slow]),
    pytest.param("cuda", marks=ON_A_GPU),
]
"""For a fixture of tests that one body tries on a CPU and shows on a GPU."""


def names_in_shared_memory(processes: Iterable[psutil.Process]) -> set[str]:
    """Of memory that vLLM's processes share: what would stay if all were killed now."""
    maps = [file.path for each in processes if each.is_running() for file in each.memory_maps(grouped=True)]
    return {path for path in maps if re.match(r"/dev/shm/(psm|vllm)_", path) and Path(path).exists()}


class Rig:
    def __init__(
        self,
        tied: bool,
        device: str = "cpu",
        dtype: str = "float32",
        own_process: bool = True,
        threads: int = 1,
        settings: Sequence[str] = (),
    ) -> None:
        self.tied = tied
        self.device = device
        self.dtype = dtype
        self.own_process = own_process
        self.folder = Path(tempfile.mkdtemp(prefix="fresco-vllm-"))
        own = f"generator.options.own_process={str(own_process).lower()}"
        config = load_config(
            None, [*SETTINGS, f"generator.dtype={dtype}", own, f"generator.threads={threads}", *settings]
        )
        os.environ.update(engine_environment(config, device))
        self.save_base(self.folder / "model")
        self.run = RunFile(
            config=config,
            run_id="0badf00d",
            folder=self.folder,
            socket_folder=self.folder,
            device=device,
            model_folder=self.folder / "model",
            train_tasks=1,
            eval_tasks=1,
            started_at=time.time(),
        )
        make_curve_key(self.folder)
        self.run.save()

        self.n = -1
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self) -> None:
        from vllm.envs import disable_envs_cache
        from vllm.model_executor.models import registry
        from vllm.model_executor.models.transformers.base import Base

        from rollout.generator.engines import vllm, vllm_settings

        disable_envs_cache()  # an earlier engine's folder of sockets is gone

        vllm_settings._WORKER_EXTENSION = "tests.rollout.generator.watched_worker.Watched"
        self._set_num_threads = torch.set_num_threads
        before = set(psutil.Process().children(recursive=True))
        self.engine = vllm.VllmEngine(ProcessContext(self.run, 0, 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(self.folder))  # its sockets go with the rig
            patch.setattr(tempfile, "tempdir", None)
            if self.device == "cpu":  # vLLM asks a process of its own about a class, lest CUDA begins in this one
                patch.setattr(registry, "_run_in_subprocess", lambda ask: ask())
            patch.setenv("LD_PRELOAD", "")  # vLLM's addition is for its own child, not for other tests'
            if not self.own_process:  # later tests make models of the classes that vLLM changes to compile them
                patch.setattr(Base, "_decorate_cls_for_torch_compile", lambda *_, **__: None)
            self.info = self.call(self.engine.start(), 240)
        self.processes = [p for p in psutil.Process().children(recursive=True) if p not in before and _is_engine(p)]
        assert bool(self.processes) == self.own_process
        self.update()

    def stop(self) -> None:
        left = names_in_shared_memory(self.processes)
        assert left == set(), left
        self.call(self.engine.stop())
        gone, alive = psutil.wait_procs(self.processes, timeout=60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        shutil.rmtree(self.folder)
        if not self.own_process:
            self._leave_nothing_in_this_process()
        assert bool(gone) == self.own_process and not alive, f"stop() left {alive}"

    def _leave_nothing_in_this_process(self) -> None:
        """Other tests make process groups of their own, and set threads, which vLLM forbids on a CPU."""
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()  # type: ignore[no-untyped-call]
        destroy_distributed_environment()  # type: ignore[no-untyped-call]
        torch.set_num_threads = self._set_num_threads

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = 240) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def cpu_seconds(self) -> float:
        """What the engine has computed so far, its children included."""
        times = [process.cpu_times() for process in self.processes or [psutil.Process()]]
        return sum(each.user + each.system + each.children_user + each.children_system for each in times)

    # ------------------------------------------------------------ weights

    def save_base(self, folder: Path) -> None:
        """What the engine begins with."""
        self.model(0).save_pretrained(folder)

    def model(self, n: int) -> Any:
        return _model(n, self.tied)

    def publish(self, n: int, without: str = "") -> None:
        written = self.folder / f"written.{n}"
        if not written.exists():
            self.write(n, without)
        written.rename(self.folder / f"weights.{n}.safetensors")

    def write(self, n: int, without: str = "") -> None:
        """What `publish` gives its name: the slow part of it."""
        from safetensors.torch import save_file

        weights = {name: tensor.clone() for name, tensor in self.model(n).state_dict().items() if name != without}
        if self.tied:
            weights.pop("lm_head.weight")
        save_file(weights, self.folder / f"written.{n}")

    async def next(self) -> WeightStatus:
        """Publish and load the next version."""
        self.publish(self.n + 1)
        return await self.load_next()

    async def load_next(self) -> WeightStatus:
        """Load the next version, which is published already: little goes on in the engine meanwhile."""
        self.n += 1
        return await self.engine.load(Version(0, self.n), PROBE)

    def update(self) -> WeightStatus:
        return self.call(self.next())

    # ------------------------------------------------------------ requests

    def request(self, prompt: list[int], **fields: Any) -> Generate:
        request_id = next(self._ids)
        ids = np.array(prompt, dtype=np.int32)
        plain = Generate(request_id, request_id, "train", Version(0, self.n), ids, 24, 1.0, 1.0, [])
        return replace(plain, **fields)

    def begin(self, request: Generate, progress: Callable[[Sampled], None] = lambda _: None) -> asyncio.Task[Sampled]:
        """Start a request; call from the engine's loop."""
        return asyncio.create_task(self.engine.generate(request, progress))

    def update_amid(
        self, running: Sequence[Generate], meanwhile: Generate, tokens: int = 1
    ) -> tuple[list[Sampled], Sampled]:
        """The results of requests in which an update falls, once each has so many tokens, and of one that begins while
        it is loaded."""
        self.publish(self.n + 1)

        async def run() -> tuple[list[Sampled], Sampled]:
            tasks, sampled = self.watch(running)
            while min(sampled) < tokens:
                await asyncio.sleep(0.001)
            load = asyncio.create_task(self.load_next())
            while self.engine._open:
                await asyncio.sleep(0)
            late = self.begin(meanwhile)
            await load
            return await asyncio.gather(*tasks), await late

        return self.call(run())

    def watch(self, requests: Sequence[Generate]) -> tuple[list[asyncio.Task[Sampled]], list[int]]:
        """Start all; how many tokens each has, as it grows. Call from the engine's loop."""
        tokens = [0] * len(requests)

        def count(index: int, sampled: Sampled) -> None:
            tokens[index] = len(sampled.token_ids)

        def ended(index: int, task: asyncio.Task[Sampled]) -> None:
            if not task.cancelled() and task.exception() is None:
                count(index, task.result())  # progress is not told of an end

        tasks = [self.begin(request, partial(count, index)) for index, request in enumerate(requests)]
        for index, task in enumerate(tasks):
            task.add_done_callback(partial(ended, index))
        return tasks, tokens

    def generate(self, *requests: Generate) -> list[Sampled]:
        async def run() -> list[Sampled]:
            return await asyncio.gather(*(self.begin(request) for request in requests))

        return self.call(run())

    # ------------------------------------------------------------ the judge

    def reference(self, n: int, ids: list[int], temperature: float = 1.0, top_p: float = 1.0) -> np.ndarray:
        """Log-probabilities of ids[1:] under version n: temperature, then the nucleus, renormalised."""
        with torch.no_grad():
            logits = self.model(n)(torch.tensor([ids])).logits[0, :-1].double() / temperature
        logp = logits.log_softmax(-1)  # (T-1, vocab)
        ordered, order = logp.sort(-1, descending=True)
        outside = (ordered.exp().cumsum(-1) - ordered.exp()) >= top_p
        logp = logp.masked_fill(outside.scatter(-1, order, outside), -torch.inf).log_softmax(-1)
        chosen: np.ndarray = logp.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
        return chosen

    def close(self, *errors: np.ndarray) -> bool:
        """Whether differences in nats are those of rounding: each of them in float32, their mean in bfloat16.

        A token at a nucleus' edge may be in that of bfloat16 alone: one in a thousand is, and two in a hundred pass.
        """
        together = np.concatenate(errors)
        if self.dtype == "float32":
            return bool(together.max() < TOLERANCE)
        inside = together[np.isfinite(together)]
        return len(inside) >= 0.98 * len(together) and bool(inside.mean() < tolerance(self.run.config))

    def agrees(self, requests: Sequence[Generate], results: Sequence[Sampled], **distribution: float) -> bool:
        """Whether each token has the log-probability that the model of its own version gives it."""
        pairs = zip(requests, results, strict=True)
        return self.close(*(self.errors(request, sampled, **distribution) for request, sampled in pairs))

    def error(self, request: Generate, sampled: Sampled, **distribution: float) -> float:
        """Largest |difference| to the model of each token's own version, in nats."""
        return float(self.errors(request, sampled, **distribution).max())

    def errors(self, request: Generate, sampled: Sampled, **distribution: float) -> np.ndarray:
        """(T,) of each token."""
        assert len(sampled.token_ids) == len(sampled.logp) == len(sampled.policy_version) > 0
        assert sampled.policy_version == sorted(sampled.policy_version)
        prompt = request.prompt_ids.tolist()
        errors = np.zeros(len(sampled.logp))
        for n in set(sampled.policy_version):
            expected = self.reference(n, prompt + sampled.token_ids, **distribution)[len(prompt) - 1 :]
            mine = np.array(sampled.policy_version) == n
            errors[mine] = np.abs(expected - np.array(sampled.logp))[mine]
        return errors


def _is_engine(process: psutil.Process) -> bool:
    """Python's own resource tracker lives as long as its parent."""
    return "resource_tracker" not in " ".join(process.cmdline())


@lru_cache(maxsize=64)
def _model(n: int, tied: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(1000 + n)
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied)).eval()


def running(tied: bool, device: str = "cpu", dtype: str = "float32", own_process: bool = True) -> Iterator[Rig]:
    """A started rig for a fixture."""
    rig = Rig(tied, device, dtype, own_process)
    rig.start()
    yield rig
    rig.stop()


@pytest.fixture(scope="module", params=[True, False], ids=["own_process", "own_thread"])
def shared_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    yield from running(tied=False, own_process=request.param)


@pytest.fixture
def rig(shared_rig: Rig) -> Rig:
    """The untied engine, under `recompute`."""
    shared_rig.engine.on_update = "recompute"
    return shared_rig


@pytest.fixture(scope="module")
def tied_rig() -> Iterator[Rig]:
    yield from running(tied=True)
