"""Shape inference of operations that move data, generate values or call libraries (sort, fft, cholesky, batch
norm).

The rules are as in :mod:`~hespas.converters.hlo.inference`.
"""

from __future__ import annotations

import re
from math import prod

from hespas.converters.hlo.attributes import integer, is_true
from hespas.converters.hlo.inference import (
    COMPLEX_PARTS,
    Rule,
    TypedInstruction,
    agree,
    array_of,
    bits_of,
    check,
    check_reducer,
    listed,
    one_or_tuple,
    tuple_of,
    with_dims,
)
from hespas.converters.hlo.module import ArrayShape, Shape
from hespas.graph import DYNAMIC, find_dtype

__all__ = ["MOVING_RULES"]

_SLICE = re.compile(r"\[(\d{1,18}):(\d{1,18})(?::(\d{1,18}))?\]")
_S32 = Shape(ArrayShape(find_dtype("s32"), "s32", ()))
_RNG_STATE = Shape(ArrayShape(find_dtype("u64"), "u64", (2,)))


def _broadcast(op: TypedInstruction) -> Shape:
    given = op.array(0)
    if op.result is None:
        return with_dims(given, (*op.ints("dimensions"), *given.dims))
    made, dims = array_of(op.result, "the result"), op.ints("dimensions")
    if len(dims) != len(given.dims) or any(not 0 <= dim < len(made.dims) for dim in dims):
        raise ValueError(
            f"expected one dimension of the result for each dimension of the operand, found {dims}"
        )
    extents = [made.dims[dim] for dim in dims]
    check(agree(extents, given.dims), f"the operand's extents in dimensions {list(dims)}", given, made)
    return with_dims(given, made.dims)


def _elements(array: ArrayShape) -> int | None:
    return None if DYNAMIC in array.dims else prod(array.dims)


def _reshape(op: TypedInstruction) -> Shape:
    given, made = op.array(0), array_of(op.stated(), "the result")
    before, after = _elements(given), _elements(made)
    fits = before is None or after is None or before == after
    check(fits, "as many elements as the operand has", given, made)
    return with_dims(given, made.dims)


def _bitcast(op: TypedInstruction) -> Shape:
    """Infer the result of a bitcast, another view of the same bytes. As in XLA, the sizes of operand and
    result are compared if layouts are assigned. They are not compared for tiled layouts, which may be padded,
    and for packed small types.
    """
    result, given = op.stated(), op.operands[0]
    before, after = given.array, result.array
    if before is None or after is None:
        return result
    bits = bits_of(before), bits_of(after)
    counts = _elements(before), _elements(after)
    layouts = before.layout + after.layout
    if None in counts or min(bits) < 8 or not layouts or "T(" in layouts or "E(" in layouts:
        return result
    fits = (counts[0] or 0) * bits[0] == (counts[1] or 0) * bits[1]
    check(fits, "as many bytes as the operand has", before, after)
    return result


def _transpose(op: TypedInstruction) -> Shape:
    given = op.array(0)
    order = op.ints("dimensions")
    if sorted(order) != list(range(len(given.dims))):
        raise ValueError(
            f"expected dimensions to be a permutation of 0..{len(given.dims) - 1}, found {order}"
        )
    return with_dims(given, [given.dims[dim] for dim in order])


def _reverse(op: TypedInstruction) -> Shape:
    listed(op, "dimensions", len(op.array(0).dims))
    return op.operands[0]


def _concatenate(op: TypedInstruction) -> Shape:
    first = op.array(0)
    along = op.dimension("dimensions", len(first.dims))
    total = 0
    for index in range(len(op.operands)):
        part = op.array(index)
        fits = len(part.dims) == len(first.dims) and agree(
            (*first.dims[:along], *first.dims[along + 1 :]), (*part.dims[:along], *part.dims[along + 1 :])
        )
        check(fits, f"operands that differ in dimension {along} only", first, part)
        total = DYNAMIC if DYNAMIC in (total, part.dims[along]) else total + part.dims[along]
    return with_dims(first, (*first.dims[:along], total, *first.dims[along + 1 :]))


