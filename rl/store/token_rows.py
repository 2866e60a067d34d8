"""Rows of token ids on disk, each with the tokens that are to be learned: what supervised training reads.

    write_token_rows(folder, rows)
    rows = TokenRows(folder)
    for token_ids, loss_mask in rows[7]: ...

A row has one sequence, or several where a chat template drops earlier thoughts. The arrays are mapped into memory: of
millions of rows a rank reads those that it trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

Marked = tuple[np.ndarray, np.ndarray]
"""Token ids (T,) int32 and loss mask (T,) uint8 of one sequence."""
_TOKENS, _MASK, _ENDS, _ROWS = "token_ids.npy", "loss_mask.npy", "ends.npy", "rows.npy"


def write_token_rows(folder: Path, rows: Sequence[Sequence[Marked]]) -> None:
    """Make the folder, which is not there yet."""
    folder.mkdir(parents=True)
    marked = [each for row in rows for each in row]
    np.save(folder / _TOKENS, _joined((ids for ids, _ in marked), "int32"))
    np.save(folder / _MASK, _joined((mask for _, mask in marked), "uint8"))
    np.save(folder / _ENDS, np.cumsum([len(ids) for ids, _ in marked], dtype=np.int64))
    np.save(folder / _ROWS, np.cumsum([len(row) for row in rows], dtype=np.int64))


class TokenRows:
    def __init__(self, folder: Path) -> None:
        self._tokens, self._mask, self._ends, self._rows = (
            np.load(folder / name, mmap_mode="r") for name in (_TOKENS, _MASK, _ENDS, _ROWS)
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> list[Marked]:
        """Raises IndexError behind the last row."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        first = int(self._rows[row - 1]) if row else 0
        found = []
        for sequence in range(first, int(self._rows[row])):
            span = slice(int(self._ends[sequence - 1]) if sequence else 0, int(self._ends[sequence]))
            found.append((np.array(self._tokens[span]), np.array(self._mask[span])))
        return found


def _joined(parts: Iterable[np.ndarray], dtype: str) -> np.ndarray:
    joined: np.ndarray = np.concatenate([np.zeros(0, dtype), *parts])
    return joined.astype(dtype)
