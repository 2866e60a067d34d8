"""By which names and in which shapes the files of a model keep what transformers keeps as a parameter.

Most families use one name for both. A mixture of experts keeps all experts of a layer as one tensor, while its files
have three matrices for each of them. A rank holds whole experts, so each of these is a view of what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from rl.models.families import FAMILIES, Family
from rl.models.protocol import Exported, Placement

_GATE_UP = "experts.gate_up_proj"
_DOWN = "experts.down_proj"


def in_files(family: str, name: str, rows: Tensor, placement: Placement) -> Iterator[Exported]:
    """The tensors of the files that a parameter of this name is, in a fixed order.

    rows: what this rank holds of the parameter. It holds all of an expert's matrix, or nothing.
    """
    known = FAMILIES.get(family, Family(""))
    for kept, saved in known.renamed.items():
        name = name.replace(kept, saved)

    parts = _matrices(name, known.experts, placement.shape)
    if not parts:
        yield Exported(name, rows, placement)
        return

    before = name.rpartition(".")[0]
    for part, chosen in parts.items():
        shape = (chosen.stop - chosen.start, placement.shape[2])
        for expert in range(placement.shape[0]):
            place = expert - placement.row
            own = 0 <= place < len(rows)
            matrix = rows[place, chosen] if own else rows.new_empty((0, shape[1]))
            first = shape[0] if place < 0 else 0  # a rank before this one holds it
            yield Exported(f"{before}.{expert}.{part}.weight", matrix, Placement(shape, first))


def _matrices(name: str, experts: tuple[str, str, str] | None, shape: tuple[int, ...]) -> dict[str, slice]:
    """The parts of each expert in a tensor (experts, out, in), as slices of `out`; none for any other tensor."""
    if experts is None or not name.endswith((_GATE_UP, _DOWN)):
        return {}
    gate, up, down = experts
    if name.endswith(_DOWN):
        return {down: slice(0, shape[1])}
    return {gate: slice(0, shape[1] // 2), up: slice(shape[1] // 2, shape[1])}
