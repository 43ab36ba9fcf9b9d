"""Microbenchmarks of collectives and messages: each kind at each size, in sequence or all at once.

A size is that of the whole buffer, as in benchmarks of communication libraries: an all-gather of S bytes over
N ranks has a payload of S / N as defined by Chakra. Buffers have a whole number of elements of every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from hespas.generators.spec import REDUCES, Account, cuts_of
from hespas.graph import (
    CollectiveKind,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    Workload,
    find_dtype,
)
from hespas.graph.errors import UsageError
from hespas.graph.groups import GroupSet, StridedGroups

__all__ = ["KINDS", "CollectiveBenchmark", "parse_groups", "parse_sizes"]

_COLLECTIVES: Mapping[str, CollectiveKind] = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "reduce": CollectiveKind.REDUCE,
}
KINDS = (*_COLLECTIVES, "permute", "ping_pong")
"""Kinds of a benchmark: collectives, a shift around the ring of all ranks, and messages between neighbours in
both directions. ASTRA-sim does not support ``reduce``.
"""

_UNITS: Mapping[str, int] = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MOST_BYTES, _MOST_RANKS, _MOST_CALLS = 1 << 50, 1 << 20, 1 << 18


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse ``1KiB-1GiB`` (doubling from the first to the last size) or ``4KiB,1MiB``.

    Raises ``UsageError`` for other text.
    """
    sizes: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        first = _size(low)
        last = _size(high) if dash else first
        if last < first:
            raise UsageError(f"sizes {part}: the last is smaller than the first", hint=f"write {high}-{low}")
        while first <= last:
            sizes.append(first)
            first *= 2
    return tuple(sizes)


def _size(text: str) -> int:
    number = text.rstrip("BKMGi")
    unit = _UNITS.get(text[len(number) :])
    if unit is None or not (number.isascii() and number.isdigit() and len(number) < len(str(_MOST_BYTES))):
        raise UsageError(f"{text!r} is not a size", hint="write 1024, 64KiB, 1MiB or 1GiB")
    size = int(number) * unit
    if not 0 < size <= _MOST_BYTES:
        raise UsageError(f"{text!r} is not a size of a buffer", hint="give 1 B to 1 PiB")
    return size


def parse_groups(text: str, ranks: int) -> GroupSet:
    """Parse the option for the groups of a benchmark; empty text is one group of all ranks.

    The text is a mesh and the axes along which groups run, such as ``2x4x8:0,2``. Ranks are in row-major
    order on the mesh, and axes are numbered from 0. ``inner`` is the last axis and ``outer`` the first:
    ``8x4:inner`` has eight groups of four ranks. Raises ``UsageError`` for other text.
    """
    if not text:
        return StridedGroups.all_ranks(ranks)
    mesh, _, along = text.partition(":")
    sizes = [_extent(part, text) for part in mesh.split("x")]
    if prod(sizes) != ranks:
        raise UsageError(
            f"groups {text}: a mesh of {prod(sizes):,} ranks, not {ranks:,}",
            hint=f"set `ranks={prod(sizes)}`",
        )
    named = {"inner": len(sizes) - 1, "outer": 0}
    axes = [named[axis] if axis in named else _extent(axis, text) for axis in along.split(",")]
    if len(set(axes)) < len(axes) or max(axes) >= len(sizes):
        raise UsageError(
            f"groups {text}: unknown or repeated axes", hint=f"name axes 0 to {len(sizes) - 1}, each once"
        )
    return StridedGroups.from_mesh(sizes, axes)


def _extent(text: str, whole: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(_MOST_RANKS))):
        raise UsageError(
            f"groups {whole}: {text!r} is not a number", hint="write 8x4:inner, 8x4:outer or 2x4x8:0,2"
        )
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveBenchmark:
    """Benchmark that runs each collective kind at each size [B], ``repeat`` times one after another. If
    ``separate`` is True, operations do not depend on each other.
    """

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: int
    groups: str = ""
    repeat: int = 1
    dtype: str = "bf16"
    separate: bool = False

    @property
    def name(self) -> str:
        """Return the name of the benchmark, with the number of ranks."""
        return f"collectives-{self.ranks}"

    def account(self) -> Account:
        """Return an account with 0 FLOPs and 0 bytes, because the benchmark does not compute."""
        return Account(parameters=0.0, model_flops_per_step=0.0, hardware_flops_per_step=0.0)

    def workload(self) -> Workload:
        """Return the workload of the benchmark. It has one rank class, or up to three for ``ping_pong``:
        ranks that send first, ranks that receive first, and a last rank without a partner.
        """
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise UsageError(
                f"unknown collective {unknown[0]!r}" if unknown else "no collective is given",
                hint=f"choose from {', '.join(KINDS)}",
            )
        if not 2 <= self.ranks <= _MOST_RANKS:
            raise UsageError(
                f"`ranks={self.ranks}`: expected 2 to {_MOST_RANKS:,} ranks", hint="set `ranks=8`"
            )
        calls = len(self.kinds) * len(self.sizes) * self.repeat
        if calls > _MOST_CALLS:
            raise UsageError(
                f"{calls:,} calls (collectives x sizes x repeats) exceed the limit of {_MOST_CALLS:,}",
                hint="choose a smaller `repeat`",
            )
        if find_dtype(self.dtype) is None:
            raise UsageError(f"unknown element type {self.dtype!r}", hint="choose bf16, f16, f32, i8 ...")
        if parse_groups(self.groups, self.ranks).group_size < 2:
            raise UsageError(
                f"groups {self.groups}: each group has one rank", hint="choose an axis of two or more ranks"
            )
        if "ping_pong" not in self.kinds:
            return Workload.spmd(_graph(self, 0), self.ranks)
        classes = [_graph(self, 0), _graph(self, 1)]
        rank_class = np.arange(self.ranks, dtype=np.int32) % 2
        if self.ranks % 2:
            classes.append(_graph(self, 2))
            rank_class[-1] = 2
        return Workload(name=self.name, classes=tuple(classes), rank_class=rank_class)


