"""`fresco push RUN OWNER/NAME`: the trained model to the hub, by the hub's own client.

Only what `model/` holds goes there: weights, tokenizer, chat template, generation config and model card. Whose account
it is, `hf auth login` or HF_TOKEN say.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import huggingface_hub

from launch.terminal import say
from rl.config.schema import ConfigError
from rl.store.digests import DIGESTS, damage


def push(arguments: argparse.Namespace) -> int:
    """Returns 0. Raises ConfigError for what is no whole model, and for what the hub refuses."""
    folder = _model_of(arguments.run)
    name: str = arguments.name
    told = f"Model of {arguments.run.resolve().name}"

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ConfigError(f"{name!r} is no OWNER/NAME of the hub")

    hub = huggingface_hub.HfApi()
    try:
        hub.create_repo(name, private=arguments.private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message=told, ignore_patterns=[DIGESTS])
    except Exception as error:  # the network's are of its client's own types
        reason = " ".join(str(error).split())[:300]
        fix = "`hf auth login` says who you are"
        raise ConfigError(f"{name!r}: the hub did not take it ({type(error).__name__}: {reason}); {fix}") from None

    say(f"{folder} is now https://huggingface.co/{name}")
    return 0


def _model_of(given: Path) -> Path:
    """A run's `model/`, or a model folder itself."""
    folder = given / "model" if (given / "run.json").exists() else given
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"{str(given)!r} has no model: a run writes its folder `model` at its end; name a run or a model's folder"
        )
    if (folder / DIGESTS).exists() and (changed := damage(folder, folder / DIGESTS)):
        raise ConfigError(f"{changed} was damaged or removed since the model was exported; it is not pushed")
    return folder
