"""Modules that stand elsewhere now: an import by the old name fails in one line that has the new one.

A module of a user's own may import `rl.core.columns`, which was its name until the folders were divided anew.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

MOVED = dict(line.split(": ") for line in Path(__file__).with_suffix(".yaml").read_text().splitlines())
"""Old name to new one."""

_EMPTIED = {"rl.core", "rollout.broker.policies"}
"""Packages that are gone: found empty, so that the module that is looked for in them is the one that is named."""


class _Moved(MetaPathFinder):
    """A finder of modules that is asked last, and so only for what no folder has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _EMPTIED:
            return ModuleSpec(fullname, None, is_package=True)
        if fullname in MOVED:
            raise ImportError(f"{fullname} is now {MOVED[fullname]} (all that moved: CHANGELOG.md)", name=fullname)
        return None


def name_what_moved() -> None:
    """Name what moved from now on, in this process."""
    sys.meta_path.append(_Moved())
