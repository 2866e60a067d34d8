"""Escape attempts: each is run as an agent could, must be contained, and leaves a healthy server behind.

Containment is read from the host's side wherever possible; what an attempt prints is only its own story.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from envs.sandbox import Sandbox, Template, read_file
from envs.sandbox.bubblewrap import STATE, BubblewrapBackend
from tests.envs.sandboxes import LIMITS, python, sh


def test_network_no_interface_no_route(sandbox: Sandbox) -> None:
    code = "import socket; print(socket.if_nameindex()); socket.create_connection(('1.1.1.1', 53), 2)"
    result = python(sandbox, code)
    assert not result.ok and "[(1, 'lo')]" in result.text()


def test_network_host_loopback(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not python(sandbox, f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)").ok
        server.settimeout(0.01)
        with pytest.raises(TimeoutError):
            server.accept()


def test_network_abstract_unix_socket(sandbox: Sandbox) -> None:
    name = f"fresco-escape-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        code = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}')"
        result = python(sandbox, code)
        assert not result.ok and "ConnectionRefusedError" in result.text()


def test_network_raw_and_new_interfaces(sandbox: Sandbox) -> None:
    assert not python(sandbox, "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)").ok
    assert not python(sandbox, "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)").ok


def test_files_secrets_of_the_host(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    secret.chmod(0o666)
    paths = f"/etc/shadow {secret} {Path(__file__)} /root/.bashrc /root/.ssh/id_rsa /var/run/docker.sock {STATE}"
    for path in paths.split():
        assert not sh(sandbox, f"cat {path}").ok, path
    listed = sh(sandbox, "ls -A / /etc /run /home /var /var/tmp /tmp").text()
    assert "passwd" in listed and "shadow" not in listed and "docker" not in listed


def test_files_environment_of_the_host(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    text = sh(sandbox, "env; cat /proc/*/environ | tr '\\0' '\\n'").text()
    assert "PATH=" in text and "hf_s3cret" not in text and "HF_TOKEN" not in text


def test_files_open_descriptors_of_the_server(sandbox: Sandbox, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        listed = sh(sandbox, "ls -l /proc/self/fd /proc/1/fd").text()
        assert str(tmp_path) not in listed


def test_files_read_only_runtime(sandbox: Sandbox) -> None:
    harness = "/opt/fresco/site/pytest/__init__.py"
    for path in ("/usr/bin/ls", "/bin/sh", "/etc/passwd", harness, "/opt/x", "/x", "/dev/x"):
        assert not sh(sandbox, f"echo x >> {path}").ok, path
    assert not sh(sandbox, "mount -o remount,rw /").ok
    assert not sh(sandbox, "mount --bind /tmp /usr/bin").ok
    assert not sh(sandbox, "umount /workspace").ok and not sh(sandbox, "umount -l /proc").ok


def test_files_devices(sandbox: Sandbox) -> None:
    assert not sh(sandbox, "mknod /tmp/disk b 254 0 && cat /tmp/disk").ok
    assert not sh(sandbox, "cat /dev/vda /dev/sda /dev/mem /dev/kmsg").ok
    listed = " ".join(sh(sandbox, "ls /dev").text().split())
    assert listed == "core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"


def test_files_setuid_gains_nothing(sandbox: Sandbox) -> None:
    script = """
cp /bin/sh /tmp/sh; chmod 6755 /tmp/sh; /tmp/sh -p -c id
su -c id; for tool in $(find /usr/bin /usr/sbin -perm -4000); do echo $tool; done
grep -E 'NoNewPrivs|CapEff|CapBnd' /proc/self/status
"""
    text = sh(sandbox, script).text()
    assert "uid=1000(agent)" in text and "uid=0" not in text
    assert "NoNewPrivs:\t1" in text and "CapEff:\t0000000000000000" in text and "CapBnd:\t0000000000000000" in text


def test_files_symbolic_links_are_read_inside(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    sh(sandbox, f"ln -s {secret} l; ln -s /etc/shadow s; ln -s ../../../../../../{secret} up; mkdir d; ln -s / d/root")
    for path in ("l", "s", "up", f"d/root{secret}"):
        assert read_file(sandbox, path) is None


def test_proc_shows_own_processes_only(sandbox: Sandbox) -> None:
    pids = sh(sandbox, "ls /proc | grep -c '^[0-9]'").text()
    assert int(pids) <= 6
    assert not sh(sandbox, f"cat /proc/{os.getpid()}/cmdline 2>/dev/null | grep -q pytest").ok


KERNEL_SETTINGS = {
    "/proc/sys/kernel/hostname": 1,
    "/proc/sys/vm/drop_caches": 1,
    "/proc/sysrq-trigger": 1,
    "/proc/1/mem": 1,
    "/proc/self/oom_score_adj": -1000,
    "/proc/1/oom_score_adj": -1000,
}


def test_proc_kernel_settings_and_memory(sandbox: Sandbox) -> None:
    for path, value in KERNEL_SETTINGS.items():
        assert not sh(sandbox, f"echo {value} > {path}").ok, path
    for path in ("/proc/kcore", "/proc/kmsg", "/proc/1/root/etc/shadow", "/proc/1/cwd/etc/shadow"):
        assert not sh(sandbox, f"head -c 1 {path}").ok, path


def test_signals_to_the_server(sandbox: Sandbox) -> None:
    received: list[int] = []
    code = f"""
