"""Costs of operations of the host, where those are the work: a run without a device, or an execution trace.

Every call is recorded, the outer ones too, so each cost stands once, on the operation that answers for it: of
those that the table costs with all they call, the outermost; of those it costs by their parts, the innermost
where no part has a cost. What is called inside them costs nothing of its own, nor do views, the bookkeeping
of the autograd engine, and calls around operations with a cost. Any other operation is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hespas.converters.measured_ops.owners import NOT_RECORDED
from hespas.converters.measured_ops.spread import EventCosts
from hespas.costs.aten import VIEWS, aten_cost, find_aten_rule, is_composite
from hespas.costs.aten.call import AtenCost
from hespas.costs.operation import Contraction
from hespas.graph import ContractionTable, Csr, Diagnostics, HostOps, OpClass, StringTable, TensorTypesBuilder
from hespas.graph.columns import BoolArray, FloatArray, IntArray

__all__ = ["host_costs"]


_BOOKKEEPING = re.compile(
    r"autograd::engine::.*|torch::autograd::\w+|\w+Backward\d+|detach_?|\[pytorch\|.*|## .* ##", re.DOTALL
)
_BY_PARTS_ALONE = frozenset({"aten::to", "aten::contiguous", "aten::dropout"})
"""Operations that do nothing, or call what does it; recorded without that, they did nothing."""

_LARGEST_INT64 = (1 << 63) - 1
_MOST_NAMED = 10


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Roles:
    """Which operations bear a cost, cost nothing of their own, and communicate; of others nobody knows.

    ``undescribed`` are in the table, and the trace does not say what they were given.
    """

    bears: BoolArray
    idle: BoolArray
    communicates: BoolArray
    undescribed: BoolArray


def host_costs(
    host: HostOps,
    strings: StringTable,
    diagnostics: Diagnostics,
    where: str,
    *,
    communicates: BoolArray,
    touches: BoolArray | None = None,
) -> EventCosts:
    """The cost of each operation of the host, shape ``(operations,)``; NaN where it is unknown.

    ``communicates`` marks operations whose time is the network's: nothing is known of them, and nothing is
    done around or inside them. ``touches`` marks those that have tensors, where that is known: others do
    nothing. Diagnostics say what has no cost. O(operations log depth).
    """
    roles = _roles(host, strings, communicates, touches)
    bears, idle = roles.bears, roles.idle
    rows = np.flatnonzero(bears)
    columns = (host.name_row, host.shapes_row, host.dtype_row, host.strides_row, host.values_row)
    keys = np.stack([column[rows].astype(np.int64) for column in columns])
    distinct, place = np.unique(keys, axis=1, return_inverse=True)
    place = place.reshape(-1)
    priced: list[AtenCost] = []
    for name, shapes, types, strides, values in distinct.T.tolist():
        texts = strings[strides], strings[values]
        priced.append(
            aten_cost(strings[name], strings[shapes], strings[types], strides=texts[0], values=texts[1])
        )
    found = _placed(len(host), rows, place, priced, idle)
    _report(host, strings, roles, found, (diagnostics, where))
    return found


def _roles(host: HostOps, strings: StringTable, communicates: BoolArray, touches: BoolArray | None) -> _Roles:
    names, place = np.unique(host.name_row, return_inverse=True)
    texts = [strings[int(row)] for row in names]

    def named(flags: Sequence[bool]) -> BoolArray:
        found: BoolArray = np.array(flags, np.bool_)[place.reshape(-1)]
        return found

    in_table = named([find_aten_rule(text) is not None for text in texts]) & ~communicates
    by_parts = in_table & named([is_composite(text) for text in texts])
    described = host.shapes_row != 0
    whole = in_table & ~by_parts & described
    whole &= ~_inside(host.parent, whole)
    answered = _inside(host.parent, whole)
    parts = by_parts & described & ~answered & ~_around(host.parent, whole)
    parts &= ~named([text in _BY_PARTS_ALONE for text in texts])
    parts &= ~_around(host.parent, parts)
    bears = whole | parts
    answered |= _inside(host.parent, parts)
    calls = bears | communicates
    wraps = (~in_table | by_parts) & (_around(host.parent, calls) | _inside(host.parent, communicates))
    kept = named([text in VIEWS or _BOOKKEEPING.fullmatch(text) is not None for text in texts])
    copies = named([text in _BY_PARTS_ALONE for text in texts])
    if touches is not None:
        kept |= ~touches & ~in_table
    idle = ~bears & ~communicates & (answered | wraps | kept | copies)
    return _Roles(bears=bears, idle=idle, communicates=communicates, undescribed=in_table & ~described)


def _inside(parent: NDArray[np.integer], marked: BoolArray) -> BoolArray:
    """What is called, directly or not, by something marked."""
    found, jump = _above(parent, marked), parent.astype(np.int64)
    while (jump >= 0).any():
        found |= _above(jump, found)
        jump = np.where(jump >= 0, jump[np.maximum(jump, 0)], -1)
    return found


def _above(jump: NDArray[np.integer], marked: BoolArray) -> BoolArray:
    """Whether what a row leads to is marked."""
    if not len(jump):
        return marked.copy()
    found: BoolArray = (jump >= 0) & marked[np.maximum(jump, 0)]
    return found


def _around(parent: NDArray[np.integer], marked: BoolArray) -> BoolArray:
    """What calls, directly or not, something marked."""
    found = np.zeros(len(parent), np.bool_)
    found[parent[marked & (parent >= 0)]] = True
    jump = parent.astype(np.int64)
    while (jump >= 0).any():
        found[jump[found & (jump >= 0)]] = True
        jump = np.where(jump >= 0, jump[np.maximum(jump, 0)], -1)
    return found


def _placed(
    count: int, rows: IntArray, place: IntArray, priced: Sequence[AtenCost], idle: BoolArray
) -> EventCosts:
    """Columns of all operations, from the costs of the distinct ones."""
    nothing = np.where(idle, 0.0, np.nan)

    def figures(name: str) -> FloatArray:
        column = nothing.copy()
        column[rows] = np.array([getattr(each.cost, name) for each in priced], np.float64)[place]
        return column

    op_class = np.where(idle, int(OpClass.FREE), int(OpClass.UNKNOWN)).astype(np.uint8)
    op_class[rows] = np.array([each.cost.op_class for each in priced], np.uint8)[place]
    rate = np.full(count, -1, np.int16)
    rate[rows] = np.array([each.cost.rate_dtype for each in priced], np.int16)[place]
    types = TensorTypesBuilder()
    ends = [
        Csr.from_lists([[types.add(each.dtype, each.shape) for each in side] for side in sides])
        for sides in ([each.operands for each in priced], [each.results for each in priced])
    ]
    operands, results = (_spread(side.take(place), rows, count) for side in ends)
    return EventCosts(
        op_class=op_class,
        flops=figures("flops"),
        useful_flops=figures("useful_flops"),
        transcendentals=figures("transcendentals"),
        bytes_read=figures("bytes_read"),
        bytes_written=figures("bytes_written"),
        rate_dtype=rate,
        contractions=_contractions(rows, place, priced),
        types=types.build(),
        operands=operands,
        results=results,
    )


def _spread(sides: Csr, rows: IntArray, count: int) -> Csr:
    return Csr.from_pairs(rows[sides.row_ids], sides.values, count)


def _contractions(rows: IntArray, place: IntArray, priced: Sequence[AtenCost]) -> ContractionTable:
    """The matrix products of all operations."""
    listed: list[Contraction] = []
    of_key: list[list[int]] = []
    for each in priced:
        rows_of = each.cost.contractions
        fitting = [row for row in rows_of if max(row.batch, row.m, row.n, row.k) <= _LARGEST_INT64]
        of_key.append(list(range(len(listed), len(listed) + len(fitting))))
        listed.extend(fitting)
    chosen = Csr.from_lists(of_key).take(place)
    empty = ContractionTable.empty()
    columns = {
        name: np.array([getattr(row, name) for row in listed], getattr(empty, name).dtype)[chosen.values]
        for name in ("batch", "m", "n", "k", "flops", "useful_flops", "lhs", "rhs", "accumulator", "products")
    }
    return replace(empty, node=rows[chosen.row_ids].astype(np.int32), **columns)


def _report(
    host: HostOps, strings: StringTable, roles: _Roles, found: EventCosts, told: tuple[Diagnostics, str]
) -> None:
    """Say what has no cost, and what was taken to have none of its own."""
    diagnostics, where = told
    unknown = ~roles.bears & ~roles.idle & ~roles.communicates
    unclear = roles.bears & np.isnan(found.flops + found.bytes_read + found.bytes_written)
    unclear |= unknown & roles.undescribed
    for mask, code, message in (
        (unknown & ~unclear, "measured-ops.unknown-op", "operations without a row in the cost table"),
        (unclear, "measured-ops.inputs-not-recorded", NOT_RECORDED),
    ):
        named = _names(host, strings, mask)
        diagnostics.warning(code, where, f"{message}: {named}", count=int(mask.sum()))
    diagnostics.info(
        "measured-ops.calls", where,
        "calls around operations with a cost, parts of them, views and bookkeeping cost nothing themselves",
        count=int(roles.idle.sum()),
    )  # fmt: skip


def _names(host: HostOps, strings: StringTable, mask: BoolArray) -> str:
    rows, counts = np.unique(host.name_row[mask], return_counts=True)
    top = np.argsort(-counts, kind="stable")[:_MOST_NAMED].tolist()
    return ", ".join(f"{strings[int(rows[at])][:80]} {int(counts[at]):,} x" for at in top)
