"""Real tasks, made here: bugs injected into pinned packages, kept when the packages' own tests tell them.

    python -m envs.swe.generate --out tasks.jsonl [--count 48] [--seed 0] [--packages toolz cachetools]

A candidate becomes a task if it breaks at least one test and at most half of them. No earlier task of the same function
may break the same tests. Undoing it must pass all (verified through `evaluate`, like a submission), and doing nothing
must fix and break nothing. Flaky tests are left out: those whose outcomes differ between runs of the untouched package
under different hash seeds. The output is SWE-smith's schema (`patch` introduces the bug).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from envs.sandbox import WORKSPACE, Backend, Template, make_backend, write_file
from envs.swe.checkout import Checkout
from envs.swe.checkout_cache import CheckoutCache
from envs.swe.evaluate import TEST_LIMITS, TestRun, evaluate, run_tests
from envs.swe.harness.apply_diff import is_test_file
from envs.swe.mutate import Mutation, mutations
from envs.swe.packages import PACKAGES, Package, PackageError, package_tree
from envs.swe.tasks import SweTask, file_diff, load_tasks, to_row
from rl.store.made_once import digest, made_once, to_stderr

BASELINE_RUNS = 3
MAX_BROKEN_SHARE = 0.5
_EXCERPT_CHARS = 1500
# A mutant may be this much slower than the package as it was.
_SLOWER = 5
Log = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A mutation of a file of a package, which may become a task."""

    path: str
    mutation: Mutation
    mutant: bytes


@dataclass(frozen=True)
class Baseline:
    """What the tests of a package say of it as it is."""

    stable: tuple[str, ...]
    """Tests that pass in every run."""
    flaky: tuple[str, ...]
    """Tests that differ between runs."""
    timeout_s: float
    """The time of a mutant's run, which may never end by itself."""


def generated_tasks(
    backend: Backend, packages: Sequence[str], count: int, seed: int, checkouts: CheckoutCache
) -> list[SweTask]:
    """The same as `generate`, made once per choice of packages, count and seed, and kept in the cache folder.

    Blocks while they are made, a few seconds each; other processes wait. Raises PackageError.
    """
    pinned = [PACKAGES[name] for name in packages]
    key = json.dumps([[package.sha256 for package in pinned], count, seed])

    def make(draft: Path) -> None:
        to_stderr(f"swe: generating {count} tasks from {', '.join(packages)}")
        write_tasks(generate(backend, pinned, count, seed, checkouts, to_stderr), draft)

    return load_tasks(str(made_once(checkouts.cache / f"tasks-{digest(key)}.jsonl", make)))


def generate(
    backend: Backend, packages: Sequence[Package], count: int, seed: int, checkouts: CheckoutCache, log: Log
) -> list[SweTask]:
    """`count` tasks, taken from the packages in turns. Raises PackageError if they do not yield as many."""
    sources = [
        _tasks_of(backend, package, random.Random(f"{seed} {package.repo}"), checkouts, log) for package in packages
    ]
    tasks: list[SweTask] = []
    with ThreadPoolExecutor(len(sources)) as pool:
        while sources and len(tasks) < count:
            found = list(pool.map(lambda source: next(source, None), sources))
            tasks += [task for task in found if task is not None]
            sources = [source for source, task in zip(sources, found, strict=True) if task is not None]

    if len(tasks) < count:
        raise PackageError(f"{len(tasks)} tasks of the {count} wanted: name more packages")
    return tasks[:count]


def baseline(backend: Backend, package: Package, tree: Path) -> Baseline:
    """Runs of the untouched package under different hash seeds. Raises PackageError if a run does not count."""
    runs: list[TestRun] = []
    for seed in range(BASELINE_RUNS):
        run = _run(backend, package, tree, seed=seed)
        if run.why:
            raise PackageError(f"{package.repo}: {run.why}: {run.output[-300:]!r}")
        runs.append(run)

    names = list(dict.fromkeys(name for run in runs for name in run.outcomes))
    flaky = tuple(name for name in names if len({run.outcomes.get(name) for run in runs}) > 1)
    stable = tuple(name for name in names if name not in flaky and runs[0].outcomes[name] == "passed")
    return Baseline(stable, flaky, timeout_s=_SLOWER * max(run.seconds for run in runs) + 1)


def candidates(package: Package, tree: Path, rng: random.Random) -> list[Candidate]:
    """All mutations of the package's sources that still compile, in random order."""
    found = []
    for source in package.sources:
        top = tree / source
        for file in sorted(top.rglob("*.py")) if top.is_dir() else [top.with_suffix(".py")]:
            path = str(file.relative_to(tree))
            if not is_test_file(path):
                text = file.read_bytes()
                found += [Candidate(path, mutation, mutation.apply(text)) for mutation in mutations(text)]

    rng.shuffle(found)
    return found