import os, signal
for pid in [{os.getpid()}, {os.getppid()}, -1, 0, *range(2, 5000)]:
    try:
        os.kill(pid, signal.SIGUSR1 if pid > 0 else 0)
    except OSError:
        pass
print("sent")
"""

    previous = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        python(sandbox, code)
        time.sleep(0.05)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert not received


def test_kill_everything_visible(sandbox: Sandbox) -> None:
    assert not sh(sandbox, "kill -9 1; kill -9 -1; sleep 1").timed_out


def test_ptrace(sandbox: Sandbox) -> None:
    """The server is out of reach; the sandbox's own first process can be stopped, and leads nowhere."""
    attach = "import ctypes; print(ctypes.CDLL(None).ptrace(16, %d, 0, 0), flush=True)"
    assert python(sandbox, attach % os.getpid()).text() == "-1\n"
    python(sandbox, attach % 1, timeout_s=1)
    assert sh(sandbox, "[ /proc/1/root/. -ef /. ] && ls /proc/1/root").text() == sh(sandbox, "ls /").text()


def test_other_slots_files_and_processes(backend: BubblewrapBackend, sandbox: Sandbox, template: Path) -> None:
    other = backend.open(Template(template), LIMITS)
    done = threading.Event()

    def work() -> None:
        script = "echo mine > /tmp/private; chmod 666 /tmp/private; exec sleep 5"
        assert sh(other, script).ok
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while len(backend.tree(1).processes()) < 2:
        assert thread.is_alive()
        time.sleep(0.005)
    attempt = f"cat /tmp/private; ls {STATE} {STATE}/slot-1/disk/tmp; pgrep -l sleep; kill -9 -1; ls /dev/shm"
    assert "mine" not in sh(sandbox, attempt).text()
    thread.join()
    assert done.is_set() and backend.uid(0) != backend.uid(1)
    other.close()


def test_system_v_memory_is_private(backend: BubblewrapBackend, sandbox: Sandbox, template: Path) -> None:
    other = backend.open(Template(template), LIMITS)
    assert sh(sandbox, "ipcmk -M 1000 -p 666 && ipcs -m | grep -c 666").text().strip().endswith("1")
    assert "666" not in sh(other, "ipcs -m").text()
    other.close()


NESTED_NAMESPACES = """
unshare -U true
unshare -Ur id
unshare -n true
unshare -m true
unshare -p -f true
bwrap --ro-bind / / true
nsenter -t 1 -m true
chroot / true
"""


def test_user_namespaces_cannot_be_nested(sandbox: Sandbox) -> None:
    for attempt in NESTED_NAMESPACES.strip().splitlines():
        assert not sh(sandbox, attempt).ok, attempt
    libc = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000) != 0)"
    assert python(sandbox, libc).exit_code == 1


def test_capabilities_and_identity(sandbox: Sandbox) -> None:
    code = """
import os
for attempt in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.chroot("/tmp"),
                lambda: os.nice(-5), lambda: os.chown("/workspace", 0, 0)):
    try:
        attempt()
    except OSError:
        continue
    print("succeeded")
print("end")
"""

    assert python(sandbox, code).text() == "end\n"
    assert not sh(sandbox, "hostname evil || sethostname evil").ok
    assert not sh(sandbox, "date -s 2000-01-01 >/dev/null").ok


def test_limits_cannot_be_raised(sandbox: Sandbox) -> None:
    code = """
import resource
for which in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):
    try:
        resource.setrlimit(which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print("raised")
    except (ValueError, OSError):
        pass
"""
    assert python(sandbox, code).text() == ""


def test_terminal_injection(sandbox: Sandbox) -> None:
    code = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x')"
    assert not python(sandbox, code).ok
    assert not sh(sandbox, "echo x > /dev/tty").ok


def test_the_workspace_itself(sandbox: Sandbox) -> None:
    assert not sh(sandbox, "rmdir /workspace || mv /workspace /tmp/w").ok
    sh(sandbox, "rm -rf /workspace/* ; chmod 000 /workspace /tmp /home/agent")
    assert sh(sandbox, "chmod 755 /workspace; chmod 777 /tmp; chmod 755 /home/agent; cd /workspace && echo back").ok


def test_overlay_internals(sandbox: Sandbox) -> None:
    code = """
import os
for name in ("trusted.overlay.opaque", "trusted.overlay.redirect", "security.capability"):
    try:
        os.setxattr("/workspace", name, b"/../../..")
        print("set", name)
    except OSError:
        pass
"""
    assert python(sandbox, code).text() == ""
    assert not sh(sandbox, "ls /workspace/../slot-0 /workspace/../upper /workspace/../work").ok
