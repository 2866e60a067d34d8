"""A process with a real control socket whose behaviour is an environment variable: FAKE_<ROLE>=behaviour."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from rl.core.messages import Done, Metrics, PeerDied, Stop
from rl.core.process import Process
from rl.core.run import context_from_command_line


def main(role: str) -> None:
    if os.environ.get(f"FAKE_{role.upper()}", "").startswith("late"):
        time.sleep(2)
    with Process(role, context_from_command_line(sys.argv[2:])) as process:
        behaviour = os.environ.get(f"FAKE_{role.upper()}", "").removeprefix("late ")

        if behaviour == "raise":
            time.sleep(0.3)
            raise ValueError("the first cause")
        if (behaviour == "die" and process.incarnation == 0) or behaviour == "die always":
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
                if isinstance(message, Stop):
                    return

            if behaviour.startswith("done") and deaths >= int(behaviour[4:] or 0):
                process.send(Done(role, b"{}"))
                behaviour = ""
            time.sleep(0.01)


main(sys.argv[1])
