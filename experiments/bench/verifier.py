"""The code verifier's overhead: a solution judged in its own sandbox against the same harness and tests run bare.

python -m experiments.bench verifier [--rounds 100] [--workers 4] [--out FILE.json]

Both start one Python that runs the reference solution of a generated problem against its tests; the difference is what
the sandbox and the verdict cost.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import envs.code
from envs.code.generate import generated_problem
from envs.code.verifier import CodeVerifier, job_of
from envs.sandbox import Limits, Template, make_backend
from envs.sandbox.runtime import default_runtime
from experiments.bench._measuring import alternate, milliseconds, parser_of, report, timed

BOUND_MS = 60.0
LIMITS = Limits(timeout_s=10, memory_bytes=512 << 20, processes=32, disk_bytes=64 << 20)
PROBLEMS = 32
HARNESS = Path(envs.code.__path__[0]) / "harness" / "run_code.py"


def main(argv: list[str]) -> None:
    parser = parser_of("verifier", __doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        backend = make_backend(slots=options.workers, threads=options.workers)
        try:
            verifier = CodeVerifier(backend, Template(Path(folder)), default_runtime().python, LIMITS, case_s=4.0)
            measured = measure(verifier, options.rounds, options.workers)
        finally:
            backend.close()

    report(measured, f"overhead_ms < {BOUND_MS:g}", options.out)


def measure(verifier: CodeVerifier, rounds: int, workers: int) -> dict[str, float]:
    """Milliseconds (medians; CPU: means), and verdicts a second with `workers` at once."""
    problems = [generated_problem("train", index, seed=0) for index in range(PROBLEMS)]
    turn = {name: itertools.cycle(problems) for name in ("bare", "judged")}

    def bare() -> None:
        problem = next(turn["bare"])
        job = json.dumps(job_of(problem, problem.solution, "key", verifier.case_s)).encode()
        subprocess.run([verifier.python, "-I", "-S", str(HARNESS)], input=job, stdout=subprocess.PIPE, check=True)

    def judged() -> None:
        problem = next(turn["judged"])
        assert verifier.verify(problem, problem.solution).solved

    judged()
    measured = milliseconds(alternate({"bare": bare, "judged": judged}, rounds))
    measured["overhead_ms"] = measured["judged_ms"] - measured["bare_ms"]

    with ThreadPoolExecutor(workers) as pool:
        everything = timed(
            lambda: list(pool.map(lambda _: verifier.verify(problems[0], problems[0].solution), range(rounds)))
        )
    return measured | {"verdicts_per_s": rounds / everything.wall_s}
