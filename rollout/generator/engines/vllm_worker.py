"""What runs inside vLLM's worker processes: the receiving end of the weights' channel, on each tensor-parallel rank.

`LoadsWeights` is mixed into vLLM's worker class (`worker_extension_cls`); its methods are called through
`collective_rpc`, once per rank, on the thread that also steps the engine. They carry names and numbers
only: every rank makes its own receiver and takes the tensors from the channel.

A load has two parts, so that generation pauses for the second one only:

    weights_fetch   starts a thread that takes the newest version and then makes its receipt
    weights_fetched polls that thread for what was taken, and is what was published
    weights_load    loads the tensors into the model
    weights_drop    gives back what was taken without loading it

The receipt reads every byte, which may take longer than the load. It comes first, so what is damaged never reaches the
model, and generation goes on with the version before.

A load takes as long as it takes: nothing here ends it but a receiver that stands still. How far it has come is written
into a file of one number for each rank, because a rank that loads answers no call.

Importing this module sets what has to be known before a model is built. This is how linear layers keep their weights,
how much routing is kept, and how many logits are made at once. In a child of a generator it also ties that child to the
generator's life: vLLM leaves its engine process running when the process that owns it is killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.v1.worker.gpu.sample import prompt_logprob

from rl.config.lora import served_adapter
from rl.weights import make_receiver
from rl.weights.turns import Turns
from rl.wire.messages import Version
from rl.wire.run import RunFile
from rollout.generator.engines import in_place
from rollout.generator.engines.cpu import experts, unpacked
from rollout.generator.engines.environment import PROBED_AT_ONCE
from rollout.generator.engines.nameless import expect_no_names, forget_names
from rollout.generator.engines.owner import die_with_owner
from rollout.generator.engines.vllm_adapter import load_adapter
from rollout.generator.engines.vllm_routing import make_room_for_the_aborted

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


class LoadsWeights:
    """Mixed into vLLM's worker: `model_runner`, `rank` and `vllm_config` are the worker's."""

    model_runner: Any
    rank: int

    def weights_open(self, run_folder: str, index: int, incarnation: int, untied: bool, progress: str) -> None:
        """To be called before any other. `untied`: whether the engine gave a tied model its own head; `progress`: the
        file for it."""
        run = RunFile.load(run_folder)
        device = str(self.model_runner.device)
        self._weights_receiver = make_receiver(run, f"generator-{index}-{self.rank}", incarnation, device)
        self._weights_deadline_s = run.config.weights.deadline_s
        self._weights_untied = untied
        self._weights_adapter = served_adapter(run.config.model)
        self._weights_progress = np.memmap(progress, np.uint64, "r+")
        self._weights_loaded_bytes = 0
        self._turns = Turns(run, alone=False) if run.config.alternates else None
        self.turn(True)

    def turn(self, begins: bool) -> None:
        """Whether the device is this process's, which may outlive the generator by a moment. The generator has it as
        well, so there is no wait."""
        if self._turns is not None and begins:
            self._turns.take()
        elif self._turns is not None:
            self._turns.give()

    def names_forget(self) -> None:
        """Once all ranks have begun."""
        forget_names()

    def routing_open(self, dtype: str) -> None:
        """Keep the experts that each token is routed to, from now on; on a CPU."""
        from rollout.generator.engines.cpu.routing import RoutingCapture  # of no use on a GPU

        self._routing = RoutingCapture(self.model_runner, dtype)

    def routing_take(self, request: str) -> bytes | None:
        """Those of a request that has ended."""
        rows = self._routing.take(request)
        return None if rows is None else rows.tobytes()

    def weights_fetch(self, timeline: int, n: int) -> None:
        """Begin to take a version not older than (timeline, n)."""
        self._weights_outcome: dict[str, Any] = {}
        threading.Thread(target=self._weights_take, args=(Version(timeline, n),), name="weights", daemon=True).start()

    def weights_fetched(self, addresses: dict[str, str]) -> dict[str, Any]:
        """What was fetched. It is empty until that is proven; then its version, receipt and seconds, or `error`."""
        self._weights_receiver.run.addresses.give(addresses)
        self._weights_report()
        return self._weights_outcome

    def weights_load(self) -> dict[str, Any]:
        """Load what was taken. `intact` is false if it changed meanwhile: fetch again, load again."""
        begin = time.monotonic()
        pairs = with_head(self._weights_tensors) if self._weights_untied else self._weights_tensors
        try:
            if self._weights_adapter is None:
                load_all(self.model_runner, self._weights_counted(pairs))
            else:
                load_adapter(self.model_runner, self._weights_counted(pairs), self._weights_adapter)
        finally:
            del pairs
            intact = self.weights_drop()
        return {"intact": intact, "load_s": time.monotonic() - begin}

    def weights_drop(self) -> bool:
        """Whether what was taken stayed as it was."""
        del self._weights_tensors  # none may outlive the release
        return self._weights_receiver.release()

    def weights_close(self) -> None:
        self._weights_receiver.close()

    def _weights_counted(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            yield name, tensor
            self._weights_loaded_bytes += tensor.nbytes
            self._weights_report()

    def _weights_report(self) -> None:
        self._weights_progress[self.rank] = self._weights_loaded_bytes + self._weights_receiver.progress

    def _weights_take(self, at_least: Version) -> None:
        receiver = self._weights_receiver
        begin = time.monotonic()
        try:
            version, self._weights_tensors = receiver.take(at_least, self._weights_deadline_s)
            taken = time.monotonic()
            checksum = receiver.receipt()
        except Exception as error:  # travels to the engine, which raises it in the generator
            self._weights_tensors = ()
            self._weights_outcome = {"error": f"{type(error).__name__}: {error}"}
            return

        seconds = {"wait_s": taken - begin, "copy_s": time.monotonic() - taken}
        self._weights_outcome = {"timeline": version.timeline, "n": version.n, "checksum": checksum, **seconds}


def load_all(model_runner: Any, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load every parameter of the model in place.

    Where layers compute with something that is made of their parameters, vLLM reloads layer by layer: `reload_weights`
    restores each layer's checkpoint shape, loads it and repeats the post-processing. About parameters that got no
    weights vLLM only warns. Here that is an error, because they would keep an older version.
    """
    model = model_runner.get_model()
    expected = {name for name, _ in model.named_parameters()}  # packed names: qkv_proj, gate_up_proj
    pairs = _whole_on_device(model, model_runner.device, pairs)
    if in_place.are_weights_as_loaded(model_runner):
        loaded = in_place.write_into_parameters(model_runner, pairs)
    else:
        loaded = _reload(model_runner, model, pairs)
    if missing := sorted(expected - loaded):
        raise RuntimeError(f"the published weights lack {len(missing)} parameters of the model: {missing[:5]}")


