"""Reward functions of a user's own, good and bad ones."""

from __future__ import annotations

import os
import time
from typing import Any


def length(response: str, row: dict[str, Any]) -> float:
    return min(1.0, len(response) / float(row["long"]))


def trap(response: str, row: dict[str, Any]) -> float | None:
    """Does what the response says."""
    if response == "no idea":
        return None
    if response == "hang":
        time.sleep(600)
    if response == "die":
        os._exit(1)
    if response == "raise":
        raise KeyError("no such key")
    return float("nan") if response == "nan" else 1.0


def always_raises(response: str, row: dict[str, Any]) -> float:
    return float(row["no such field"])
