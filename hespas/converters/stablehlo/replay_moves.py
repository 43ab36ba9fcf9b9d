"""Recipes of operations that move data, their attributes inferred from the shapes; and the last resort."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hespas.converters.stablehlo.replay_emit import F32, Emitter, Node, Recipe, Tensor, Value, broadcast_axes
from hespas.graph import DTYPES, DTypeKind, OpGraph
from hespas.graph.errors import UnsupportedError
from hespas.graph.tensors import DType, dtype

__all__ = ["MOVES", "TensorList", "made_from", "passed_on", "stand_in", "synthesised"]

_INDEX_BITS = 8


def _transpose(node: Node) -> list[Value] | None:
    result = node.result
    if result is None or len(node.operands) != 1 or node.operands[0].element is not result.element:
        return None
    order = _permutation(node.operands[0].shape, result.shape)
    if order is None:
        return None
    value = node.bound()[0]
    return [
        node.emitter.add(f"stablehlo.transpose {value}, dims = {order} : ({value.type}) -> {result}", result)
    ]


def _permutation(before: tuple[int, ...], after: tuple[int, ...]) -> list[int] | None:
    """An order of dimensions that makes one shape of the other; a real one where extents are equal."""
    if sorted(before) != sorted(after):
        return None
    left = list(range(len(before)))
    order: list[int] = []
    for place, extent in enumerate(after):
        fitting = [axis for axis in left if before[axis] == extent]
        moved = [axis for axis in fitting if axis != place]
        chosen = (moved or fitting)[-1]
        left.remove(chosen)
        order.append(chosen)
    return order


def _broadcast(node: Node) -> list[Value] | None:
    result = node.result
    if result is None or len(node.operands) != 1 or node.operands[0].element is not result.element:
        return None
    if broadcast_axes(node.operands[0].shape, result.shape) is None:
        return None
    return [node.emitter.stretched(node.bound()[0], result.shape, shared=False)]


def _concatenate(node: Node) -> list[Value] | None:
    result = node.result
    if (
        result is None
        or not node.operands
        or any(each.element is not result.element for each in node.operands)
    ):
        return None
    axis = _joined_axis([each.shape for each in node.operands], result.shape)
    if axis is None:
        return None
    bound = node.bound()
    kinds = ", ".join(str(value.type) for value in bound)
    text = f"stablehlo.concatenate {', '.join(map(str, bound))}, dim = {axis} : ({kinds}) -> {result}"
    return [node.emitter.add(text, result)]


def _joined_axis(parts: Sequence[tuple[int, ...]], whole: tuple[int, ...]) -> int | None:
    """The one dimension along which the parts add up to the whole."""
    for axis in range(len(whole)):
        rest = [part[:axis] + part[axis + 1 :] for part in parts]
        alike = all(len(part) == len(whole) for part in parts)
        alike = alike and all(each == whole[:axis] + whole[axis + 1 :] for each in rest)
        if alike and sum(part[axis] for part in parts) == whole[axis]:
            return axis
    return None


def _within(part: Tensor, whole: Tensor) -> bool:
    """Whether one type is a box inside the other."""
    alike = part.element is whole.element and len(part.shape) == len(whole.shape)
    return alike and all(small <= large for small, large in zip(part.shape, whole.shape, strict=True))


def _slice(node: Node) -> list[Value] | None:
    result = node.result
    if result is None or len(node.operands) != 1 or not _within(result, node.operands[0]):
        return None
    if result == node.operands[0]:
        return None
    return [node.emitter.front(node.bound()[0], result.shape, shared=False)]


def _pad(node: Node) -> list[Value] | None:
    result = node.result
    if result is None or len(node.operands) != 2 or not _within(node.operands[0], result):
        return None
    if node.operands[1] != result.reshaped(()):
        return None
    value, edge = node.bound()
    high = [large - small for large, small in zip(result.shape, value.type.shape, strict=True)]
    none = [0] * len(high)
    text = f"stablehlo.pad {value}, {edge}, low = {none}, high = {high}, interior = {none}"
    return [node.emitter.add(f"{text} : ({value.type}, {edge.type}) -> {result}", result)]


def _indices(operands: Sequence[Tensor], rank: int) -> bool:
    """Whether these are scalar indices of equal type, one a dimension."""
    alike = len(set(operands)) <= 1 and len(operands) == rank
    return alike and all(
        each.shape == () and each.is_integer and each.element.bits >= _INDEX_BITS for each in operands
    )


def _dynamic_slice(node: Node) -> list[Value] | None:
    result = node.result
    if result is None or not node.operands or not _within(result, node.operands[0]):
        return None
    if not _indices(node.operands[1:], len(result.shape)):
        return None
    bound = node.bound()
    kinds = ", ".join(str(value.type) for value in bound)
    text = f"stablehlo.dynamic_slice {', '.join(map(str, bound))}, sizes = {list(result.shape)}"
    return [node.emitter.add(f"{text} : ({kinds}) -> {result}", result)]


def _dynamic_update_slice(node: Node) -> list[Value] | None:
    result = node.result
    if result is None or len(node.operands) < 2 or node.operands[0] != result:
        return None
    if not _within(node.operands[1], result) or not _indices(node.operands[2:], len(result.shape)):
        return None
    bound = node.bound()
    kinds = ", ".join(str(value.type) for value in bound)
    text = f"stablehlo.dynamic_update_slice {', '.join(map(str, bound))} : ({kinds}) -> {result}"
    return [node.emitter.add(text, result)]


def _reverse(node: Node) -> list[Value] | None:
    if node.result is None or node.operands != (node.result,):
        return None
    return [_turned(node.emitter, node.bound()[0])]


def _turned(emitter: Emitter, value: Value) -> Value:
    """A copy that no compiler can leave out: the longest dimension the other way round."""
    if value.type.elements < 2:
        return value
    axis = max(range(len(value.type.shape)), key=lambda axis: value.type.shape[axis])
    return emitter.add(f"stablehlo.reverse {value}, dims = [{axis}] : {value.type}", value.type)


def passed_on(node: Node) -> list[Value]:
    """A view, constant or join: results are what it waits for, in another shape, or arguments, which are
    different ones for different constants.
    """
    node = node._replace(op="")
    if not node.results:
        return node.bound(node.operands or _smallest_types(node))
    return _results_from(node, copies=False)


def synthesised(node: Node) -> list[Value]:
    """Any other operation: reads its operands and makes results of the right types, without arithmetic."""
    if not node.results:
        bound = node.bound(node.operands or _smallest_types(node))
        return [_turned(node.emitter, bound[0]), *bound[1:]]
    return _results_from(node, copies=True)


def _smallest_types(node: Node) -> list[Tensor]:
    """The types of what a node without types waits for."""
    return [producer[0].type for producer in node.producers if producer][:1]


def _results_from(node: Node, *, copies: bool) -> list[Value]:
    bound = node.bound(node.operands or node.results, stretch=True)
    return made_from(node, bound, node.results, copies=copies)


def made_from(
    node: Node,
    bound: Sequence[Value],
    results: Sequence[Tensor],
    *,
    copies: bool,
    used: Iterable[Value] = (),
) -> list[Value]:
    """Values of the given types, made of those a node is bound to; views of them unless ``copies``. The first
    waits for all that is neither ``used`` nor made something of, copies for the first.
    """
    made: list[Value] = []
    names = {value.name for value in used}
    sources = _Sources(bound)
    for place, result in enumerate(results):
        source = sources.nearest(result, place)
        if source is None:
            source = node.binder.filler(result)
        elif source.type.elements <= result.elements:
            names.add(source.name)
        value = _fitted(node.emitter, source, result)
        made.append(_turned(node.emitter, value) if copies else value)
    able = [place for place, value in enumerate(made) if value.type.elements]
    if not able:
        return made
    left = node.binder.release([value for value in bound if value.name not in names])
    made[able[0]] = node.binder.tie(made[able[0]], left)
    if copies and len(able) > 1:  # no result is there before the operation is done
        done = [node.emitter.first(made[able[0]])]
        for place in able[1:]:
            made[place] = node.binder.tie(made[place], done)
    return made


class _Sources:
    """What results can be made of, by element type and size."""

    def __init__(self, bound: Sequence[Value]) -> None:
        self._equal: dict[tuple[int, int], list[Value]] = {}
        self._ordered: dict[int, list[Value]] = {}
        for value in bound:
            code, count = value.type.element.code, value.type.elements
            if count:
                self._equal.setdefault((code, count), []).append(value)
                self._ordered.setdefault(code, []).append(value)
        for values in self._ordered.values():
            values.sort(key=lambda value: -value.type.elements)

    def nearest(self, result: Tensor, place: int) -> Value | None:
        """One of the same element type and size, in turn among equals; else the largest that can be cut or
        repeated.
        """
        if not result.elements:
            return None
        equal = self._equal.get((result.element.code, result.elements))
        if equal:
            return equal[place % len(equal)]
        able = self._ordered.get(result.element.code, ())
        return next((value for value in able if _can_fit(value.type, result)), None)


def _can_fit(made: Tensor, wanted: Tensor) -> bool:
    return made.elements > wanted.elements or wanted.elements % made.elements == 0


def _fitted(emitter: Emitter, value: Value, result: Tensor) -> Value:
    count = value.type.elements
    if count > result.elements:
        value = emitter.front(emitter.reshape(value, (count,)), (result.elements,))
    if count < result.elements:
        return emitter.stretched(value, result.shape)
    return emitter.reshape(value, result.shape)


MOVES: dict[str, Recipe] = {
    "transpose": _transpose,
    **dict.fromkeys(("broadcast_in_dim", "broadcast"), _broadcast),
    "concatenate": _concatenate,
    "slice": _slice,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    **dict.fromkeys(("reverse", "copy"), _reverse),
    **dict.fromkeys(
        (
            "reshape",
            "bitcast",
            "bitcast_convert",
            "tuple",
            "get_tuple_element",
            "optimization_barrier",
            "after_all",
            "create_token",
            "constant",
            "iota",
            "parameter",
            "partition_id",
            "replica_id",
        ),
        passed_on,
    ),
}
"""Operation name -> recipe."""


# Tensor types of a graph as those of a program that runs: extents known, element types StableHLO has.

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
