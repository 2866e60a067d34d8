"""Patches: whatever the bits were and are, what is patched is the new version to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.weights.host import delta
from rl.weights.host.delta import PatchError, Range, apply, encode

WIDTHS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4}
ODD = {  # zeros with a sign, infinities, several that are no number, the smallest and the largest
    2: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7C00, 0xFC00, 0x7E00, 0x0001, 0x8001, 0x7F7F, 0xFFFF, 0x7FFF],
    4: [0x0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x1, 0x80000001, 0x7F7FFFFF, 0xFFFFFFFF],
}
UNSIGNED = {2: np.uint16, 4: np.uint32}


def patched(old: np.ndarray, new: np.ndarray, ranges: list[Range]) -> tuple[np.ndarray, int, int]:
    """What the patch makes of the old bytes, its length, and the items that it has."""
    made = encode(old, new, ranges)
    assert made is not None
    data = old.copy()
    apply(made[0], data, ranges)
    return data, len(made[0]), made[1]


@given(st.data(), st.sampled_from([2, 4]), st.integers(0, 2100), st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]))
def test_any_bits_become_any_others(data: st.DataObject, width: int, count: int, share: float) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    kind = UNSIGNED[width]
    any_bits = random.integers(0, 1 << 8 * width, count, dtype=kind)
    odd_bits = random.choice(np.array(ODD[width], kind), count)
    old = np.where(random.random(count) < 0.5, any_bits, odd_bits)
    steps = np.where(random.random(count) < 0.7, random.choice([1, -1], count), random.integers(-40000, 40000, count))
    other = np.where(random.random(count) < 0.8, old + steps.astype(kind), random.permutation(old)).astype(kind)
    new = np.where(random.random(count) < share, other, old)

    before = old.view(np.uint8)
    begin = data.draw(st.integers(0, count)) * width  # what lies outside of the ranges stays as it is
    ranges = [Range(begin, len(before) - begin, width)]
    found, nbytes, changed = patched(before, new.view(np.uint8), ranges)
    assert np.array_equal(found[begin:], new.view(np.uint8)[begin:])
    assert np.array_equal(found[:begin], before[:begin])
    assert changed == np.count_nonzero(old[begin // width :] != new[begin // width :])
    assert nbytes <= len(before) - begin + 20


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("lr", [1e-6, 1e-3, 1.0])
def test_a_step_of_real_numbers_survives(dtype: torch.dtype, lr: float) -> None:
    torch.manual_seed(0)
    master = torch.randn(700_001) * 0.02
    step = master + lr * torch.randn(700_001)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45])
    old, new = (
        torch.cat([special[torch.randperm(6)], one]).to(dtype).view(torch.uint8).numpy() for one in (master, step)
    )
    found, _, _ = patched(old, new, [Range(0, len(old), WIDTHS[dtype])])
    assert np.array_equal(found, new)


def test_two_bytes_an_item_at_most_where_few_change_by_little() -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 1 << 16, 2_000_000, dtype=np.uint16)
    new = old + random.choice(np.array([0, 1, 65535], np.uint16), len(old), p=[0.98, 0.01, 0.01])
    _, nbytes, changed = patched(old.view(np.uint8), new.view(np.uint8), [Range(0, old.nbytes, 2)])
    assert nbytes < 2 * changed * 0.7  # gaps and signs are packed further


def test_nothing_changed_and_all_changed() -> None:
    old = np.random.default_rng(0).integers(0, 256, 3 * delta.BLOCK_BYTES + 6, np.uint8)
    ranges = [Range(0, len(old), 2)]
    assert patched(old, old, ranges)[1:] == (4 * 17, 0)
    found, nbytes, changed = patched(old, ~old, ranges)
    assert np.array_equal(found, ~old) and changed == len(old) // 2 and nbytes <= len(old) + 4 * 17
    assert patched(old, old, [])[1:] == (0, 0)


def test_it_gives_up_as_soon_as_more_than_asked_has_changed() -> None:
    old = np.zeros(4 * delta.BLOCK_BYTES, np.uint8)
    new = old.copy()
    new[: len(new) // 5 : 2] = 1
    ranges = [Range(0, len(old), 2)]
    assert encode(old, new, ranges, 0.2) is not None
    assert encode(old, new, ranges, 0.19) is None


def test_ranges_of_several_widths_are_patched_alone() -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 256, 1000, np.uint8)
    new = random.integers(0, 256, 1000, np.uint8)
    ranges = [Range(64, 14, 2), Range(128, 4, 4), Range(192, 0, 4), Range(512, 300, 4)]
    found, _, _ = patched(old, new, ranges)
    inside = np.zeros(1000, bool)
    for offset, length, _ in ranges:
        inside[offset : offset + length] = True
    assert np.array_equal(found, np.where(inside, new, old))


@given(st.data())
def test_a_damaged_patch_is_an_error_or_other_bytes_and_never_a_crash(data: st.DataObject) -> None:
    random = np.random.default_rng(1)
    old = random.integers(0, 1 << 16, 4000, dtype=np.uint16)
    new = old + (random.random(4000) < 0.1).astype(np.uint16) * random.integers(1, 60000, 4000).astype(np.uint16)
    ranges = [Range(0, old.nbytes, 2)]
    made = encode(old.view(np.uint8), new.view(np.uint8), ranges)
    assert made is not None

    patch = bytearray(made[0])
    for _ in range(data.draw(st.integers(1, 4))):
        patch[data.draw(st.integers(0, len(patch) - 1))] ^= data.draw(st.integers(1, 255))
    patch = patch[: data.draw(st.integers(0, len(patch)))] if data.draw(st.booleans()) else patch
    try:
        apply(bytes(patch), old.view(np.uint8).copy(), ranges)
    except PatchError as error:
        assert "does not fit" in str(error) or "too many" in str(error)
