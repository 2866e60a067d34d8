"""Data inside the page: compressed, in base64, so that nothing a model wrote can be taken for markup.

Arrays are stored plane by plane (all lowest bytes first), which compresses several times better.
"""

from __future__ import annotations

import base64
import gzip
from typing import Any

import msgspec
import numpy as np

Arrays = dict[str, np.ndarray]
_LEVEL = 6


def block_of_json(value: Any) -> str:
    """Numbers that are not finite become null."""
    return _block(msgspec.json.encode(value))


def block_of_arrays(arrays: Arrays) -> str:
    return _block(b"".join(_planes(array) for array in arrays.values()))


def layout(arrays: Arrays) -> list[tuple[str, str, int]]:
    """Name, type and length of each array, in the order in which the block has them."""
    return [(name, array.dtype.str[1:], len(array)) for name, array in arrays.items()]


def _planes(array: np.ndarray) -> bytes:
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
    return little.view(np.uint8).reshape(-1, array.itemsize).T.tobytes()


def _block(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, _LEVEL, mtime=0)).decode()