def make_task(backend: Backend, package: Package, tree: Path, base: Baseline, candidate: Candidate) -> SweTask | None:
    """The task that a candidate makes; None if the tests do not tell the bug."""
    try:
        compile(candidate.mutant, candidate.path, "exec")
    except (SyntaxError, ValueError):
        return None

    run = _run(backend, package, tree, candidate, base.timeout_s)
    if run.why:
        return None
    broken = tuple(test for test in base.stable if run.outcomes.get(test) != "passed")
    if not broken or len(broken) > MAX_BROKEN_SHARE * len(base.stable):
        return None

    path = candidate.path
    original = (tree / path).read_bytes().decode()
    mutant = candidate.mutant.decode()
    mutation = candidate.mutation

    return SweTask(
        instance_id=f"{package.repo}.{mutation.kind}.{Path(path).stem}.{mutation.start}",
        repo=package.repo,
        schema="swe-smith",
        problem_statement=problem_statement(package, broken, run.output),
        fail_to_pass=broken,
        pass_to_pass=tuple(test for test in base.stable if test not in broken),
        gold_patch=file_diff(path, mutant, original),
        bug_patch=file_diff(path, original, mutant),
        package=package.name,
    )


def problem_statement(package: Package, fail_to_pass: Sequence[str], output: str) -> str:
    """What a user would report: which tests fail, and what pytest says of the first."""
    listed = "\n".join(f"- {test}" for test in fail_to_pass[:5])
    more = f"\n- and {len(fail_to_pass) - 5} more" if len(fail_to_pass) > 5 else ""
    excerpt = failure_excerpt(output, fail_to_pass[0])
    return (
        f"{package.name} {package.version} has a bug. These tests fail, and should pass:\n\n{listed}{more}\n\n"
        f"pytest says of the first:\n\n{excerpt}\n\nFind the cause in the package's sources and fix it there."
    )


def failure_excerpt(output: str, test: str) -> str:
    """The section of pytest's output on one test, cut to its end."""
    name = ".".join(test.split("::")[1:])
    section = []
    inside = False
    for line in output.splitlines():
        if line.startswith("____") or line.startswith("===="):
            if inside:
                break
            inside = line.strip("_ ") == name
        elif inside:
            section.append(line)
    return "\n".join(section)[-_EXCERPT_CHARS:].strip() or "(no output)"


def write_tasks(tasks: Sequence[SweTask], path: Path) -> None:
    """A file that `load_tasks` reads; it appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text("".join(f"{json.dumps(to_row(task))}\n" for task in tasks))
    draft.rename(path)


def _tasks_of(
    backend: Backend, package: Package, rng: random.Random, checkouts: CheckoutCache, log: Log
) -> Iterator[SweTask]:
    tree = package_tree(package, checkouts.cache)
    base = baseline(backend, package, tree)
    log(f"{package.repo}: {len(base.stable)} stable tests, {len(base.flaky)} flaky")

    seen: set[tuple[str, str, tuple[str, ...]]] = set()
    for candidate in candidates(package, tree, rng):
        task = make_task(backend, package, tree, base, candidate)
        if task is None:
            continue
        key = (candidate.path, candidate.mutation.function, task.fail_to_pass)
        if key in seen:
            continue

        checkout = checkouts.prepare(task, images=False)
        gold = evaluate(backend, checkout, task, task.gold_patch)
        nothing = evaluate(backend, checkout, task, "")
        unfixed = (nothing.fail_to_pass, nothing.pass_to_pass) == (0, 1) and not nothing.why
        if gold.resolved and unfixed:
            seen.add(key)
            log(f"{task.instance_id}: {len(task.fail_to_pass)} tests to fix")
            yield task


def _run(
    backend: Backend,
    package: Package,
    tree: Path,
    candidate: Candidate | None = None,
    timeout_s: float = TEST_LIMITS.timeout_s,
    seed: int = 0,
) -> TestRun:
    """The package's tests, with the candidate's bug in it if one is given."""
    sandbox = backend.open(Template(tree), replace(TEST_LIMITS, timeout_s=timeout_s))
    try:
        if candidate is not None and not write_file(sandbox, f"{WORKSPACE}/{candidate.path}", candidate.mutant):
            raise PackageError(f"{package.repo}: {candidate.path} cannot be written in a sandbox")
        return run_tests(sandbox, Checkout(Template(tree), "", package.python_path), package.tests, seed)
    finally:
        sandbox.close()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.swe.generate", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", nargs="+", choices=sorted(PACKAGES), default=list(PACKAGES))
    options = parser.parse_args(argv)

    begin = time.monotonic()
    backend = make_backend()
    try:
        packages = [PACKAGES[name] for name in options.packages]
        tasks = generate(backend, packages, options.count, options.seed, CheckoutCache(), to_stderr)
    finally:
        backend.close()

    write_tasks(tasks, options.out)
    print(f"{len(tasks)} tasks, every gold patch verified, in {time.monotonic() - begin:.0f} s: {options.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
