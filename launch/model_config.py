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

from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.utils._headers import build_hf_headers

from rl.config.schema import ConfigError
from rl.models.families import read_config

_DEADLINE_S = 5.0
_NONE_SUCH = (401, 403, 404)


def model_config(path: str, *, ask: bool, unchecked: list[str]) -> Mapping[str, Any] | None:
    """None for a model that a run makes, and where nobody says: then `unchecked` says why.

    ask: the hub, where its cache does not know. Raises ConfigError for a name that nothing can have.
    """
    if path == "tiny":
        return None
    try:
        folder = Path(path) if Path(path).exists() else _cached(path)
        if folder is not None:
            return read_config(folder) if (folder / "config.json").exists() else None  # a run says that it is missing
        return _asked(path, unchecked) if ask and path.count("/") == 1 else None
    except ValueError as error:
        raise ConfigError(f"model.path={path!r}: {error}") from None


def _cached(name: str) -> Path | None:
    """The folder of a hub model whose `config.json` was fetched before."""
    if name.count("/") != 1:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # the hub can have no such name
        raise ConfigError(f"model.path={name!r}: no such folder, and no hub name (owner/name)") from None
    return Path(found).parent if isinstance(found, str) else None


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
