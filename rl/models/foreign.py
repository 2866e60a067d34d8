"""What is wrong with weights that others have made is said before anything begins with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from rl.models.loading import opened, weight_files

_READ_WHOLE = 4 << 30  # bytes: a few seconds
_ROWS = 64  # of each end of a tensor, in larger checkpoints


def check_weights(folder: Path) -> None:
    """Raises ValueError that names the file: it ends early, has numbers that are not finite, or too few embeddings.

    All numbers of a checkpoint of up to 4 GiB are read, and the first and last rows of each tensor of a larger one.
    """
    files = weight_files(folder)
    whole = sum(path.stat().st_size for path in {*files.values()}) <= _READ_WHOLE
    rows = None
    for path in sorted({*files.values()}):
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                saved = file.get_slice(name)
                if not all(_finite(part) for part in _parts(saved, whole)):
                    raise ValueError(f"{name} in {path.name} has numbers that are not finite")
                if name.endswith("embed_tokens.weight"):
                    rows = saved.get_shape()[0]

    if rows is not None and (folder / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        known = tokenizer.get_vocab(with_added_tokens=False)  # added ones, of images say, may have no row
        last = max(known.values(), default=0)
        if last >= rows:
            raise ValueError(f"tokenizer.json has ids up to {last}, and the embedding {rows} rows: of another model")


def _finite(part: Tensor) -> bool:
    """Formats of one byte are those of quantized weights, which are refused elsewhere."""
    return part.element_size() == 1 or bool(part.isfinite().all())


def _parts(saved: Any, whole: bool) -> Iterator[Tensor]:
    if whole or not saved.get_shape():
        yield saved[:] if saved.get_shape() else saved[...]
    else:
        yield saved[:_ROWS]
        yield saved[-_ROWS:]
