"""Tensor types of a graph as those of a program that runs: extents known, element types StableHLO has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hespas.converters.stablehlo.replay_emit import F32, Tensor
from hespas.graph import DTYPES, DTypeKind, OpGraph
from hespas.graph.dtypes import DType, dtype
from hespas.graph.errors import UnsupportedError

__all__ = ["TensorList", "stand_in"]

_LARGEST = 1 << 48
"""Elements of a tensor that any machine could hold."""

_STAND_INS: dict[str, str] = {
    "tf32": "f32",
    "f6E2M3FN": "f8E4M3FN",
    "f6E3M2FN": "f8E4M3FN",
    "mxfp8": "f8E4M3FN",
    "mxfp6": "f8E4M3FN",
    "mxfp4": "f4E2M1FN",
    "mxint8": "i8",
    "nvfp4": "f4E2M1FN",
}
"""Types that StableHLO lacks, and those of 6 bits, which XLA:CPU does not compile."""

_VALUELESS = {DTypeKind.TOKEN, DTypeKind.OPAQUE}


class TensorList:
    """The types of a graph by row. ``changed`` counts the uses of those that are not what the graph says."""

    def __init__(self, graph: OpGraph) -> None:
        self.changed: Counter[str] = Counter()
        self._graph = graph
        self._rows: dict[int, tuple[Tensor | None, tuple[str, ...]]] = {}

    def of(self, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """The types of some rows without tokens. Raises ``UnsupportedError`` for one past all memory."""
        found: list[Tensor] = []
        for row in rows:
            if row not in self._rows:
                self._rows[row] = self._tensor(row)
            tensor, changes = self._rows[row]
            self.changed.update(changes)
            if tensor is not None:
                found.append(tensor)
        return tuple(found)

    def _tensor(self, row: int) -> tuple[Tensor | None, tuple[str, ...]]:
        types = self._graph.types
        changes: list[str] = []
        element = self._element(int(types.dtype[row]), changes)
        if element.kind in _VALUELESS:
            return None, ("tokens",)
        extents = types.shape(row)
        if any(extent < 0 for extent in extents):
            changes.append("extents known at run time only, taken as 1")
        if self._graph.strings[int(types.encoding[row])]:
            changes.append("layouts and encodings")
        tensor = Tensor(element, tuple(extent if extent >= 0 else 1 for extent in extents))
        if tensor.elements > _LARGEST:
            raise UnsupportedError(
                f"a tensor of {tensor.elements:,} elements", position=str(tensor), hint="correct the shape"
            )
        return tensor, tuple(changes)

    def _element(self, code: int, changes: list[str]) -> DType:
        element = stand_in(code)
        if code < 0:
            changes.append("unknown element types, taken as f32")
        elif element.code != code:
            changes.append(f"{DTYPES[code].name}, taken as {element.name}")
        return element


def stand_in(code: int) -> DType:
    """The element type that a program has for one of the hub's: itself where XLA compiles it."""
    if code < 0:
        return F32
    return dtype(_STAND_INS.get(DTYPES[code].name, DTYPES[code].name))
