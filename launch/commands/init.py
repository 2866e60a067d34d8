"""`fresco init`: a folder with a recipe, a reward, rows and a test, from which a user goes on."""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml

from rl.config.schema import ConfigError

_STARTER = Path(__file__).parents[1] / "starter"
_ROWS = 1000
_TINY = """\
device: cpu
model:
  path: tiny # a made model of a million parameters; put yours in its place: a folder or a hub name, as Qwen/Qwen3-0.6B
  dtype: float32
  tiny: {hidden_size: 128, layers: 2, heads: 4, kv_heads: 2, head_dim: 32, ffn_size: 384}
  warm_start: {demonstrations: 900, steps: 60, batch: 16} # for the made model only: it knows nothing else
sampling:
  max_tokens: 12
generator:
  dtype: float32
  max_model_len: 128
  max_num_seqs: 128
learner:
  lr: 3.0e-4
  max_tokens_per_pack: 2048"""
_OWN = """\
model:
  path: {model}
sampling:
  max_tokens: 256
generator:
  max_model_len: 1024
  options: {{kv_cache_bytes: 1073741824}}
learner:
  lr: 1.0e-6
  max_tokens_per_pack: 8192"""


def init(arguments: argparse.Namespace) -> int:
    """Raises ConfigError where something stands in the folder already."""
    folder: Path = arguments.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{str(folder)!r} is no empty folder, and nothing in it is overwritten; name a new one")
    folder.mkdir(parents=True, exist_ok=True)

    for name in ("reward.py", "test_reward.py"):
        shutil.copyfile(_STARTER / name, folder / name)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in _rows()))
    (folder / "recipe.yaml").write_text(_recipe(folder, arguments.model))

    here = shlex.quote(str(folder))
    recipe = shlex.quote(str(folder / "recipe.yaml"))
    shown = shlex.quote(str(folder / "runs" / _name(folder)))
    print(f"{folder} has recipe.yaml, reward.py, rows.jsonl and test_reward.py. Next, in this order:")
    print(f"  python -m pytest {here}    # the reward pays for what is right")
    print(f"  fresco run {recipe} --dry-run    # what will run, and whether it fits")
    print(f"  fresco run {recipe}")
    print(f"  fresco show {shown} --failed    # what was not solved")
    return 0


def _recipe(folder: Path, model: str | None) -> str:
    """A model's folder is found from wherever the recipe is used."""
    text = (_STARTER / "recipe.yaml").read_text()
    path = str(Path(model).resolve()) if model and Path(model).exists() else model
    own = _TINY if path is None else _OWN.format(model=yaml.safe_dump(path).split("\n")[0])
    return text.replace("NAME", _name(folder), 1).replace("MODEL", own, 1)


def _name(folder: Path) -> str:
    """Of its runs."""
    return re.sub(r"[^\w.-]", "_", folder.resolve().name)


def _rows() -> Iterator[dict[str, str]]:
    draw = random.Random(0)
    seen: set[str] = set()
    while len(seen) < _ROWS:
        digits = [str(draw.randrange(10)) for _ in range(draw.randint(3, 4))]
        row = {"prompt": f"Sort, and say nothing else: {' '.join(digits)}", "answer": " ".join(sorted(digits))}
        if row["prompt"] not in seen:
            seen.add(row["prompt"])
            yield row
