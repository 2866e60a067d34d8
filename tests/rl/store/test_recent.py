"""The table of what was used last, against its definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rl.store.recent import Recent


@given(st.lists(st.integers(0, 12), max_size=60), st.integers(1, 8))
def test_the_entries_used_last_are_kept(uses: list[int], limit: int) -> None:
    table: Recent[int] = Recent(limit)
    for place, name in enumerate(uses):
        table.use(name, place)
    last = {name: place for place, name in enumerate(uses)}
    kept = sorted(last, key=last.__getitem__)[-limit:]
    assert list(table.items()) == [(name, last[name]) for name in kept]
