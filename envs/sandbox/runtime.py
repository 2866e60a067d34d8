"""What a sandbox sees of the host: system libraries and tools, a Python, and the test harness. It sees nothing else.

Inside, the interpreter stands at its path on the host, because a relocated Python would look for its libraries there.
`HARNESS` holds pytest with what it needs, copied from the environment that runs Fresco, and the families' scripts.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

HARNESS = "/opt/fresco"
USER = "agent"
HOME = f"/home/{USER}"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32")
_LIBRARIES = ("/usr/lib", "/usr/local/lib")
_PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "Pygments")
HARNESS_FOLDERS = sorted(Path(__file__).parents[1].glob("*/harness"))
"""Folders on the host: the scripts that a family of environments runs inside its sandboxes lie in its folder
`harness`."""
UID = 1000
"""The user id inside a sandbox; outside, each slot has its own."""


@dataclass(frozen=True)
class Runtime:
    """Host folders by their path inside, and links; all read-only."""

    folders: tuple[tuple[Path, str], ...]
    links: tuple[tuple[str, str], ...]
    """(path, target)"""
    python: str
    hidden: tuple[str, ...] = ()
    """Folders inside that appear empty: packages which happen to be on the host."""

    def environment(self) -> dict[str, str]:
        """The environment of every command; nothing is inherited from the host."""
        folder = str(Path(self.python).parent)
        path = ":".join(dict.fromkeys([folder, "/usr/local/bin", "/usr/bin", "/bin"]))
        identity = {"PATH": path, "HOME": HOME, "USER": USER, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
        python = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}

        git = {
            "PAGER": "cat",
            "GIT_PAGER": "cat",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
        }
        return identity | python | git


@functools.cache
def default_runtime() -> Runtime:
    """The host's system folders and the Python that runs Fresco."""
    folders: list[tuple[Path, str]] = []
    links: list[tuple[str, str]] = []
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            links.append((name, os.readlink(path)))
        elif path.is_dir():
            folders.append((path, name))

    base = Path(sys.base_prefix).resolve()
    if not base.is_relative_to("/usr"):
        folders.append((base, str(base)))

    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    installed = [base / "lib" / version / "site-packages"]
    installed += [folder for library in _LIBRARIES for folder in sorted(Path(library).glob("python3*/*-packages"))]
    hidden = tuple(str(folder) for folder in dict.fromkeys(installed) if folder.is_dir())
    return Runtime(tuple(folders), tuple(links), str(base / "bin" / version), hidden)


def build_root(runtime: Runtime, root: Path) -> list[tuple[Path, Path]]:
    """Lay out the root folder that all sandboxes share; the (source, target) bind mounts that it still needs."""
    for name in ("proc", "dev", "tmp", "etc", "workspace", "home/agent", "opt/fresco", "run", "var/tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, leads_to in runtime.links:
        (root / name.lstrip("/")).symlink_to(leads_to)

    binds = []
    for source, inside in runtime.folders:
        target = root / inside.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        binds.append((source, target))
    binds += [(root / "run", root / name.lstrip("/")) for name in runtime.hidden]

    _write_etc(root / "etc")
    _write_harness(root / HARNESS.lstrip("/"))
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())]:
        folder.chmod(0o755)
    return binds


def _write_etc(etc: Path) -> None:
    (etc / "passwd").write_text(f"root:x:0:0::/:/bin/sh\n{USER}:x:{UID}:{UID}::{HOME}:/bin/sh\n")
    (etc / "group").write_text(f"root:x:0:\n{USER}:x:{UID}:\n")
    (etc / "hosts").write_text("127.0.0.1 localhost\n")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    cache = Path("/etc/ld.so.cache")
    if cache.exists():
        shutil.copyfile(cache, etc / "ld.so.cache")


def _write_harness(folder: Path) -> None:
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    for package in _PACKAGES:
        for file in importlib.metadata.files(package) or []:
            source = Path(str(file.locate()))
            if file.parts[0] != ".." and source.exists():
                target = site / file
                target.parent.mkdir(parents=True, exist_ok=True)
                # With its time, so that the compiled files beside it stay valid.
                shutil.copy2(source, target)

    for scripts in HARNESS_FOLDERS:
        for script in scripts.glob("*.py"):
            shutil.copyfile(script, folder / script.name)
