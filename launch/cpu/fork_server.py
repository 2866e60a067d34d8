"""One process imports what takes seconds, and the processes of a run begin as copies of it.

torch, transformers and vLLM cost five CPU seconds to import, and a run on one machine has four to ten processes that
need them. The fork server imports them once (`python -m launch.cpu.fork_server`), beside everything else that a command
has to do before it starts a process. A copy takes milliseconds, and its memory is shared until it is written to. What
dies later begins as a copy as well, so it is back in the time that its own work takes.

* A copy is the child of whoever asked for it, not of the server: it dies with its parent, and its parent hears how it
  ended. That parent is a subreaper, and the process between the two ends at once.
* A copy begins its work when its parent says that it knows it. It ends if that will never be said, because the server
  may have hung or died before it could answer.
* The server has one thread and starts no computation, because neither a thread nor the workers of OpenMP are copied.
  It waits for threads that an import has used; if one stays, it makes no copies at all.
* Without a server, or after its death, every process is started by its own command line and does the same.

Not on GPUs: what CUDA's libraries start while they are imported may not be copied.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from launch.gpus import visible_gpus
from launch.launcher.local import Begin, Command, Files, begin_process
from launch.plan import make_plan
from launch.prepare import PREPARE_IMPORTS
from rl.config.schema import Config
from rl.wire.cpu import FORKED_VARIABLE
from rl.wire.process import adopt_orphans, die_with_parent

_REQUEST_BYTES = 1 << 16
_KNOWN = b"k"
_ROOM = "-" * 512  # a process has no more room for its line in `ps` than the line that it was started with
_END_S = 5.0
_THREADS_END_S = 5.0
_ENDED = "ZX"  # proc_pid_stat(5): zombie, dead


class ForkServer:
    """The parent's side. Call from the main thread: server and copies die with the calling thread."""

    def __init__(self, imports: Sequence[str], environment: dict[str, str], deadline_s: float = 60.0) -> None:
        adopt_orphans()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(deadline_s)
        command = [sys.executable, "-m", "launch.cpu.fork_server", str(theirs.fileno()), *imports, _ROOM]
        # Threads are set by each copy for itself; a pool of them may not exist before it is made.
        own = {"FRESCO_PARENT_PID": str(os.getpid()), FORKED_VARIABLE: "1", "OMP_NUM_THREADS": "1"}

        with theirs:
            self._server = subprocess.Popen(
                command,
                env=os.environ | environment | own,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what fails here fails again in the process that needs it, in its log
                start_new_session=True,
            )

    def begin(self, command: Command, files: Files) -> psutil.Process | None:
        """Begin a copy with these files as standard input, output and error. None: the server is dead, or did not
        answer within its deadline (it is stopped, or hangs in an import) and is dead now, or has threads.
        """
        environment = command.environment | {"FRESCO_PARENT_PID": str(os.getpid())}
        message = json.dumps(command._replace(environment=environment)).encode()
        word, ours = socket.socketpair()  # for the copy; it reads the end of it unless we speak

        with word, ours:
            try:
                socket.send_fds(self._line, [message], [file.fileno() for file in (*files, word)])
                answer = self._line.recv(_REQUEST_BYTES)
            except TimeoutError:
                self.close()
                return None
            except OSError:
                return None

            copy = psutil.Process(int(answer)) if answer else None
            if copy is not None:
                ours.send(_KNOWN)
            return copy

    def close(self) -> None:
        """The server ends; its copies go on."""
        self._line.close()
        self._server.kill()
        self._server.wait(_END_S)


