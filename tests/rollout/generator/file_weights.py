"""A channel of plain files: tests can tear what is read, hold a load, leave a tensor out.

The sender's side is a `weights.<n>.safetensors` in the run folder, renamed into place.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load

from rl.weights.channel import Channel, Piece, Receiver, Sender
from rl.wire.messages import Version


class FileSender(Sender):
    """Tests put the files there."""

    def offer(self, n: int, pieces: Iterable[Piece]) -> None:
        raise NotImplementedError

    def announce(self, version: Version) -> None:
        raise NotImplementedError


class FileReceiver(Receiver):
    @property
    def folder(self) -> Path:
        return self.run.folder

    def take(self, at_least: Version, deadline_s: float) -> tuple[Version, Iterator[tuple[str, torch.Tensor]]]:
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
        return Version(at_least.timeline, newest), self._tensors()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Not while there is a file `hold`."""
        while (self.folder / "hold").exists():
            time.sleep(0.01)
        yield from load(self.bytes).items()

    def receipt(self) -> int:
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


FILES = Channel(FileSender, FileReceiver)
