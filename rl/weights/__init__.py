"""How the learner's weights reach the engines: `transport` has the two ends and their invariants, `updater` when."""

from __future__ import annotations

from rl.weights.layout import Manifest, TensorSpec, WeightsCorrupt, WeightsError
from rl.weights.transport import WeightReader, WeightWriter
from rl.wire.run import RunFile

__all__ = ["Manifest", "TensorSpec", "WeightReader", "WeightWriter", "WeightsCorrupt", "WeightsError"]
__all__ += ["make_reader", "make_writer"]


def make_writer(run: RunFile, rank: int, manifest: Manifest) -> WeightWriter:
    """The writing end of `weights.transport` for one learner rank."""
    if run.config.weights.transport == "shm":
        from rl.weights.shm import ShmWriter

        return ShmWriter(run, rank, manifest)
    from rl.weights.frames import FramesWriter

    return FramesWriter(run, rank, manifest)


def make_reader(run: RunFile, name: str, incarnation: int) -> WeightReader:
    """The reading end; `name` is unique among readers: `generator-0-1` is tensor-parallel rank 1 of generator 0."""
    if run.config.weights.transport == "shm":
        from rl.weights.shm import ShmReader

        return ShmReader(run, name, incarnation)
    from rl.weights.frames_reader import FramesReader

    return FramesReader(run, name, incarnation)
