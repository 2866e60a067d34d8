"""Resident memory of broker and proxy before any data, against the bound of 150 MB each.

python -m experiments.bench memory [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import psutil
import zmq

from experiments.bench.broker import temporary_run
from rl.core.messages import Heartbeat
from rl.core.sockets import open_socket, receive_from

BOUND_MB = 150
MODULES = {"broker": "rollout.broker.process", "proxy": "rollout.proxy.process"}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.bench memory", description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    measured: dict[str, float] = {}
    with temporary_run() as run, open_socket(zmq.ROUTER, run, "control", bind=True) as control:
        for role, module in MODULES.items():
            process = subprocess.Popen([sys.executable, "-m", module, "--run", str(run.folder)])
            try:
                while role not in measured:  # the second heartbeat comes from a running main loop
                    if not control.poll(30_000):
                        raise TimeoutError(f"the {role} sent no heartbeat for 30 s")
                    _peer, message = receive_from(control)
                    if isinstance(message, Heartbeat) and message.role == role and message.progress > 0:
                        measured[role] = psutil.Process(process.pid).memory_info().rss / 1e6
            finally:
                process.kill()
                process.wait()
    for role, megabytes in measured.items():
        print(f"{role}: {megabytes:.0f} MB resident, {megabytes / BOUND_MB:.2f} of the bound of {BOUND_MB} MB")
    if options.out:
        options.out.write_text(json.dumps({"resident_mb": measured, "bound_mb": BOUND_MB}, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
