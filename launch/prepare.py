"""What has to be known before processes start and needs torch: the model's folder and size, the loss's options.

Runs in a short-lived child (`python -m launch.prepare CONFIG.json`), so that the supervisor never imports
torch. Prints progress on stderr and one JSON line on stdout: {"folder", "weight_bytes"} or {"error"}.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rl.core.config import Config, ConfigError
from rl.core.process import die_with_parent


@dataclass(frozen=True)
class Prepared:
    folder: Path | None  # local model folder; None where nothing needs a model
    weight_bytes: int  # one copy of the weights in the engine's dtype


def prepare(config: Config, *, resolve_model: bool = True) -> Prepared:
    """Resolve the model and validate the algorithm. Raises ConfigError with one line."""
    if config.learner.kind == "simulated" and config.generator.engine == "simulated":
        return Prepared(None, config.learner.simulated_weight_bytes)

    child = subprocess.run(
        [sys.executable, "-m", "launch.prepare", "1" if resolve_model else "0"],
        input=config.model_dump_json().encode(),
        stdout=subprocess.PIPE,
        env=os.environ | {"FRESCO_PARENT_PID": str(os.getpid())},
    )
    try:
        answer = json.loads(child.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise ConfigError(f"preparing the model failed (exit code {child.returncode}); see the lines above") from None

    if "error" in answer:
        raise ConfigError(answer["error"])
    return Prepared(Path(answer["folder"]) if answer["folder"] else None, answer["weight_bytes"])


def _model_folder(config: Config) -> Path:
    if not config.model.warm_start.demonstrations:
        return _base_folder(config)
    from launch.warm_start.imitation import warm_started

    return warm_started(config, None if config.model.path == "tiny" else _base_folder(config))


def _base_folder(config: Config) -> Path:
    path = config.model.path
    if path == "tiny":
        from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model

        return ensure_tiny_model(TinyRecipe.model_validate(config.model.tiny))

    folder = Path(path)
    if folder.exists():
        if not (folder / "config.json").exists():
            raise ConfigError(f"model.path={path!r}: no config.json in this folder")
        return folder.resolve()

    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError(f"model.path={path!r}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]))
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.path={path!r}: neither a folder nor reachable on the hub ({reason})") from None


def _weight_bytes(folder: Path, dtype: str) -> int:
    """Elements of the checkpoint's tensors (and of the head that engines of tied models get) times the element size."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            sizes |= {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not sizes:
        raise ConfigError(f"model.path: no safetensors file in {str(folder)!r}")

    sizes.setdefault("lm_head.weight", sizes.get("model.embed_tokens.weight", 0))
    return sum(sizes.values()) * (4 if dtype == "float32" else 2)


def _check_algorithm(config: Config) -> None:
    from rl.learner.algorithm import make_algorithm

    try:
        make_algorithm(config)
    except ValueError as error:
        raise ConfigError(f"algo: {error}") from None


def _main() -> None:
    die_with_parent()
    config = Config.model_validate_json(sys.stdin.read())
    answer: dict[str, object] = {"folder": None, "weight_bytes": 0}
    try:
        _check_algorithm(config)
        if sys.argv[1] == "1":
            folder = _model_folder(config)
            answer = {"folder": str(folder), "weight_bytes": _weight_bytes(folder, config.generator.dtype)}
    except ConfigError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
