"""A generator process with real vLLM over the real transport, on a model with experts; the tests are its peers.

Two promises, each on one engine in float32 and one in bfloat16, because an engine takes long to start:

* weights that are loaded again reach the experts too: the CPU kernel keeps a packed copy of them;
* the death of vLLM's own process, the one that an out-of-memory kill hits, ends the generator at once, and the reason
  is the engine's: also in a load, whose call into the dead engine would never return. A load that stands still is
  found by `weights.deadline_s`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl.weights.channel import Placement
from rl.weights.updater import Expected, LoadProof, tolerance
from rl.wire.messages import Fatal, Message, Version, WeightNotice, WeightStatus
from rl.wire.sockets import send
from rollout.generator.engines.environment import engine_environment
from tests.conftest import MakeRun
from tests.rollout.generator.test_generator import Outside

PROBE = [1 + (7 * i) % 250 for i in range(24)]
DEADLINE_S = {"float32": 90.0, "bfloat16": 15.0}
"""`weights.deadline_s`: beside a dead engine it must not be what ends the wait, beside a stopped one it is."""
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}


class Experts:
    """The learner of a small model with experts; version n is the random model of seed n."""

    def __init__(self, make_run: MakeRun, folder: Path, dtype: str, device: str = "cpu") -> None:
        self.dtype = dtype
        self.model(0).save_pretrained(folder)
        settings = [f"generator.dtype={dtype}", "generator.max_model_len=512", "generator.max_num_seqs=4"]
        settings += ["generator.options.own_process=true"]
        settings += ["generator.options.kv_cache_bytes=8388608", f"weights.deadline_s={DEADLINE_S[dtype]}"]
        self.run = make_run(*settings, model_folder=folder, device=device)
        entries = [(name, tuple(tensor.shape), dtype) for name, tensor in self.model(0).named_parameters()]
        os.environ.update(engine_environment(self.run.config, device))
        os.environ["TMPDIR"] = str(self.run.folder)
        self.outside = Outside(self.run, entries)

    def model(self, n: int) -> Any:
        torch.manual_seed(n)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE)).to(getattr(torch, self.dtype)).float().eval()

    def logp(self, n: int) -> list[float]:
        with torch.no_grad():
            logp = self.model(n)(torch.tensor([PROBE])).logits[0, :-1].log_softmax(-1)  # (P - 1, vocabulary)
        chosen: list[float] = logp.gather(1, torch.tensor(PROBE[1:])[:, None])[:, 0].tolist()
        return chosen

    def load(self, n: int) -> tuple[WeightStatus, Expected]:
        """Publish version n; what the engine then reports, and what it should."""
        version = Version(0, n)
        pieces = (
            (name, each.detach(), Placement(tuple(each.shape))) for name, each in self.model(n).named_parameters()
        )
        receipt = self.outside.publish(n, pieces)
        send(self.outside.notices, WeightNotice(version, PROBE))

        def done(message: Message) -> bool:
            return isinstance(message, WeightStatus) and (message.version == version or message.error != "")

        status = self.outside.get(self.outside.status, done, seconds=240)  # the first load waits for the engine's start
        assert isinstance(status, WeightStatus)
        assert not status.error, status.error
        return status, Expected(version, receipt, tuple(PROBE), np.array(self.logp(n)))

    def engine_process(self) -> psutil.Process:
        children = psutil.Process(self.outside.process.pid).children(recursive=True)
        (engine,) = [child for child in children if "EngineCore" in " ".join(child.cmdline()) + child.name()]
        return engine


@pytest.fixture(params=["float32", "bfloat16"])
def experts(request: pytest.FixtureRequest, make_run: MakeRun, tmp_path: Path) -> Iterator[Experts]:
    made = Experts(make_run, tmp_path / "model", request.param)
    yield made
    made.outside.close()


@pytest.mark.docs
@pytest.mark.slow
def test_experts_are_loaded_again_and_a_dead_engine_ends_the_generator(experts: Experts) -> None:
    proof = LoadProof(tolerance(experts.run.config), probe=True)
    for n in range(3):
        status, expected = experts.load(n)
        proof.add(expected)
        assert proof.fault(status) is None

    outside = experts.outside
    engine = experts.engine_process()
    for pid in (outside.process.pid, engine.pid):
        assert os.sched_getscheduler(pid) == os.SCHED_BATCH, "on a CPU nobody is pushed off its core by a message"
    engine.suspend()  # a load begins and does not end
    send(outside.notices, WeightNotice(Version(0, 3), PROBE))
    outside.heartbeat(lambda beat: beat.busy)
    reason = f"it has stood still for weights.deadline_s={DEADLINE_S[experts.dtype]:g} s"
    if experts.dtype == "float32":
        outside.process.send_signal(signal.SIGSTOP)  # all that could tell of the death hear of it in one moment
        engine.kill()
        while engine.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        outside.process.send_signal(signal.SIGCONT)
        reason = f"engine process {engine.pid} was killed by SIGKILL"

    fatal = outside.get(outside.control, lambda each: isinstance(each, Fatal))
    assert isinstance(fatal, Fatal) and reason in fatal.message
    assert outside.process.wait(timeout=60) == 1
    engine.wait(60)
