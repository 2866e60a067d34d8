"""A rank that joins the others, adds up something with them, and ends; rank 1 dies once after that."""

from __future__ import annotations

import os
import signal
import time

import psutil
import torch
import torch.distributed as dist

from rl.config.failures import EndsRun
from rl.learner.process import join_ranks
from rl.wire.messages import Done
from rl.wire.process import Process
from rl.wire.run import context_from_command_line, numeric


def main() -> None:
    with Process("learner", context_from_command_line()) as process:
        join_ranks(process)
        listening = [each for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN]
        abroad = [each.laddr for each in listening if each.laddr.ip != numeric(process.run.host)]
        if abroad and process.config.network.transport == "tcp":
            raise EndsRun(f"it listens at {abroad}")
        total = torch.tensor(float(process.index + 1))
        dist.all_reduce(total)
        if process.index == 1 and process.incarnation == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if process.index == 0 and process.incarnation == 1:
            process.send(Done("learner", b'{"seconds": %f}' % total.item()))
        while not process.stopping:
            time.sleep(0.01)


if __name__ == "__main__":
    main()
