"""A weight reader over plain files, mixed into the worker: tests can tear a read, hold a load, leave a tensor out.

The writer's side is a `weights.<n>.safetensors` in the run folder, renamed into place.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load

from rl.weights import Manifest, WeightReader
from rl.wire.messages import Version
from rollout.generator.engines.vllm_internals import are_weights_as_loaded
from rollout.generator.engines.vllm_worker import LoadsWeights


class FileReader:
    progress = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest((), 0)  # the files describe themselves

    def open(self, deadline_s: float) -> None:
        pass

    def lease(self, at_least: Version, deadline_s: float) -> tuple[Version, memoryview]:
        deadline = time.monotonic() + deadline_s
        while True:
            files = {int(path.name.split(".")[1]): path for path in self.folder.glob("weights.*.safetensors")}
            newest = max(files)
            if newest >= at_least.n:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"no weights {at_least}")
            time.sleep(0.01)
        self.bytes = files[newest].read_bytes()
        return Version(at_least.timeline, newest), memoryview(self.bytes)

    def checksum(self) -> int:
        return zlib.crc32(self.bytes)

    def release(self) -> bool:
        """False once for every `torn` file: the bytes were overwritten during the load."""
        torn = self.folder / "torn"
        if torn.exists():
            torn.unlink()
            return False
        return True

    def close(self) -> None:
        (self.folder / "closed").touch()


class FileWeights(LoadsWeights):
    def writes_into_parameters(self) -> bool:
        return are_weights_as_loaded(self.model_runner)

    def _weights_make_reader(self, name: str, incarnation: int) -> WeightReader:
        return cast(WeightReader, FileReader(self._weights_run.folder))

    def _weights_pairs(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Not while there is a file `hold`."""
        while (self._weights_run.folder / "hold").exists():
            time.sleep(0.01)
        return iter(load(bytes(self._weights_view)).items())