def _graph(bench: CollectiveBenchmark, role: int) -> OpGraph:
    """Return the program of ranks that send first (role 0), receive first (1), or have no neighbour (2)."""
    nodes = _BenchmarkNodes(bench, GraphBuilder(bench.name), parse_groups(bench.groups, bench.ranks))
    tag = 0
    for kind in bench.kinds:
        for size in bench.sizes:
            for iteration in range(bench.repeat):
                label = f"{kind}/{size}/{iteration}"
                if kind in _COLLECTIVES:
                    nodes.collective(label, _COLLECTIVES[kind], size)
                elif kind == "permute":
                    nodes.message(label, NodeKind.PERMUTE, nodes.ring, size, -1)
                elif role < 2:
                    nodes.ping_pong(label, role, size, tag)
                    tag += 2
    return nodes.builder.build()


class _BenchmarkNodes:
    """Writer of the nodes of a benchmark. Each node depends on the previous one, unless the benchmark is
    ``separate``.
    """

    def __init__(self, bench: CollectiveBenchmark, builder: GraphBuilder, groups: GroupSet) -> None:
        self.builder = builder
        self.ring = Permutation.from_pairs(
            [(r, (r + 1) % bench.ranks) for r in range(bench.ranks)], bench.ranks
        )
        self._request = _neighbours(bench.ranks, 0)
        self._reply = _neighbours(bench.ranks, 1)
        self._chained = not bench.separate
        self._groups = builder.group_set(groups)
        self._members = groups.group_size
        self._type = find_dtype(bench.dtype)
        self._last: list[int] = []

    def _node(
        self, label: str, op: str, kind: NodeKind, op_class: OpClass, elements: tuple[int, ...], *, wait: bool
    ) -> int:
        types = [self.builder.types.add(self._type, (count,)) for count in elements]
        node = self.builder.add_node(
            name_id=self.builder.strings.add(label),
            op_id=self.builder.strings.add(op),
            op_class=op_class,
            kind=kind,
            control_deps=self._last if wait else (),
            operands=[] if kind is NodeKind.RECV else types[:1],
            results=[] if kind is NodeKind.SEND else types[1:],
            flops=0.0,
            transcendentals=0.0,
            bytes_read=0.0 if kind is NodeKind.RECV else self.builder.types.bytes_of(types[0]),
            bytes_written=0.0 if kind is NodeKind.SEND else self.builder.types.bytes_of(types[1]),
        )
        self._last = [node]
        return node

    def _count(self, size_bytes: int, parts: int) -> int:
        """Return the number of elements in a buffer of about ``size_bytes``, rounded to a multiple of
        ``parts``.
        """
        bits = 8 if self._type is None else self._type.bits
        return max(1, size_bytes * 8 // (bits * parts)) * parts

    def collective(self, label: str, kind: CollectiveKind, size_bytes: int) -> None:
        whole = self._count(size_bytes, self._members)
        counts = tuple(whole // parts for parts in cuts_of(kind, self._members))
        op = f"c10d::{kind.name.lower()}"
        node = self._node(label, op, NodeKind.COLLECTIVE, OpClass.COLLECTIVE, counts, wait=self._chained)
        types = self.builder.types
        sent_bytes, received_bytes = (types.bytes_of(types.add(self._type, (count,))) for count in counts)
        self.builder.add_collective(
            node,
            kind,
            group_set=self._groups,
            comm_bytes=sent_bytes,
            operand_bytes=sent_bytes,
            result_bytes=received_bytes,
            reduction="add" if kind in REDUCES else "",
        )

    def message(
        self,
        label: str,
        kind: NodeKind,
        permutation: Permutation,
        size_bytes: int,
        tag: int,
        *,
        wait: bool = False,
    ) -> None:
        count = self._count(size_bytes, 1)
        op = f"c10d::{kind.name.lower()}"
        node = self._node(label, op, kind, OpClass.P2P, (count, count), wait=wait or self._chained)
        size = self.builder.types.bytes_of(self.builder.types.add(self._type, (count,)))
        self.builder.add_p2p(
            node, permutation=self.builder.permutation(permutation), comm_bytes=size, tag=tag
        )

    def ping_pong(self, label: str, role: int, size_bytes: int, tag: int) -> None:
        """Add a message to the neighbour rank and the reply."""
        first, second = (NodeKind.SEND, NodeKind.RECV) if role == 0 else (NodeKind.RECV, NodeKind.SEND)
        self.message(f"{label}/there", first, self._request, size_bytes, tag)
        self.message(f"{label}/back", second, self._reply, size_bytes, tag + 1, wait=True)


def _neighbours(ranks: int, first: int) -> Permutation:
    """Return the messages from each even rank to the next odd rank (``first`` 0), or from the odd ranks back
    (1).
    """
    pairs: Sequence[tuple[int, int]] = [(rank + first, rank + 1 - first) for rank in range(0, ranks - 1, 2)]
    return Permutation.from_pairs(pairs, ranks)
