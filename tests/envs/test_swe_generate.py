"""Mutations, and tasks made from a small real package: every gold patch passes, doing nothing does not."""

from __future__ import annotations

import ast
import hashlib
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.swe.checkout_cache import CheckoutCache
from envs.swe.evaluate import evaluate
from envs.swe.generate import baseline, failure_excerpt, generate, write_tasks
from envs.swe.mutate import mutations
from envs.swe.packages import PACKAGES, PackageError, package_tree
from envs.swe.tasks import load_tasks
from tests.envs.repositories import FILES, make_package

SOURCE = """# ünïcode before everything
LIMIT = 3 + 4


def f(a, b):
    if (a) < (b) and b != 3:  # comment
        return a, b
    text = "é" + str(a)
    return max(a + 1, b) if a is not None else [x for x in b if x in text]
"""
WANTED = """
if (a) <= (b) and
and b == 3:
(b) or b
if not ((a) < (b) and b != 3):
return b, a
max(a - 1, b)
max(b, a + 1)
a is None else
x not in text
b != 4
return None
"""
KINDS = "compare arithmetic boolean negate-if swap-return off-by-one argument-order"


def test_mutations_are_single_edits_that_parse() -> None:
    source = SOURCE.encode()
    found = list(mutations(source))
    assert {mutation.kind for mutation in found} == set(KINDS.split())

    texts = [mutation.apply(source).decode() for mutation in found]
    for wanted in WANTED.strip().splitlines():
        assert sum(wanted in text for text in texts) == 1, wanted

    for text in texts:
        ast.parse(text)
        assert text.startswith("# ünïcode before everything\nLIMIT = 3 + 4\n") and 'text = "é" + str(a)' in text
    assert {mutation.function for mutation in found} == {"f"} and len(set(texts)) == len(texts)


def test_flaky_tests_are_left_out(backend: BubblewrapBackend, tmp_path: Path) -> None:
    package = make_package(tmp_path)
    found = baseline(backend, package, package_tree(package, tmp_path / "cache"))
    assert found.flaky == ("tests/test_text.py::test_flaky",)
    assert set(found.stable) == {
        "tests/test_ledger.py::test_split[10-3-expected0]",
        "tests/test_ledger.py::test_split[9-3-expected1]",
        "tests/test_ledger.py::test_split[0-2-expected2]",
        "tests/test_ledger.py::test_split_needs_parts",
        "tests/test_ledger.py::test_balance",
        "tests/test_ledger.py::test_overdrawn",
        "tests/test_text.py::test_euros",
    }


def test_generated_tasks(backend: BubblewrapBackend, tmp_path: Path) -> None:
    package = make_package(tmp_path)
    checkouts = CheckoutCache(tmp_path / "cache", packages={"ledger": package})
    tasks = generate(backend, [package], 2, 0, checkouts, print)
    assert len({task.instance_id for task in tasks}) == 2
    write_tasks(tasks, tmp_path / "tasks.jsonl")
    for task in load_tasks(str(tmp_path / "tasks.jsonl")):
        assert task in tasks or task.gold_patch  # a reversed patch may order its lines differently
        checkout = checkouts.prepare(task, images=False)
        assert evaluate(backend, checkout, task, task.gold_patch).reward(partial=False) == 1
        assert (
            task.fail_to_pass[0] in task.problem_statement and "test_flaky" not in task.fail_to_pass + task.pass_to_pass
        )


def test_too_few_tasks_is_an_error(backend: BubblewrapBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = make_package(tmp_path)
    monkeypatch.setattr("envs.swe.generate.candidates", lambda *_: [])
    with pytest.raises(PackageError, match="0 tasks of the 1 wanted"):
        generate(backend, [package], 1, 0, CheckoutCache(tmp_path / "cache", packages={"ledger": package}), print)


def test_archives_are_pinned(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    with pytest.raises(PackageError, match=r"sha256 of ledger-1\.0\.tar\.gz is"):
        package_tree(replace(package, sha256="0" * 64), tmp_path / "cache")
    tree = package_tree(package, tmp_path / "cache")
    assert (tree / "ledger/text.py").read_text() == FILES["ledger/text.py"] and tree == package_tree(
        package, tmp_path / "cache"
    )
    assert all(len(each.sha256) == 64 for each in PACKAGES.values())


def test_archives_are_unpacked_without_links_and_below_their_folder(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    assert package.archive is not None
    hostile = tmp_path / "hostile.tar.gz"

    with tarfile.open(package.archive) as good, tarfile.open(hostile, "w:gz") as bad:
        for member in good:
            bad.addfile(member, good.extractfile(member) if member.isfile() else None)
        for name in ("../above", f"{tmp_path}/absolute", "ledger-1.0/../../beside"):
            bad.addfile(tarfile.TarInfo(name))
        for name, kind in (("soft", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("pipe", tarfile.FIFOTYPE)):
            link = tarfile.TarInfo(f"ledger-1.0/{name}")
            link.type = kind
            link.linkname = "/etc/passwd"
            bad.addfile(link)

    digest = hashlib.sha256(hostile.read_bytes()).hexdigest()
    before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
    tree = package_tree(replace(package, archive=hostile, sha256=digest), tmp_path / "cache")

    assert (tree / "ledger/text.py").read_text() == FILES["ledger/text.py"]
    assert all(path.is_dir() or path.is_file() for path in tree.rglob("*"))
    left = ("soft", "hard", "pipe", "beside")
    assert not [path for path in tree.rglob("*") if path.is_symlink() or path.name in left]
    assert {path for path in tmp_path.rglob("*") if "cache" not in path.parts} == before
    assert {path.name for path in (tmp_path / "cache").rglob("*")}.isdisjoint({"above", "beside", "absolute"})


def test_failure_excerpt() -> None:
    output = "header\n____ test_a ____\nfirst\n____ TestB.test_b[1] ____\nsecond\nE   assert 1\n==== short ====\nrest"
    assert failure_excerpt(output, "t.py::test_a") == "first"
    assert failure_excerpt(output, "t.py::TestB::test_b[1]") == "second\nE   assert 1"
    assert failure_excerpt(output, "t.py::test_c") == "(no output)"