@contextlib.contextmanager
def begin_as_copies(config: Config) -> Iterator[Begin]:
    """How this run's processes begin: as copies of one that has imported what they need, where that takes long.

    In a simulated run nothing takes long, and all are copies of one that has imported their modules. Else those that
    need nothing of torch begin by their command line. With GPUs each does, and of a cluster, whose agents begin them.
    """
    if config.device == "cuda" or config.cluster.count or (config.device == "auto" and visible_gpus()):
        yield begin_process
        return

    plan = make_plan(config, "cpu")
    modules = list(dict.fromkeys(spec.module for spec in plan))
    needed = list(dict.fromkeys(name for spec in plan for name in spec.imports))
    imports = [*PREPARE_IMPORTS, *needed] if needed else modules

    own: dict[str, str] = {}
    for spec in plan:
        own |= spec.environment
    server = ForkServer(imports, own, config.timeouts.hang_s)

    def begin(command: Command, files: Files) -> psutil.Process:
        copied = bool(command.imports) if needed else command.module in modules
        copy = server.begin(command, files) if copied else None
        return copy or begin_process(command, files)

    try:
        yield begin
    finally:
        server.close()


# ------------------------------------------------------------ the server's side


def _serve(line: socket.socket, imports: list[str]) -> Command | None:
    """Import while nobody asks, and copy when somebody does. Returns in a copy with what it has to do, and at the end
    with nothing.
    """
    while True:
        if imports and not select.select([line], [], [], 0)[0]:
            _import(imports.pop(0))
            continue

        message, files, _flags, _sender = socket.recv_fds(line, _REQUEST_BYTES, 4)
        if not message:
            return None
        command = Command(*json.loads(message))
        for name in command.imports:
            _import(name)
        if not is_alone(_THREADS_END_S):
            line.close()
            return None

        pid = _copy(command, files, line)
        if pid is None:
            return command
        line.send(str(pid).encode())


def is_alone(deadline_s: float) -> bool:
    """Whether this process has one thread, or soon has.

    A thread that Python has joined may stay with the kernel for a moment. One that has ended and was not yet taken away
    (a debugger does that) holds nothing that a copy would miss.
    """
    end = time.monotonic() + deadline_s
    while len(living_threads()) > 1:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def living_threads() -> list[str]:
    """Name and state of each thread of this process that has not ended, as the kernel tells them: `python S`."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            name, _, rest = Path("/proc/self/task", thread, "stat").read_text().partition("(")[2].rpartition(")")
            state = rest.split()[0]
            if state not in _ENDED:
                found.append(f"{name} {state}")
    return found


def _import(name: str) -> None:
    with contextlib.suppress(Exception):  # the process that needs it meets the same error, and reports it
        importlib.import_module(name)


def _copy(command: Command, files: list[int], line: socket.socket) -> int | None:
    """The copy's pid; None in the copy itself, once it is the child of whoever asked for it. The copy has no part of
    the line: its end is how one hears of the server's."""
    gc.freeze()  # what is there will stay: collecting it would only write to shared pages
    pid_read, pid_write = os.pipe()

    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid:
            os.write(pid_write, str(pid).encode())
            os._exit(0)
        os.close(pid_read)
        os.close(pid_write)
        line.close()

        *standard, word = files
        if os.read(word, len(_KNOWN)) != _KNOWN:  # said once the process between has ended
            os._exit(1)
        os.close(word)
        _become(command, standard)
        return None

    os.waitpid(between, 0)
    pid = int(os.read(pid_read, 32))
    for each in (pid_read, pid_write, *files):
        os.close(each)
    return pid


def _become(command: Command, files: list[int]) -> None:
    """The process that was asked for, as far as its own code and the kernel can tell."""
    os.setsid()
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)

    os.environ.update(command.environment)
    tempfile.tempdir = None  # the server's: this one's goes with the run
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()

    sys.argv = [command.module, *command.arguments]
    _show(" ".join(sys.argv))


def _show(line: str) -> None:
    """What `ps` shows of this process from now on, where vLLM has brought setproctitle."""
    if setproctitle := sys.modules.get("setproctitle"):
        setproctitle.setproctitle(f"{sys.executable} -m {line}")


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # an import leaves nothing to collect, and looking for it takes a quarter of the time
    _import("setproctitle")
    line, *imports, _ = sys.argv[1:]
    _show(f"launch.cpu.fork_server {' '.join(imports)}")
    command = _serve(socket.socket(fileno=int(line)), imports)
    if command is not None:
        importlib.import_module(command.module).main()


if __name__ == "__main__":
    main()
