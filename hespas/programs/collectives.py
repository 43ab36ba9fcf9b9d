"""Collectives as StableHLO from the types of their operands and results, and who takes part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from hespas.programs.operations import Operator
from hespas.programs.text import Tensor, generic

__all__ = ["collective", "exchanged_axes", "permute", "scaled_axis"]

_Types = tuple[Tensor, ...]
_Groups = Sequence[Sequence[int]]


def collective(op: str, operands: _Types, results: _Types, groups: _Groups) -> Operator | None:
    """How to write a collective, named without dialect, over groups of equal size; sums where it reduces.
    None where types do not say enough, or groups differ in size.
    """
    sizes = {len(group) for group in groups}
    write = _RULES.get(op)
    if len(sizes) != 1 or write is None or not operands or len(operands) != len(results):
        return None
    return write(operands, results, groups)


def permute(operands: _Types, results: _Types, pairs: Sequence[tuple[int, int]]) -> Operator | None:
    """How to write a ``collective_permute`` from sources to targets; None for other than one operand of the
    type of the result.
    """
    if len(operands) != 1 or operands != results or not pairs:
        return None
    attributes = f"source_target_pairs = {_matrix(pairs)}"
    return lambda values: generic("collective_permute", values, results, attributes)


def _matrix(rows: Sequence[Sequence[int]]) -> str:
    text = ", ".join(f"[{', '.join(map(str, row))}]" for row in rows)
    return f"dense<[{text}]> : tensor<{len(rows)}x{len(rows[0])}xi64>"


def _groups(groups: _Groups) -> str:
    return f"replica_groups = {_matrix(groups)}"


def _sum(scalar: Tensor) -> str:
    op = "or" if scalar.is_bool else "add"
    return (
        f"{{ ^bb0(%x: {scalar}, %y: {scalar}): %s = stablehlo.{op} %x, %y : {scalar} "
        f"stablehlo.return %s : {scalar} }}"
    )


def _all_reduce(operands: _Types, results: _Types, groups: _Groups) -> Operator | None:
    if operands != results or len({each.element for each in operands}) > 1:
        return None
    region = _sum(operands[0].scalar)
    return lambda values: generic("all_reduce", values, results, _groups(groups), region)


def scaled_axis(small: Tensor, large: Tensor, factor: int) -> int | None:
    """The dimension along which one type is ``factor`` times the other, None where it is not."""
    if small.element is not large.element or len(small.shape) != len(large.shape):
        return None
    for axis, (less, more) in enumerate(zip(small.shape, large.shape, strict=True)):
        rest = small.shape[:axis] + small.shape[axis + 1 :] == large.shape[:axis] + large.shape[axis + 1 :]
        if rest and less * factor == more:
            return axis
    return None


def exchanged_axes(operand: Tensor, result: Tensor, count: int) -> tuple[int, int] | None:
    """The dimension that an all-to-all of ``count`` ranks splits, and the one it joins; None for none."""
    if operand.element is not result.element or len(operand.shape) != len(result.shape):
        return None
    for split, extent in enumerate(operand.shape):
        for joined in range(len(operand.shape)):
            shape = list(operand.shape)
            if extent % count == 0:
                shape[split] //= count
                shape[joined] *= count
                if tuple(shape) == result.shape:
                    return split, joined
    return None


def _all_gather(operands: _Types, results: _Types, groups: _Groups) -> Operator | None:
    axes = {scaled_axis(part, whole, len(groups[0])) for part, whole in zip(operands, results, strict=True)}
    axis = axes.pop()
    if axes or axis is None:
        return None
    attributes = f"all_gather_dim = {axis} : i64, {_groups(groups)}"
    return lambda values: generic("all_gather", values, results, attributes)


def _reduce_scatter(operands: _Types, results: _Types, groups: _Groups) -> Operator | None:
    axis = scaled_axis(results[0], operands[0], len(groups[0])) if len(operands) == 1 else None
    if axis is None:
        return None
    attributes, region = f"scatter_dimension = {axis} : i64, {_groups(groups)}", _sum(operands[0].scalar)
    return lambda values: generic("reduce_scatter", values, results, attributes, region)


def _all_to_all(operands: _Types, results: _Types, groups: _Groups) -> Operator | None:
    count = len(groups[0])
    axes = exchanged_axes(operands[0], results[0], count) if len(operands) == 1 else None
    if axes is None:
        return None
    attributes = (
        f"split_dimension = {axes[0]} : i64, concat_dimension = {axes[1]} : i64, "
        f"split_count = {count} : i64, {_groups(groups)}"
    )
    return lambda values: generic("all_to_all", values, results, attributes)


def _broadcast(operands: _Types, results: _Types, groups: _Groups) -> Operator | None:
    if len(operands) != 1 or operands != results:
        return None
    result = results[0]
    return lambda values: generic("collective_broadcast", values, [result], _groups(groups))


_RULES: Mapping[str, Callable[[_Types, _Types, _Groups], Operator | None]] = MappingProxyType(
    {
        "all_gather": _all_gather,
        "all_reduce": _all_reduce,
        "all_to_all": _all_to_all,
        "collective_broadcast": _broadcast,
        "reduce_scatter": _reduce_scatter,
    }
)
