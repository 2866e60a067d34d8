"""How long a checkpoint stops training: one that is written at once, and one that is written while steps go on.

python -m experiments.bench checkpoints [--hidden 512] [--layers 8] [--rounds 8] [--out FILE.json]

One rank, float32, on a CPU. `stall` is the time until the next step may begin; `written` that until the checkpoint is
there. A step beside one that is being written is compared with a step by itself.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

from experiments.bench._measuring import in_turns, parser_of, random_batch_part, write
from experiments.bench._ratios import Idle, provenance
from rl.config.schema import load_config
from rl.learner import checkpoint
from rl.learner.trainer import Trainer
from rl.store.checkpoint_folder import Meta

_VOCAB = 8192
_GROUPS, _SIZE = 2, 4
_KINDS = ("blocking", "background")
_DEADLINE_S = 300.0


def main(argv: list[str]) -> None:
    parser = parser_of("checkpoints", __doc__)
    for name, default in {"hidden": 512, "layers": 8, "rounds": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(argv)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fresco-bench-") as name, Idle() as idle:
        trainer = _trainer(Path(name), options.hidden, options.layers)
        seconds = _measure(trainer, Path(name) / "checkpoints", options.rounds)
    dist.destroy_process_group()

    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    for kind, value in medians.items():
        print(f"{kind}: {value:.3f} s")
    held = sum(each.numel() * each.element_size() for _, each in trainer.weights.trainable())
    result = {"seconds": medians, "spread_s": {kind: [min(each), max(each)] for kind, each in seconds.items()}}
    write(options.out, {"bytes": 3 * held, "rounds": options.rounds} | result | provenance(idle))


def _trainer(folder: Path, hidden: int, layers: int) -> Trainer:
    config = Qwen3Config(
        vocab_size=_VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=3 * hidden,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    settings = ["model.dtype=float32", f"rollout.groups_per_batch={_GROUPS}", f"rollout.group_size={_SIZE}"]
    return Trainer(load_config(None, settings), folder / "model", last_step=1000, mesh=init_device_mesh("cpu", (1,)))


def _measure(trainer: Trainer, folder: Path, rounds: int) -> dict[str, list[float]]:
    background = checkpoint.Background(folder, _DEADLINE_S)
    steps = itertools.count(1)
    seconds: dict[str, list[float]] = {f"{kind} stall": [] for kind in _KINDS}
    seconds |= {"background written": [], "step": [], "step beside it": []}

    def noted(name: str, number: int, begin: float) -> None:
        if number >= 0:
            seconds[name].append(time.perf_counter() - begin)

    for number, kind in in_turns(_KINDS, rounds, warm_up=1):
        begin = time.perf_counter()
        _step(trainer)
        noted("step", number, begin)

        meta = Meta(next(steps), 0, 1)
        begin = time.perf_counter()
        if kind == "blocking":
            checkpoint.save(folder, trainer.trained(), meta, b"", keep=1)
            noted("blocking stall", number, begin)
            continue

        background.save(trainer.trained(), meta, b"", keep=1)
        noted("background stall", number, begin)
        stepped = time.perf_counter()
        _step(trainer)
        noted("step beside it", number, stepped)
        background.wait()
        noted("background written", number, begin)
    return seconds


def _step(trainer: Trainer) -> None:
    batch_part = random_batch_part(_GROUPS, _SIZE, 32, (64, 96), _VOCAB)
    for minibatch in trainer.minibatches(batch_part):
        trainer.update(minibatch, 0)
