"""Random quantised types, as MLIR accepts them."""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st

from hespas.graph.quantised import QuantisedType, parse_quantised

__all__ = ["quantised_types", "types_of_shape"]

_EXPRESSED = ("f32", "bf16", "f16")


@st.composite
def types_of_shape(draw: st.DrawFn, shape: tuple[int, ...], *, of_values: bool = False) -> QuantisedType:
    """A uniform type for a tensor of a shape, with one scale, one per index of a dimension, or one per block.

    ``of_values``: of the widths that StableHLO's operations compute with, and without blocks.
    """
    odd = () if of_values else (3, 5, 6, 7)
    bits = draw(st.sampled_from((2, 4, 8, 16, 32, *odd)))
    is_signed = draw(st.booleans())
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
    if draw(st.booleans()):
        low, high = low + 1, high - draw(st.integers(0, 1)) if high - low > 2 else high
    forms = ["tensor", *(["axis"] if shape else []), *(["blocks"] if shape and not of_values else [])]
    form = draw(st.sampled_from(forms))
    axes: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    if form == "axis":
        axis = draw(st.integers(0, len(shape) - 1))
        axes, sizes, grid = (axis,), (1,), (shape[axis],)
    elif form == "blocks":
        axes = tuple(range(len(shape)))
        sizes = tuple(
            draw(st.sampled_from([d for d in range(1, extent + 1) if extent % d == 0])) for extent in shape
        )
        if all(size == 1 for size in sizes) and len(sizes) == 1:
            sizes = shape  # a block of one element is a type per index
        grid = tuple(extent // size for extent, size in zip(shape, sizes, strict=True))
    count = prod(grid)
    scale = st.floats(2.0**-10, 2.0**10, allow_nan=False, width=32)
    scales = draw(st.lists(scale, min_size=count, max_size=count))
    points = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
    kind = QuantisedType(
        "uniform",
        f"{'i' if is_signed else 'u'}{bits}",
        draw(st.sampled_from(_EXPRESSED)),
        low,
        high,
        axes,
        sizes,
        grid,
        tuple(scales),
        tuple(points),
    )
    read = parse_quantised(str(kind)) if form == "blocks" else kind  # scales of blocks in the expressed type
    assert read is not None
    return read


@st.composite
def quantised_types(draw: st.DrawFn) -> QuantisedType:
    """A type for some shape, without scales, or calibrated."""
    kind = draw(st.sampled_from(("uniform", "any", "calibrated")))
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    uniform = draw(types_of_shape(shape))
    if kind == "any":
        return QuantisedType(kind, uniform.storage, uniform.expressed, uniform.low, uniform.high)
    if kind == "calibrated":
        low, high = sorted(draw(st.tuples(st.floats(-9, 9), st.floats(-9, 9))))
        return QuantisedType(kind, "", uniform.expressed, low, high)
    return uniform
