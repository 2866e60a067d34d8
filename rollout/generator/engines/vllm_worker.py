"""What runs inside vLLM's worker processes: the weight reader of each tensor-parallel rank.

`LoadsWeights` is mixed into vLLM's worker class (`worker_extension_cls`); its methods are called through
`collective_rpc`, once per rank, on the thread that also steps the engine. They carry names and numbers
only: every rank opens its own reader and takes the bytes from the transport.

A load has two parts, so that generation pauses for the second one only:

    weights_fetch   starts a thread that leases the newest version and then checksums it
    weights_fetched polls that thread for the lease
    weights_load    copies the leased bytes into the model, while the checksum goes on beside it
    weights_drop    gives a lease back without loading it

A load takes as long as it takes: nothing here ends it but a reader that stands still. How far it has come is written
into a file of one number for each rank, because a rank that loads answers no call.

Importing this module sets how linear layers keep their weights, which has to be known before a model is built. In a
child of a generator it also ties that child to the generator's life: vLLM leaves its engine process running when the
process that owns it is killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from rl.learner.export import tensors
from rl.learner.page_lock import PageLock
from rl.weights import WeightReader, make_reader
from rl.wire.messages import Version
from rl.wire.run import RunFile
from rollout.generator.engines.owner import die_with_owner
from rollout.generator.engines.vllm_internals import are_weights_as_loaded, forget_packed_experts, heed_environment

_REPORT_S = 0.1
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


class LoadsWeights:
    """Mixed into vLLM's worker: `model_runner`, `rank` and `vllm_config` are the worker's."""

    model_runner: Any
    rank: int

    def weights_open(self, run_folder: str, index: int, incarnation: int, untied: bool, progress: str) -> None:
        """Before any other call. `untied`: the engine gave a tied model its own head; `progress`: the file for it."""
        self._weights_untied = untied
        self._weights_progress = np.memmap(progress, np.uint64, "r+")
        self._weights_loaded_bytes = 0
        self._weights_run = RunFile.load(run_folder)
        self._weights_reader = self._weights_make_reader(f"generator-{index}-{self.rank}", incarnation)
        self._weights_page_lock = PageLock(self.model_runner.device)
        self._weights_opened = False  # the first fetch opens it: engine and learner start side by side

    def weights_fetch(self, timeline: int, n: int) -> None:
        """Begin to lease a version not older than (timeline, n)."""
        self._weights_outcome: dict[str, Any] = {}
        self._weights_checked: dict[str, Any] = {}
        self._weights_thread = threading.Thread(
            target=self._weights_lease, args=(Version(timeline, n),), name="weights", daemon=True
        )
        self._weights_thread.start()

    def weights_fetched(self, addresses: dict[str, str]) -> dict[str, Any]:
        """Empty while the lease is awaited; then its version and the seconds waited, or `error`."""
        self._weights_run.addresses.give(addresses)
        self._weights_report()
        return self._weights_outcome

    def weights_load(self) -> dict[str, Any]:
        """Load the leased version. `intact` is false if its bytes changed meanwhile: fetch again, load again."""
        begin = time.monotonic()
        pairs = self._weights_pairs()
        if self._weights_untied:
            pairs = with_head(pairs)
        try:
            load_all(self.model_runner, self._weights_counted(pairs))
        finally:
            checked, intact = self._weights_release()
        return {"intact": intact, "load_s": time.monotonic() - begin, **checked}

    def weights_drop(self) -> None:
        self._weights_release()

    def weights_close(self) -> None:
        self._weights_page_lock.close()
        self._weights_reader.close()

    def _weights_make_reader(self, name: str, incarnation: int) -> WeightReader:
        return make_reader(self._weights_run, name, incarnation)

    def _weights_pairs(self) -> Iterable[tuple[str, torch.Tensor]]:
        return tensors(self._weights_reader.manifest, self._weights_view)

    def _weights_counted(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            yield name, tensor
            self._weights_loaded_bytes += tensor.nbytes
            self._weights_report()

    def _weights_report(self) -> None:
        self._weights_progress[self.rank] = self._weights_loaded_bytes + self._weights_reader.progress

    def _weights_lease(self, at_least: Version) -> None:
        begin = time.monotonic()
        deadline_s = self._weights_run.config.weights.deadline_s
        try:
            if not self._weights_opened:
                self._weights_reader.open(deadline_s)
                self._weights_opened = True
            version, self._weights_view = self._weights_reader.lease(at_least, deadline_s)
            self._weights_page_lock.add(self._weights_view)
        except Exception as error:  # travels to the engine, which raises it in the generator
            self._weights_outcome = {"error": f"{type(error).__name__}: {error}"}
            return

        leased = time.monotonic()
        self._weights_outcome = {"timeline": version.timeline, "n": version.n, "wait_s": leased - begin}
        try:
            self._weights_checked = {"checksum": self._weights_reader.checksum(), "copy_s": time.monotonic() - leased}
        except Exception as error:
            self._weights_checked = {"error": f"{type(error).__name__}: {error}"}

    def _weights_release(self) -> tuple[dict[str, Any], bool]:
        """Checksum (or `error`) of the leased bytes, and whether they stayed as they were."""
        while self._weights_thread.is_alive():
            self._weights_thread.join(_REPORT_S)
            self._weights_report()
        del self._weights_view  # no view may outlive the lease
        return self._weights_checked, self._weights_reader.release()


def load_all(model_runner: Any, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load every parameter of the model in place.

    Where layers compute with something that was made of their parameters, vLLM reloads layer by layer:
    `reload_weights` restores each layer's checkpoint shape, loads it and repeats the post-processing. vLLM only warns
    about parameters that got no weights; here that is an error, because they would keep an older version.
    """
    model = model_runner.get_model()
    expected = {name for name, _ in model.named_parameters()}  # packed names: qkv_proj, gate_up_proj
    if are_weights_as_loaded(model_runner):
        with torch.no_grad():
            loaded = model.load_weights(pairs)
        model_runner.reset_encoder_cache()
        model_runner.reset_mm_cache()
    else:
        loaded = _reload(model_runner, model, pairs)
    if missing := sorted(expected - loaded):
        raise RuntimeError(f"the published weights lack {len(missing)} parameters of the model: {missing[:5]}")


def _reload(model_runner: Any, model: Any, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Layer by layer; the names of what was loaded."""
    loaded: set[str] = set()
    load_weights = model.load_weights

    def recording(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded.update(load_weights(weights))
        return loaded

    model.load_weights = recording
    if model_runner.device.type == "cpu":
        forget_packed_experts(model)
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


heed_environment()
die_with_owner()
