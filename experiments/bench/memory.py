"""Resident memory of broker and proxy before any data, against the bound of 150 MB each.

python -m experiments.bench memory [--out FILE.json]
"""

from __future__ import annotations

import subprocess
import sys

import psutil
import zmq

from experiments.bench._inbox import receive_from
from experiments.bench._measuring import parser_of, temporary_run, write
from rl.wire.messages import Heartbeat
from rl.wire.run import RunFile
from rl.wire.sockets import open_socket

BOUND_MB = 150
MODULES = {"broker": "rollout.broker.process", "proxy": "rollout.proxy.process"}


def main(argv: list[str]) -> None:
    options = parser_of("memory", __doc__).parse_args(argv)
    with temporary_run() as run, open_socket(zmq.ROUTER, run, "control", bind=True) as control:
        measured = {role: resident_mb(run, control, role) for role in MODULES}

    for role, megabytes in measured.items():
        print(f"{role}: {megabytes:.0f} MB resident, {megabytes / BOUND_MB:.2f} of the bound of {BOUND_MB} MB")
    write(options.out, {"resident_mb": measured, "bound_mb": BOUND_MB})


def resident_mb(run: RunFile, control: zmq.Socket[bytes], role: str) -> float:
    """The memory of the role's process at its second heartbeat, which comes from a running main loop."""
    process = subprocess.Popen([sys.executable, "-m", MODULES[role], "--run", str(run.folder)])
    try:
        while True:
            if not control.poll(30_000):
                raise TimeoutError(f"the {role} sent no heartbeat for 30 s")

            _peer, message = receive_from(control)
            if isinstance(message, Heartbeat) and message.role == role and message.progress > 0:
                return float(psutil.Process(process.pid).memory_info().rss / 1e6)
    finally:
        process.kill()
        process.wait()
