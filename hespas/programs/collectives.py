"""StableHLO collectives, written from replica groups and the types of operands and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hespas.programs.text import Operator, Tensor, Types, binary_region, generic

__all__ = ["collective", "exchanged_axes", "permute", "scaled_axis"]

_Groups = Sequence[Sequence[int]]
_CollectiveRule = Callable[[Types, Types, _Groups], Operator | None]
_RULES: dict[str, _CollectiveRule] = {}


def _rule(name: str) -> Callable[[_CollectiveRule], _CollectiveRule]:
    """Return a decorator that registers a function as the writer of a collective."""

    def register(rule: _CollectiveRule) -> _CollectiveRule:
        _RULES[name] = rule
        return rule

    return register


def collective(op: str, operands: Types, results: Types, groups: _Groups) -> Operator | None:
    """Return a writer of the collective ``op`` (named without dialect). Return None if the attributes cannot
    be inferred from the types, or if groups differ in size.

    Reducing collectives use addition.
    """
    sizes = {len(group) for group in groups}
    write = _RULES.get(op)
    if len(sizes) != 1 or write is None or not operands or len(operands) != len(results):
        return None
    return write(operands, results, groups)


def permute(operands: Types, results: Types, pairs: Sequence[tuple[int, int]]) -> Operator | None:
    """Return a writer of a ``collective_permute`` with pairs of source and target ranks.

    Return None unless it has one operand whose type is the type of the result.
    """
    if len(operands) != 1 or operands != results or not pairs:
        return None
    attributes = f"source_target_pairs = {_matrix(pairs)}"
    return lambda values: generic("collective_permute", values, results, attributes)


def _matrix(rows: Sequence[Sequence[int]]) -> str:
    text = ", ".join(f"[{', '.join(map(str, row))}]" for row in rows)
    return f"dense<[{text}]> : tensor<{len(rows)}x{len(rows[0])}xi64>"


def _replica_groups(groups: _Groups) -> str:
    return f"replica_groups = {_matrix(groups)}"


def _sum_region(scalar: Tensor) -> str:
    return binary_region(scalar, "or" if scalar.is_bool else "add")


@_rule("all_reduce")
def _all_reduce(operands: Types, results: Types, groups: _Groups) -> Operator | None:
    if operands != results or len({operand.element for operand in operands}) > 1:
        return None
    region = _sum_region(operands[0].scalar)
    return lambda values: generic("all_reduce", values, results, _replica_groups(groups), region)


def scaled_axis(small: Tensor, large: Tensor, factor: int) -> int | None:
    """Return the only dimension in which ``small`` and ``large`` differ, if ``large`` is ``factor`` times as
    long there; else None.
    """
    if small.element is not large.element or len(small.shape) != len(large.shape):
        return None
    for axis, (less, more) in enumerate(zip(small.shape, large.shape, strict=True)):
        rest = small.shape[:axis] + small.shape[axis + 1 :] == large.shape[:axis] + large.shape[axis + 1 :]
        if rest and less * factor == more:
            return axis
    return None


def exchanged_axes(operand: Tensor, result: Tensor, count: int) -> tuple[int, int] | None:
    """Return the split and the concatenated dimension of an all-to-all over ``count`` ranks; None if the
    shapes do not fit.
    """
    if operand.element is not result.element or len(operand.shape) != len(result.shape):
        return None
    for split, extent in enumerate(operand.shape):
        for concatenated in range(len(operand.shape)):
            shape = list(operand.shape)
            if extent % count == 0:
                shape[split] //= count
                shape[concatenated] *= count
                if tuple(shape) == result.shape:
                    return split, concatenated
    return None


@_rule("all_gather")
def _all_gather(operands: Types, results: Types, groups: _Groups) -> Operator | None:
    axes = {scaled_axis(part, whole, len(groups[0])) for part, whole in zip(operands, results, strict=True)}
    axis = axes.pop()
    if axes or axis is None:
        return None
    attributes = f"all_gather_dim = {axis} : i64, {_replica_groups(groups)}"
    return lambda values: generic("all_gather", values, results, attributes)


@_rule("reduce_scatter")
def _reduce_scatter(operands: Types, results: Types, groups: _Groups) -> Operator | None:
    axis = scaled_axis(results[0], operands[0], len(groups[0])) if len(operands) == 1 else None
    if axis is None:
        return None
    attributes, region = (
        f"scatter_dimension = {axis} : i64, {_replica_groups(groups)}",
        _sum_region(operands[0].scalar),
    )
    return lambda values: generic("reduce_scatter", values, results, attributes, region)


@_rule("all_to_all")
def _all_to_all(operands: Types, results: Types, groups: _Groups) -> Operator | None:
    count = len(groups[0])
    axes = exchanged_axes(operands[0], results[0], count) if len(operands) == 1 else None
    if axes is None:
        return None
    attributes = (
        f"split_dimension = {axes[0]} : i64, concat_dimension = {axes[1]} : i64, "
        f"split_count = {count} : i64, {_replica_groups(groups)}"
    )
    return lambda values: generic("all_to_all", values, results, attributes)


@_rule("collective_broadcast")
def _broadcast(operands: Types, results: Types, groups: _Groups) -> Operator | None:
    if len(operands) != 1 or operands != results:
        return None
    result = results[0]
    return lambda values: generic("collective_broadcast", values, [result], _replica_groups(groups))
