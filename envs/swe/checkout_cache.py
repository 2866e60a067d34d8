"""Templates on disk: the repository of a task as the agent gets it, committed as its only commit.

The history begins with the bug: there is no earlier commit from which to take the fix.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from envs.sandbox import Template
from envs.swe.checkout import GIT_ENVIRONMENT, Checkout
from envs.swe.packages import PACKAGES, Package, PackageError, default_cache, open_to_all, package_tree
from envs.swe.tasks import SweTask
from rl.store.made_once import digest, made_once

_GIT_DEADLINE_S = 120.0
# In the images of SWE-bench and those made like them.
_IMAGE_PYTHON = "/opt/miniconda3/envs/testbed/bin/python"


class CheckoutCache:
    """Makes templates on demand and keeps them; safe between processes.

    `repositories`: a folder with `INSTANCE_ID/` or `OWNER__REPO@COMMIT/` checkouts, for published tasks without images.
    """

    def __init__(
        self, cache: Path | None = None, repositories: Path | None = None, packages: dict[str, Package] | None = None
    ) -> None:
        self.cache = cache or default_cache()
        self._repositories = repositories
        self._packages = PACKAGES if packages is None else packages

    def prepare(self, task: SweTask, *, images: bool) -> Checkout:
        """Blocks while it makes the template. Raises PackageError where the repository cannot be had.

        An image is used as it is published; its repository is made ready as a sandbox opens (`open_checkout`).
        """
        if images and task.image and not task.package:
            template = Template(image=task.image, workspace="/testbed")
            return Checkout(template, "", python=_IMAGE_PYTHON, bug_patch=task.bug_patch)

        tree, python_path = self._source(task)
        # The last part says how the folder is laid out.
        key = digest(f"{tree}\0{task.bug_patch}\0work, commit")
        folder = self.cache / "templates" / f"{_plain(task.instance_id)}-{key}"
        made_once(folder, lambda draft: _make(tree, task, draft))
        return Checkout(Template(folder / "work"), (folder / "commit").read_text(), python_path)

    def _source(self, task: SweTask) -> tuple[Path, tuple[str, ...]]:
        """(the repository's folder, what to import from)"""
        package = self._packages.get(task.package)
        if package is not None:
            return package_tree(package, self.cache), package.python_path
        if task.package:
            raise PackageError(f"{task.instance_id}: package {task.package!r} is not pinned in envs/swe/packages.py")

        names = (task.instance_id, f"{task.repo.replace('/', '__')}@{task.base_commit}")
        for name in names:
            if self._repositories is not None and (self._repositories / name).is_dir():
                return self._repositories / name, (".", "src")
        raise PackageError(
            f"{task.instance_id}: needs a checkout {names[0]}/ or {names[1]}/ in env.options.repositories, "
            "or sandbox=docker to use the data set's image"
        )


def _make(tree: Path, task: SweTask, folder: Path) -> None:
    """`folder/work`: the repository; `folder/commit`: the name of its only commit."""
    work = folder / "work"
    shutil.copytree(tree, work, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    _git(work, "init", "--quiet")
    if task.bug_patch:
        _git(work, "apply", "--whitespace=nowarn", given=task.bug_patch)
    _git(work, "add", "--all", "--force")
    _git(work, "commit", "--quiet", "--message", "Initial commit")

    (folder / "commit").write_text(_git(work, "rev-parse", "HEAD").strip())
    open_to_all(work)


def _git(folder: Path, *arguments: str, given: str = "") -> str:
    ended = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        input=given.encode(),
        capture_output=True,
        timeout=_GIT_DEADLINE_S,
        env={"PATH": os.environ["PATH"], **GIT_ENVIRONMENT},
    )
    if ended.returncode != 0:
        lines = ended.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise PackageError(f"git {arguments[0]} in {folder.name}: {lines[0]}")
    return ended.stdout.decode()


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)[:80]
