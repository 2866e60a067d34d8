"""A process with a real control socket whose behaviour is an environment variable: FAKE_<ROLE>=behaviour."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from filelock import FileLock

from rl.store.checkpoint_folder import CheckpointError
from rl.wire.messages import Done, Metrics, PeerDied, StillCopying, Stop
from rl.wire.process import Process
from rl.wire.run import context_from_command_line


def _row(step: int) -> Metrics:
    return Metrics(step, dict.fromkeys(("train/loss", "version/timeline", "time/step", "time/over"), 0.0))


def main() -> None:
    role = sys.argv[1]
    if os.environ.get(f"FAKE_{role.upper()}") == "die and never start" and sys.argv[-1] == "1":
        time.sleep(3600)
    if os.environ.get(f"FAKE_{role.upper()}") == "never start":
        time.sleep(3600)
    if os.environ.get(f"FAKE_{role.upper()}", "").startswith("late"):
        time.sleep(2)
    with Process(role, context_from_command_line(sys.argv[2:])) as process:
        behaviour = os.environ.get(f"FAKE_{role.upper()}", "").removeprefix("late ")

        if behaviour in ("raise later", "give up"):
            process.progress = 1
        if behaviour == "give up" and process.incarnation == 0:
            time.sleep(0.3)
            raise CheckpointError("step-8/state was damaged")
        if behaviour == "raise once a generator is up":
            while not (process.run.folder / "up.generator").exists():
                time.sleep(0.01)
            behaviour = "raise"
        if behaviour == "raise" or (behaviour == "raise later" and process.incarnation == 0):
            time.sleep(0.3)
            raise ValueError("the first cause")
        if behaviour == "step":
            process.send(Metrics(1, {"steps": 1.0}))
        if behaviour in ("tell", "slow end"):
            (process.run.folder / f"up.{role}").touch()
        if behaviour.startswith("signal "):
            os.kill(os.getppid(), int(behaviour.removeprefix("signal ")))
        if behaviour == "step by step":
            for step in range(1, 41):
                process.send(_row(step))
                time.sleep(0.1)
            behaviour = "done"
        if behaviour == "ends busy":  # as its heartbeats still say
            process.send(_row(1))
            time.sleep(0.3)
            os.kill(os.getppid(), signal.SIGINT)
            process.busy = True
            time.sleep(1)
            behaviour = "done"
        if behaviour in ("saves", "trains, then saves"):  # slowly, as it is asked to with the first Ctrl-C
            process.send(_row(1))
            time.sleep(0.3)
            os.kill(os.getppid(), signal.SIGINT)
            process.busy = behaviour != "saves"
            for _ in range(20 * process.busy):
                time.sleep(0.2)
                process.progress += 1
            process.busy = False

            time.sleep(7)
            (process.run.folder / "saved").touch()
            process.send(Done(role, b"{}"))
        if behaviour == "exit" and process.incarnation == 0:
            time.sleep(0.3)
            os._exit(3)
        lock = FileLock(process.run.folder / "rank")
        held = process.run.folder / "held"
        if behaviour == "die in step" and process.incarnation == 0:
            lock.acquire()
            held.touch()
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "raise beside" and process.incarnation == 0:
            while not held.exists():
                time.sleep(0.01)
            lock.acquire()  # the kernel lets go of it when the other rank dies, as of a connection
            raise ValueError("connection closed by peer")
        behaviour = behaviour.replace("die in step", "done")

        if (behaviour in ("die", "die and never start") and process.incarnation == 0) or behaviour == "die always":
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "report and raise":
            process.closing_report = lambda: {"staleness": process.incarnation}
            if process.incarnation == 0:
                process.progress = 1
                time.sleep(0.3)
                raise ValueError("the first cause")
            process.send_closing_report()
        if behaviour == "report and die":
            process.send(Done(role, json.dumps({"staleness": process.incarnation}).encode()))
            if process.incarnation == 0:
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "hang" and process.incarnation == 0:
            process.busy = True
        if behaviour == "children":
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if behaviour == "deaf":  # ignores Stop
            while True:
                time.sleep(1)

        deaths = 0
        while not process.stopping:
            for message in process.received():
                if isinstance(message, PeerDied):
                    deaths += 1
                    process.send(Metrics(deaths, {"deaths": float(deaths)}))
                if isinstance(message, StillCopying) and behaviour == "end while another's files come":
                    behaviour = "done"
                if isinstance(message, Stop):
                    break

            if behaviour.startswith("done") and deaths >= int(behaviour[4:] or 0):
                process.send(Done(role, b"{}"))
                behaviour = ""
            time.sleep(0.01)
        if behaviour == "slow end":
            time.sleep(3)
            (process.run.folder / "ended").touch()


if __name__ == "__main__":
    main()
