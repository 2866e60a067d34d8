"""The trace: what a killed or full writer leaves can be read, times are ordered, levels leave out what they say."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rl.observe.trace import FOLDER, Source, Trace, TraceRecord, clock_offsets, read_trace, trace_files
from rl.observe.trace_events import FirstToken, LoadBegan, ProcessDied, Requested, SpanBegan, SpanEnded

_WRITER = """
import sys
from pathlib import Path
from rl.observe.trace_events import Requested
from rl.observe.trace import Trace

trace = Trace(Path(sys.argv[1]), "env_server", 0, int(sys.argv[2]), "full")
for number in range(1_000_000_000):
    trace.add(Requested(number, 1, 7))
    sys.stdout.write("x")
    sys.stdout.flush()
"""


def test_what_is_told_comes_back_in_order(tmp_path: Path) -> None:
    before = time.time()
    server = Trace(tmp_path, "env_server", 1, 0, "full")
    generator = Trace(tmp_path, "generator", 0, 2, "full")
    for turn in range(3):
        server.add(Requested(5, turn, 40))
        generator.add(FirstToken(5, turn, 3))
    after = time.time()

    events = list(read_trace(tmp_path))
    assert [type(record.event) for record in events] == [Requested, FirstToken] * 3
    assert events[1].source == Source("generator", 0, 2) and str(events[1].source) == "generator.0.2"
    assert events[1].event == FirstToken(5, 0, 3)
    times = [record.time for record in events]
    assert times == sorted(times) and before - 1 <= times[0] and times[-1] <= after + 1


def test_a_killed_writer_loses_at_most_the_record_it_was_writing(tmp_path: Path) -> None:
    """Its standard output says how many records it had finished."""
    for incarnation in range(5):
        command = [sys.executable, "-c", _WRITER, str(tmp_path), str(incarnation)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        finished = len(writer.stdout.read(1000 + 777 * incarnation))
        writer.send_signal(signal.SIGKILL)
        finished += len(writer.stdout.read())
        writer.wait()

        numbers = [
            record.event.ticket
            for record in read_trace(tmp_path)
            if record.source.incarnation == incarnation and isinstance(record.event, Requested)
        ]
        assert numbers == list(range(len(numbers)))
        assert finished <= len(numbers) <= finished + 1


def test_a_file_that_ends_anywhere_gives_every_whole_record(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "broker", 0, 0, "full")
    for number in range(3):
        trace.add(Requested(number, 1, 7))
    path = tmp_path / FOLDER / "broker.0.0.trace"
    whole = path.read_bytes()

    seen = set()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        seen.add(len(list(read_trace(tmp_path))))
    assert seen == {0, 1, 2, 3}
    assert len(list(read_trace(tmp_path))) == 3

    path.write_bytes(whole + bytes(100))  # as a file system may leave it after a power cut
    assert len(list(read_trace(tmp_path))) == 3


def test_a_file_is_read_on_while_it_grows(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "broker", 0, 0, "full")
    (file,) = trace_files(tmp_path)
    assert not list(file.read())

    trace.add(Requested(1, 1, 7))
    assert [event for _, event in file.read()] == [Requested(1, 1, 7)]
    trace.add(Requested(2, 1, 7))
    assert [event for _, event in file.read()] == [Requested(2, 1, 7)]


def test_threads_share_a_file_in_order(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "learner", 0, 0, "full")

    def tell(first: int) -> None:
        for number in range(500):
            trace.add(Requested(first + number, 1, 7))

    threads = [threading.Thread(target=tell, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    (file,) = trace_files(tmp_path)
    times = [at for at, _ in file.read()]
    assert len(times) == 2000 and times == sorted(times)


@pytest.mark.parametrize(
    ("level", "kept"),
    [("off", []), ("steps", [SpanBegan, LoadBegan, SpanEnded]), ("full", [SpanBegan, Requested, LoadBegan, SpanEnded])],
)
def test_levels(tmp_path: Path, level: str, kept: list[type]) -> None:
    trace = Trace(tmp_path, "learner", 0, 0, level)
    with trace.span("train", 3):
        trace.add(Requested(5, 1, 40))
        trace.add(LoadBegan(0, 3))

    assert [type(record.event) for record in read_trace(tmp_path)] == kept
    assert (tmp_path / FOLDER).exists() == bool(kept)


def test_a_span_ends_with_an_exception(tmp_path: Path) -> None:
    trace = Trace(tmp_path, "learner", 0, 0, "steps")
    with pytest.raises(ValueError, match="inside"), trace.span("train", 3):
        raise ValueError("inside")
    assert [record.event for record in read_trace(tmp_path)] == [SpanBegan("train", 3), SpanEnded("train", 3)]


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path) -> None:
    """As a limit on the size of files: the write that does not fit is cut short, the next one fails."""
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from rl.observe.trace_events import Requested\n"
        "from rl.observe.trace import Trace\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "trace = Trace(Path(sys.argv[1]), 'broker', 0, 0, 'full')\n"
        "for number in range(100):\n"
        "    trace.add(Requested(number, 1, 7))\n"
        "print('went on')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0 and ended.stdout == "went on\n"
    assert ended.stderr.count("the trace is no longer kept") == 1

    numbers = [record.event.ticket for record in read_trace(tmp_path) if isinstance(record.event, Requested)]
    assert 20 < len(numbers) < 100 and numbers == list(range(len(numbers)))


def test_a_folder_that_cannot_be_written_ends_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    Trace(tmp_path, "broker", 0, 0, "full").add(Requested(1, 1, 7))
    assert "the trace is no longer kept" in capsys.readouterr().err


def test_the_wall_clock_may_jump_between_two_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Trace(tmp_path, "generator", 0, 0, "full").add(ProcessDied("broker", 0, 0, "first"))
    wall = time.time()
    monkeypatch.setattr(time, "time", lambda: wall - 3600)
    Trace(tmp_path, "generator", 0, 1, "full").add(ProcessDied("broker", 0, 0, "second"))

    first, second = read_trace(tmp_path)
    assert isinstance(second, TraceRecord) and 0 <= second.time - first.time < 60

    headers = [file.header for file in trace_files(tmp_path)]
    assert len(set(clock_offsets(headers).values())) == 1
