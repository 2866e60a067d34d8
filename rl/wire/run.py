"""The run file: what every process of a run is told, as one JSON file in the run's folder.

The supervisor resolves the configuration, writes the file and starts each process with
`--run <folder> --index <i> --incarnation <k>`; endpoints are derived here and nowhere else.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from rl.config.schema import Config, validate
from rl.wire.columns import register_configured

_ENDPOINTS = ("control", "tickets", "trajectories", "usage", "steps", "frontend", "backend", "weight_status")


class RunFile(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")
    config: Config
    run_id: str
    """8 hex digits, unique per start; names shared-memory files."""
    folder: Path
    """Absolute path of `<runs>/<name>`."""
    socket_folder: Path
    """Short folder for ipc sockets (paths are limited to 107 bytes)."""
    device: str
    """`cpu` or `cuda`, resolved."""
    timeline: int = 0
    start_step: int = 0
    model_folder: Path | None = None
    """Local folder of the model (config, weights, tokenizer.json, chat template); None when simulated."""
    train_tasks: int
    eval_tasks: int
    started_at: float
    """time.time() of the command."""

    @classmethod
    def load(cls, folder: str | Path) -> RunFile:
        """Raises ConfigError where a version with other fields wrote it."""
        tree = json.loads((Path(folder) / "run.json").read_text())
        run = cls.model_validate(tree | {"config": validate(tree["config"])})
        register_configured(run.config.algo.columns)
        return run

    def save(self) -> None:
        """Whoever looks meanwhile reads the one before, or none: never a part."""
        partial = self.folder / "run.json.part"
        partial.write_text(self.model_dump_json(indent=2))
        partial.replace(self.folder / "run.json")

    @property
    def learner_device(self) -> str:
        """Without a step to train the learner only hands out weights: it leaves the GPUs to the engines."""
        return self.device if self.config.steps else "cpu"

    def endpoint(self, name: str, index: int | None = None) -> str:
        """ZeroMQ endpoint of a named socket.

        Single sockets: control (supervisor ROUTER), tickets (broker ROUTER, environment servers),
        trajectories (broker PULL), usage (broker PULL, from the proxy), steps (broker ROUTER, learner rank 0),
        frontend (proxy ROUTER, environment servers), backend (proxy ROUTER, generators),
        weight_status (learner rank 0 ROUTER, generators), parsers (parsers ROUTER, environment servers).
        One per receiver: batches (rank i PULL), notices (generator i PULL), blobs (rank i's weight frames).
        """
        if self.config.network.transport == "ipc":
            return f"ipc://{self.socket_folder}/{name}" + ("" if index is None else f".{index}")
        if name in _ENDPOINTS:
            offset = _ENDPOINTS.index(name)
        else:
            ranks = self.config.learner.ranks
            parsers = 2 * ranks + self.config.generator.count
            first = {"batches": 0, "blobs": ranks, "notices": 2 * ranks, "parsers": parsers}[name]
            offset = len(_ENDPOINTS) + first + (index or 0)
        return f"tcp://{self.config.network.host}:{self.config.network.base_port + offset}"

    def endpoints(self) -> dict[str, str]:
        """All of them, for `--dry-run` and the port check."""
        found = {name: self.endpoint(name) for name in _ENDPOINTS}
        for rank in range(self.config.learner.ranks):
            found[f"batches.{rank}"] = self.endpoint("batches", rank)
            found[f"blobs.{rank}"] = self.endpoint("blobs", rank)
        for generator in range(self.config.generator.count):
            found[f"notices.{generator}"] = self.endpoint("notices", generator)
        if self.config.chat.vllm_names:
            found["parsers"] = self.endpoint("parsers")
        return found


@dataclass(frozen=True)
class ProcessContext:
    """Which process this is."""

    run: RunFile
    index: int
    incarnation: int


def context_from_command_line(argv: list[str] | None = None) -> ProcessContext:
    """Command line of every process that the supervisor starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True, help="folder with run.json")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--incarnation", type=int, default=0)
    arguments = parser.parse_args(argv)
    return ProcessContext(RunFile.load(arguments.run), arguments.index, arguments.incarnation)