def _whole_on_device(
    model: Any, device: torch.device, pairs: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of which a tensor-parallel rank takes columns come to the device as they are. Else one thread of the host
    would put their rows together."""
    layers = {name for name, each in model.named_modules() if isinstance(each, RowParallelLinear) and each.tp_size > 1}
    return ((name, each.to(device) if name.removesuffix(".weight") in layers else each) for name, each in pairs)


def _reload(model_runner: Any, model: Any, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Layer by layer; the names of what was loaded."""
    loaded: set[str] = set()
    load_weights = model.load_weights

    def recording(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded.update(load_weights(weights))
        return loaded

    model.load_weights = recording
    if model_runner.device.type == "cpu":
        unpacked.forget_packed_experts(model)
    try:
        model_runner.reload_weights(weights_iterator=pairs)
    finally:
        del model.load_weights
    return loaded


def with_head(pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a tied model, with the embedding once more as the head unless the head is among them."""
    embedding: torch.Tensor | None = None
    for name, tensor in pairs:
        if name == _HEAD:
            embedding = None
            yield name, tensor
            yield from pairs
            return
        if name == _EMBEDDING:
            embedding = tensor
        yield name, tensor
    if embedding is not None:
        yield _HEAD, embedding


unpacked.heed_environment()
experts.heed_expert_map()
make_room_for_the_aborted()
prompt_logprob.CHUNK_SIZE = PROBED_AT_ONCE
expect_no_names()
die_with_owner()
