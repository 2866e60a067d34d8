"""Small well-tested packages, pinned: where generated tasks come from. Fetched as source distributions with pip."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from envs.sandbox.base import last_line
from rl.store.made_once import cache_folder, made_once

_FETCH_DEADLINE_S = 300.0


class PackageError(ValueError):
    """A package that cannot be had; one line that says why."""


@dataclass(frozen=True)
class Package:
    """A source distribution, and where its sources and tests are in it."""

    name: str
    version: str
    sha256: str
    """The hash of the source distribution."""
    sources: tuple[str, ...]
    """Folders or files that may be mutated."""
    tests: tuple[str, ...]
    """Folders or files given to pytest."""
    python_path: tuple[str, ...] = (".",)
    archive: Path | None = None
    """A local source distribution instead of the index's."""

    @property
    def repo(self) -> str:
        return f"{self.name}-{self.version}"


# Name, version, sha256 of the source distribution, what may be mutated, its tests, what to import from.
_PINNED = """
toolz          1.0.0  2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02 toolz toolz/tests .
cachetools     8.0.0  5ed01bd676800d51f0025605e4fd8ad0891550513e7b0a4c3da478463764e5c3 src/cachetools tests src
inflection     0.5.1  1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417 inflection test_inflection.py .
boltons        26.2.0 d39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c boltons tests .
tabulate       0.8.10 6c57f3f3dd7ac2782770155f3adb2db0b1a269637e42f27599925e64b114f519 tabulate.py test .
more-itertools 11.2.1 cbf08fd0af284dc69718b9b76a8e6203df624d70209ea511e4219d350c856f63 more_itertools tests .
"""
PACKAGES = {
    name: Package(name, version, sha256, (sources,), (tests,), (python_path,))
    for name, version, sha256, sources, tests, python_path in map(str.split, _PINNED.strip().splitlines())
}


def default_cache() -> Path:
    """`$FRESCO_CACHE/swe`, else ~/.cache/fresco/swe."""
    return cache_folder() / "swe"


def package_tree(package: Package, cache: Path | None = None) -> Path:
    """The unpacked source distribution, fetched once. Raises PackageError."""
    folder = (cache or default_cache()) / "packages" / f"{package.repo}-{package.sha256[:8]}"

    def make(draft: Path) -> None:
        archive = package.archive or _download(package, draft.parent)
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != package.sha256:
            raise PackageError(f"{package.repo}: sha256 of {archive.name} is {digest}, not {package.sha256}")
        _unpack(archive, draft.parent / "tree").rename(draft)

    return made_once(folder, make)


def open_to_all(tree: Path) -> None:
    """Let a sandbox's user, who owns nothing of a template, change its own copy of it."""
    for folder, _, files in os.walk(tree):
        os.chmod(folder, 0o777)
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o777 if path.stat().st_mode & 0o100 else 0o666)


def _download(package: Package, folder: Path) -> Path:
    pin = folder / "pin.txt"
    pin.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    options = "--quiet --no-deps --no-binary :all: --disable-pip-version-check --require-hashes"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "-r", str(pin), "-d", str(folder)]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=_FETCH_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise PackageError(f"{package.repo}: pip did not fetch it within {_FETCH_DEADLINE_S:.0f} s") from None

    archives = list(folder.glob("*.tar.gz"))
    if not archives:
        raise PackageError(f"{package.repo}: pip cannot fetch its source distribution: {last_line(ended.stderr)}")
    return archives[0]


def _is_harmless(member: tarfile.TarInfo) -> bool:
    """Files and folders below the target, made ours. (Debian's Python 3.11.2 lacks the filters of `extractall`.)"""
    path = PurePosixPath(member.name)
    member.uid = os.getuid()
    member.gid = os.getgid()
    member.uname = ""
    member.gname = ""
    return (member.isfile() or member.isdir()) and not path.is_absolute() and ".." not in path.parts


def _unpack(archive: Path, target: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(target, [member for member in tar if _is_harmless(member)])
    (top,) = target.iterdir()
    shutil.rmtree(top / ".git", ignore_errors=True)
    open_to_all(top)
    return top
