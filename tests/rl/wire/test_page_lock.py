"""Slots for a GPU are locked once each, in the way that is possible, and go on unlocked where none is."""

from __future__ import annotations

import mmap

import pytest
import torch

from rl.wire.page_lock import PageLock

PORTABLE, READ_ONLY = 1, 8


class Runtime:
    """CUDA's own functions, as far as they are called: which of their flags it refuses, and what is locked."""

    def __init__(self, refuses: set[int] | None = None) -> None:
        self.refuses = refuses or set()
        self.tried: list[tuple[int, int]] = []  # bytes, flags
        self.locked: dict[int, int] = {}  # address -> flags

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.tried.append((size, flags))
        if flags in self.refuses:
            return 801
        assert address not in self.locked
        self.locked[address] = flags
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def slots() -> list[memoryview]:
    """Two of them; neither ends with a page."""
    return [memoryview(mmap.mmap(-1, 3 * mmap.PAGESIZE))[: 2 * mmap.PAGESIZE + 1] for _ in range(2)]


def test_each_slot_is_locked_once_and_all_are_freed(slots: list[memoryview]) -> None:
    runtime = Runtime()
    lock = PageLock("cpu", runtime)
    for view in (*slots, *slots):
        lock.add(view)
    assert runtime.tried == [(len(slots[0]), PORTABLE)] * 2
    assert set(runtime.locked) == {torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in slots}

    lock.close()
    lock.close()
    assert runtime.locked == {}


@pytest.mark.parametrize(("refuses", "flags"), [(set[int](), PORTABLE | READ_ONLY), ({PORTABLE | READ_ONLY}, PORTABLE)])
def test_what_is_only_read_is_locked_as_such_where_the_driver_can(
    slots: list[memoryview], refuses: set[int], flags: int
) -> None:
    runtime = Runtime(refuses)
    PageLock("cpu", runtime).add(slots[0].toreadonly())
    assert list(runtime.locked.values()) == [flags]


def test_where_it_is_refused_the_log_says_so_once(slots: list[memoryview], capfd: pytest.CaptureFixture[str]) -> None:
    runtime = Runtime({PORTABLE, PORTABLE | READ_ONLY})
    lock = PageLock("cpu", runtime)
    for view in (*slots, *slots):
        lock.add(view)
    lock.close()
    assert len(runtime.tried) == 2
    assert capfd.readouterr().err.count("cannot be page-locked") == 1


def test_without_a_gpu_nothing_is_locked(slots: list[memoryview]) -> None:
    lock = PageLock("cpu")
    lock.add(slots[0])
    lock.close()
