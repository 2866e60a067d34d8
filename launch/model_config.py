"""What a model says of itself in its `config.json`: of a folder, of the hub's cache, or of the hub.

A dry run asks the hub for this one file and keeps nothing: it says what a run would be refused for, and what it needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils._headers import build_hf_headers

from launch.prepare import config_folder
from launch.refusing import Refusing
from rl.config.schema import Config, ConfigError
from rl.models.families import read_config

_DEADLINE_S = 5.0
_NONE_SUCH = (401, 403, 404)


def model_config(config: Config, *, fetch: bool, unchecked: list[str]) -> Mapping[str, Any] | None:
    """None for a model that a run makes, and where nobody says: then `unchecked` says why.

    fetch: into the hub's cache, as a run does; else the hub is asked. Raises ConfigError for a name that nothing has.
    """
    path = config.model.path
    folder = config_folder(config, fetch=fetch)
    if folder is None:
        used = config.generator.engine == "vllm" or config.learner.kind != "simulated"
        asked = used and not fetch and path.count("/") == 1 and not Path(path).exists()
        return _asked(path, unchecked) if asked else None
    with Refusing(f"model.path={path!r}"):
        return read_config(folder)


def _asked(name: str, unchecked: list[str]) -> Mapping[str, Any] | None:
    reason = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            request = Request(hf_hub_url(name, "config.json"), headers=build_hf_headers())
            with urlopen(request, timeout=_DEADLINE_S) as answer:
                told: Mapping[str, Any] = json.load(answer)
                return told

        except HTTPError as error:
            if error.code in _NONE_SUCH:
                raise ConfigError(
                    f"model.path={name!r}: the hub shows no such model ({error.code}); correct the name, or give a "
                    "token that may read it (HF_TOKEN)"
                ) from None
            reason = f"it answers {error.code}"
        except (OSError, ValueError) as error:
            reason = str(getattr(error, "reason", error))

    unchecked.append(
        f"model.path={name!r}, neither its family nor its memory: the hub cannot be reached ({reason}); give a folder "
        "with its config.json"
    )
    return None