def _slice(op: TypedInstruction) -> Shape:
    given = op.array(0)
    text = "".join(op.attributes.get("slice", "").split())
    ranges = _SLICE.findall(text)
    if len(ranges) != len(given.dims) or text.count("[") != len(ranges):
        raise ValueError(
            f"expected slice to have {len(given.dims)} ranges such as [0:8:2], found {text[:60]}"
        )
    dims: list[int] = []
    for extent, (start, limit, stride) in zip(given.dims, ranges, strict=True):
        first, end, step = int(start), int(limit), int(stride or 1)
        fits = first <= end and step > 0 and (extent == DYNAMIC or end <= extent)
        check(fits, f"ranges within the operand, not [{start}:{limit}:{step}]", given)
        dims.append(-(-(end - first) // step))
    return with_dims(given, dims)


def _check_indices(op: TypedInstruction, first: int, rank: int) -> None:
    """Check the start indices of a dynamic slice, which are the operands from number ``first`` on. They are
    one scalar per dimension, or one vector. ``rank`` is the number of dimensions.
    """
    given = [op.array(index) for index in range(first, len(op.operands))]
    if len(given) == 1 and len(given[0].dims) == 1:
        check(agree(given[0].dims, (rank,)), f"{rank} start indices", given[0])
        return
    if len(given) != rank:
        raise ValueError(f"expected {rank} start indices, found {len(given)}")
    for start_index in given:
        check(not start_index.dims, "start indices that are scalars", start_index)


def _dynamic_slice(op: TypedInstruction) -> Shape:
    given, sizes = op.array(0), op.ints("dynamic_slice_sizes")
    _check_indices(op, 1, len(given.dims))
    fits = len(sizes) == len(given.dims) and all(
        size <= extent or extent == DYNAMIC for size, extent in zip(sizes, given.dims, strict=True)
    )
    check(fits, f"an operand that holds a slice of {list(sizes)}", given)
    return with_dims(given, sizes)


def _dynamic_update_slice(op: TypedInstruction) -> Shape:
    given, update = op.array(0), op.array(1)
    _check_indices(op, 2, len(given.dims))
    fits = len(given.dims) == len(update.dims) and all(
        part <= whole or DYNAMIC in (part, whole) for part, whole in zip(update.dims, given.dims, strict=True)
    )
    check(fits, "an update that lies within the operand", given, update)
    return op.operands[0]


def _pad(op: TypedInstruction) -> Shape:
    given = op.array(0)
    check(not op.array(1).dims, "a scalar to pad with", op.operands[1])
    text = op.attributes.get("padding", "")
    rows = [[integer(item) for item in part.split("_")] for part in text.split("x")] if text else []
    if len(rows) != len(given.dims) or any(not 2 <= len(row) <= 3 for row in rows):
        raise ValueError(f"expected padding such as 0_1x1_0_2 for {len(given.dims)} dimensions")
    dims: list[int] = []
    for extent, row in zip(given.dims, rows, strict=True):
        between = row[2] if len(row) == 3 else 0
        made = extent + row[0] + row[1] + max(extent - 1, 0) * between
        check(extent == DYNAMIC or (made >= 0 and between >= 0), "padding that leaves something", given)
        dims.append(DYNAMIC if extent == DYNAMIC else made)
    return with_dims(given, dims)


def _index_dims(op: TypedInstruction, operand: int, count_key: str) -> list[int]:
    """Return the extents of an array of index vectors, without the dimension along which the vectors lie."""
    table = op.array(operand)
    along = op.number("index_vector_dim", len(table.dims))
    dims = [*table.dims, 1] if along == len(table.dims) else list(table.dims)
    check(0 <= along < len(dims), f"a dimension {along} that an index lies along", table)
    index_map = op.ints(count_key)
    check(dims[along] in (len(index_map), DYNAMIC), f"{len(index_map)} numbers in each index", table)
    return dims[:along] + dims[along + 1 :]


def _gather(op: TypedInstruction) -> Shape:
    given = op.array(0)
    rows = _index_dims(op, 1, "start_index_map")
    sizes, offsets = op.ints("slice_sizes"), op.ints("offset_dims")
    gone = {*op.ints("collapsed_slice_dims"), *op.ints("operand_batching_dims")}
    fits = len(sizes) == len(given.dims) == len(offsets) + len(gone) and all(
        0 <= size <= extent or extent == DYNAMIC for size, extent in zip(sizes, given.dims, strict=True)
    )
    check(fits, f"an operand that holds slices of {list(sizes)}", given)
    if any(dim not in range(len(sizes)) or sizes[dim] > 1 for dim in gone):
        raise ValueError(f"expected slices of extent 1 in dimensions {sorted(gone)}, found {list(sizes)}")
    windows = iter([size for dim, size in enumerate(sizes) if dim not in gone])
    batches = iter(rows)
    inside = set(offsets)
    rank = len(offsets) + len(rows)
    if len(inside) != len(offsets) or any(dim not in range(rank) for dim in offsets):
        raise ValueError(f"expected offset_dims to name some of {rank} dimensions, found {offsets}")
    return with_dims(given, [next(windows if dim in inside else batches) for dim in range(rank)])


def _scatter(op: TypedInstruction) -> Shape:
    count = len(op.operands) // 2
    if len(op.operands) != 2 * count + 1 or not count:
        raise ValueError(f"expected N inputs, the indices and N updates, found {len(op.operands)} operands")
    rows = _index_dims(op, count, "scatter_dims_to_operand_dims")
    inside = listed(op, "update_window_dims", len(op.array(count + 1).dims))
    gone = {*op.ints("inserted_window_dims"), *op.ints("input_batching_dims")}
    for index in range(count):
        given, update = op.array(index), op.array(count + 1 + index)
        whole = [extent for dim, extent in enumerate(given.dims) if dim not in gone]
        fits = len(inside) + len(gone) == len(given.dims) and len(update.dims) == len(rows) + len(inside)
        check(fits, "updates with a dimension for each of window and indices", given, update)
        parts = [update.dims[dim] for dim in inside]
        fits = all(a <= b or DYNAMIC in (a, b) for a, b in zip(parts, whole, strict=True))
        check(fits, "updates that lie within the operand", given, update)
        along = [extent for dim, extent in enumerate(update.dims) if dim not in inside]
        check(agree(along, rows), "an update for each index", op.array(count), update)
    check_reducer(op.callee("to_apply"), op.operands[:count])
    return one_or_tuple(op.operands[:count])


def _sort(op: TypedInstruction) -> Shape:
    first = op.array(0)
    for index in range(1, len(op.operands)):
        check(agree(first.dims, op.array(index).dims), "operands of equal extents", *op.operands[:2])
    op.dimension("dimensions", max(len(first.dims), 1), max(len(first.dims) - 1, 0))
    compare = op.callee("to_apply")
    if len(compare.parameters) != 2 * len(op.operands):
        count = len(compare.parameters)
        raise ValueError(f"expected a comparison of {2 * len(op.operands)} values, found {count}")
    for part in (*compare.parameters, compare.result):
        if part is not None:
            check(part.array is not None and not part.array.dims, "a comparison of scalars", part)
    return one_or_tuple(op.operands)


def _map(op: TypedInstruction) -> Shape:
    first = op.array(0)
    for index in range(1, len(op.operands)):
        other = op.array(index)
        check(agree(first.dims, other.dims), "operands of equal extents", first, other)
    body = op.callee("to_apply")
    made = array_of(body.result, "what the computation makes")
    if len(body.parameters) != len(op.operands):
        count = len(body.parameters)
        raise ValueError(f"expected a computation of {len(op.operands)} parameters, found {count}")
    for part in (*body.parameters, body.result):
        if part is not None:
            check(part.array is not None and not part.array.dims, "a computation of scalars", part)
    return with_dims(first, first.dims, made.element)


def _scalar(op: TypedInstruction) -> Shape:
    """Return the shape of a scalar with the element type that the program states for the result."""
    return _S32 if op.result is None else with_dims(array_of(op.result, "the result"), ())


def _iota(op: TypedInstruction) -> Shape:
    made = array_of(op.stated(), "the result")
    op.dimension("iota_dimension", len(made.dims))
    return op.stated()


def _rng(op: TypedInstruction) -> Shape:
    for index in (0, 1):
        check(not op.array(index).dims, "scalar parameters of the distribution", op.operands[index])
    return op.stated()


def _rng_bits(op: TypedInstruction) -> Shape:
    result = op.stated()
    if result.elements is None:
        return result
    check(len(result.elements) == 2, "a state and random bits", result)
    return tuple_of((op.operands[0], result.elements[1]))


def _fft(op: TypedInstruction) -> Shape:
    given, lengths = op.array(0), op.ints("fft_length")
    kind = op.attributes.get("fft_type", "FFT")
    rank = len(lengths)
    check(1 <= rank <= 3 and rank <= len(given.dims), f"an operand with {rank} dimensions", given)
    if kind not in {"RFFT", "IRFFT"}:
        return op.operands[0]
    last = lengths[-1] // 2 + 1
    inner = lengths if kind == "RFFT" else (*lengths[:-1], last)
    empty = kind == "IRFFT" and not lengths[-1] and not given.dims[-1]
    check(empty or agree(given.dims[-rank:], inner), f"innermost extents {list(inner)}", given)
    made = lengths[-1] if kind == "IRFFT" else last if lengths[-1] else given.dims[-1]
    if kind == "IRFFT":
        return with_dims(given, (*given.dims[:-1], made), COMPLEX_PARTS.get(given.element, given.element))
    return with_dims(given, (*given.dims[:-1], made), "c128" if given.element == "f64" else "c64")


def _square(array: ArrayShape) -> None:
    fits = len(array.dims) > 1 and agree(array.dims[-1:], array.dims[-2:-1])
    check(fits, "square matrices", array)


def _cholesky(op: TypedInstruction) -> Shape:
    _square(op.array(0))
    return op.operands[0]


def _triangular_solve(op: TypedInstruction) -> Shape:
    matrix, right = op.array(0), op.array(1)
    _square(matrix)
    check(len(matrix.dims) == len(right.dims), "equally many dimensions", matrix, right)
    shared = -2 if is_true(op.attributes.get("left_side", "false")) else -1
    fits = agree((matrix.dims[-1],), (right.dims[shared],)) and agree(matrix.dims[:-2], right.dims[:-2])
    check(fits, "right hand sides that fit the matrices", matrix, right)
    return op.operands[1]


def _topk(op: TypedInstruction) -> Shape:
    given, count = op.array(0), op.number("k", -1)
    check(bool(given.dims) and 0 <= count <= max(given.dims[-1], 0), f"{count} values to take", given)
    dims = (*given.dims[:-1], count)
    return tuple_of((with_dims(given, dims), with_dims(given, dims, "s32")))


def _batch_norm(op: TypedInstruction) -> Shape:
    """Infer the result of batch-norm-training and -grad: an array of the operand's shape, and two arrays with
    one number per feature.
    """
    given = op.array(0)
    features = given.dims[op.dimension("feature_index", len(given.dims))]
    for index in range(1, len(op.operands)):
        other = op.array(index)
        fits = len(other.dims) == 1 and agree(other.dims, (features,))
        check(fits or agree(other.dims, given.dims), f"{features} features", other)
    listed = with_dims(op.array(1), (features,))
    return tuple_of((op.operands[0], listed, listed))


def _dynamic_reshape(op: TypedInstruction) -> Shape:
    rank = len(array_of(op.stated(), "the result").dims)
    if len(op.operands) != rank + 1:
        raise ValueError(f"expected {rank} sizes, found {len(op.operands) - 1}")
    return _reshape(op)


MOVING_RULES: dict[str, Rule] = {
    "broadcast": _broadcast,
    "reshape": _reshape,
    "dynamic-reshape": _dynamic_reshape,
    "bitcast": _bitcast,
    "transpose": _transpose,
    "reverse": _reverse,
    "concatenate": _concatenate,
    "slice": _slice,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "pad": _pad,
    "gather": _gather,
    "scatter": _scatter,
    "sort": _sort,
    "map": _map,
    "iota": _iota,
    "rng": _rng,
    "rng-bit-generator": _rng_bits,
    "rng-get-and-update-state": lambda _: _RNG_STATE,
    "fft": _fft,
    "cholesky": _cholesky,
    "triangular-solve": _triangular_solve,
    "topk": _topk,
    "batch-norm-training": _batch_norm,
    "batch-norm-grad": _batch_norm,
    "batch-norm-inference": lambda op: _batch_norm(op).element(0),
    "get-dimension-size": _scalar,
    "set-dimension-size": lambda op: op.operands[0],
}
"""Rules for the result shape by opcode."""
