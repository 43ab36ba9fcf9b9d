"""Collects the tables of one rank class while its JSON nodes are decoded: types, sets, side tables.

Every method that meets a wrong reference raises ``ValueError``; the reader adds where it stood.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np
from msgspec import UNSET

from hespas.converters.op_graph.document import Collective, Contraction, Extra, P2p, Region, TensorType
from hespas.converters.op_graph.spelling import (
    default_type_bytes,
    parse_dtype,
    parse_enum,
    parse_groups,
    parse_number,
    parse_type,
    spell_type,
    unescape_text,
)
from hespas.graph import (
    CollectiveKind,
    CollectiveTable,
    ContractionTable,
    ExplicitGroups,
    ExtraTable,
    GroupSet,
    P2pTable,
    Permutation,
    RegionKind,
    RegionTable,
    StringTable,
    StringTableBuilder,
    TensorTypes,
    compress_groups,
)
from hespas.graph.columns import IntArray

__all__ = ["SideTables", "Texts", "TypeRows", "build_regions"]


class Texts:
    """Interns escaped texts."""

    __slots__ = ("_rows", "_table")

    def __init__(self) -> None:
        self._table = StringTableBuilder()
        self._rows: dict[str, int] = {"": 0}

    def add(self, text: str) -> int:
        """The row of a text as the document spells it."""
        row = self._rows.get(text)
        if row is None:
            row = self._rows[text] = self._table.add(unescape_text(text))
        return row

    def build(self) -> StringTable:
        """The finished table."""
        return self._table.build()


class TypeRows:
    """The types of one class: rows as the document lists them, then those met in nodes."""

    __slots__ = ("_bytes", "_encodings", "_parsed", "_rows", "_texts")

    def __init__(self, listed: Iterable[str | TensorType], texts: Texts) -> None:
        """Take the listed types; a spelling that stands twice is told apart by ``#row`` only."""
        self._texts = texts
        self._parsed: list[tuple[int, tuple[int, ...], bool]] = []
        self._bytes: list[float] = []
        self._encodings: list[int] = []
        self._rows: dict[str, int] = {}
        for entry in listed:
            row = self._append(TensorType(type=entry) if isinstance(entry, str) else entry)
            spelling = spell_type(*self._parsed[row])
            self._rows[f"{spelling}#{row}"] = row
            self._rows[spelling] = -1 if spelling in self._rows else row

    def _append(self, entry: TensorType) -> int:
        parsed = parse_type(entry.type)
        size = default_type_bytes(*parsed[:2]) if entry.bytes is UNSET else parse_number(entry.bytes)
        self._parsed.append(parsed)
        self._bytes.append(size)
        self._encodings.append(self._texts.add(entry.encoding))
        return len(self._parsed) - 1

    def row(self, spelling: str) -> int:
        """The row a node's operand or result refers to; a new spelling adds a row."""
        row = self._rows.get(spelling)
        if row is None:
            row = self._rows[spelling] = self._resolve(spelling)
        if row < 0:
            raise ValueError(f"several types are spelled {spelling!r}; say which with #row")
        return row

    def _resolve(self, spelling: str) -> int:
        if "#" in spelling:
            raise ValueError(f"{spelling!r} names no row of types")
        canonical = spell_type(*parse_type(spelling))
        known = self._rows.get(canonical)
        return self._append(TensorType(type=spelling)) if known is None else known

    def build(self) -> TensorTypes:
        """The finished table."""
        lengths = [len(shape) for _, shape, _ in self._parsed]
        return TensorTypes(
            dtype=np.array([dtype for dtype, _, _ in self._parsed], np.int16),
            dim_offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            dims=np.array(list(chain.from_iterable(shape for _, shape, _ in self._parsed)), np.int64),
            bytes=np.array(self._bytes, np.float64),
            bounded=np.array([bounded for _, _, bounded in self._parsed], np.bool_),
            encoding=np.array(self._encodings, np.int32),
        )


class SideTables:
    """Rows of the side tables of one class, in node order."""

    def __init__(
        self,
        texts: Texts,
        group_sets: tuple[GroupSet, ...],
        permutations: tuple[Permutation, ...],
        num_ranks: int,
    ) -> None:
        """``num_ranks`` is what inline permutations go over."""
        self._texts = texts
        self._num_ranks = num_ranks
        self.group_sets = list(group_sets)
        self.permutations = list(permutations)
        self._group_rows: dict[GroupSet, int] = {}
        self._permutation_rows: dict[Permutation, int] = {}
        for row, groups in enumerate(group_sets):
            self._group_rows.setdefault(groups, row)
        for row, permutation in enumerate(permutations):
            self._permutation_rows.setdefault(permutation, row)
        self._collectives: list[tuple[int, int, int, float, float, float, int, int]] = []
        self._p2p: list[tuple[int, int, float, int, bool]] = []
        self._contractions: list[tuple[int, int, int, int, int, float, float, int, int, int, int]] = []
        self._extra: list[tuple[int, int, int, bytes]] = []

    def add_collective(self, node: int, entry: Collective) -> None:
        """A node's ``collective``."""
        self._collectives.append(
            (
                node,
                parse_enum(CollectiveKind, entry.kind),
                self._group_row(entry),
                parse_number(entry.comm_bytes),
                parse_number(entry.operand_bytes),
                parse_number(entry.result_bytes),
                entry.channel,
                self._texts.add(entry.reduction),
            )
        )

    def _group_row(self, entry: Collective) -> int:
        if entry.groups is None:
            row = -1 if entry.group_set is None else entry.group_set
            return _checked("group_set", row, -1, len(self.group_sets))
        if entry.group_set is not None:
            raise ValueError("a collective has either group_set or groups")
        groups = parse_groups(entry.groups)
        if isinstance(groups, ExplicitGroups) and groups.group_size > 0:
            groups = compress_groups(np.array(groups.rows, np.int64))
        row = self._group_rows.setdefault(groups, len(self.group_sets))
        if row == len(self.group_sets):
            self.group_sets.append(groups)
        return row

    def add_p2p(self, node: int, entry: P2p) -> None:
        """A node's ``p2p``."""
        row = self._permutation_row(entry)
        self._p2p.append((node, row, parse_number(entry.comm_bytes), entry.tag, entry.host))

    def _permutation_row(self, entry: P2p) -> int:
        if entry.pairs is None:
            row = -1 if entry.permutation is None else entry.permutation
            return _checked("permutation", row, -1, len(self.permutations))
        if entry.permutation is not None:
            raise ValueError("a p2p has either permutation or pairs")
        permutation = Permutation.from_pairs(entry.pairs, self._num_ranks)
        row = self._permutation_rows.setdefault(permutation, len(self.permutations))
        if row == len(self.permutations):
            self.permutations.append(permutation)
        return row

    def add_contraction(self, node: int, entry: Contraction) -> None:
        """One of a node's ``contractions``."""
        flops = parse_number(entry.flops)
        useful_flops = flops if entry.useful_flops is UNSET else parse_number(entry.useful_flops)
        types = (parse_dtype(entry.lhs), parse_dtype(entry.rhs), parse_dtype(entry.accumulator))
        sizes = (entry.batch, entry.m, entry.n, entry.k)
        self._contractions.append((node, *sizes, flops, useful_flops, *types, entry.products))

    def add_extra(self, node: int, entry: Extra) -> None:
        """One of a node's, or of the file's (-1), verbatim attributes. Raises ``ValueError`` for two
        values.
        """
        if entry.text and entry.value:
            raise ValueError(f"extra {entry.key[:60]!r} has both text and value")
        self._extra.append((node, self._texts.add(entry.key), entry.tag, entry.text.encode() or entry.value))

    def build_collectives(self) -> CollectiveTable:
        """The finished table."""
        rows = self._collectives
        return CollectiveTable(
            node=np.array([row[0] for row in rows], np.int32),
            kind=np.array([row[1] for row in rows], np.uint8),
            group_set=np.array([row[2] for row in rows], np.int32),
            comm_bytes=np.array([row[3] for row in rows], np.float64),
            operand_bytes=np.array([row[4] for row in rows], np.float64),
            result_bytes=np.array([row[5] for row in rows], np.float64),
            channel=np.array([row[6] for row in rows], np.int64),
            reduction=np.array([row[7] for row in rows], np.int32),
        )

    def build_p2p(self) -> P2pTable:
        """The finished table."""
        rows = self._p2p
        return P2pTable(
            node=np.array([row[0] for row in rows], np.int32),
            permutation=np.array([row[1] for row in rows], np.int32),
            comm_bytes=np.array([row[2] for row in rows], np.float64),
            tag=np.array([row[3] for row in rows], np.int64),
            host=np.array([row[4] for row in rows], np.bool_),
        )

    def build_contractions(self) -> ContractionTable:
        """The finished table."""
        rows = self._contractions
        return ContractionTable(
            node=np.array([row[0] for row in rows], np.int32),
            batch=np.array([row[1] for row in rows], np.int64),
            m=np.array([row[2] for row in rows], np.int64),
            n=np.array([row[3] for row in rows], np.int64),
            k=np.array([row[4] for row in rows], np.int64),
            flops=np.array([row[5] for row in rows], np.float64),
            useful_flops=np.array([row[6] for row in rows], np.float64),
            lhs=np.array([row[7] for row in rows], np.int16),
            rhs=np.array([row[8] for row in rows], np.int16),
            accumulator=np.array([row[9] for row in rows], np.int16),
            products=np.array([row[10] for row in rows], np.uint8),
        )

    def build_extra(self) -> ExtraTable:
        """The finished table."""
        rows = self._extra
        return ExtraTable(
            node=np.array([row[0] for row in rows], np.int32),
            key=np.array([row[1] for row in rows], np.int32),
            tag=np.array([row[2] for row in rows], np.int16),
            offsets=np.concatenate([[0], np.cumsum([len(row[3]) for row in rows])]).astype(np.int64),
            values=b"".join(row[3] for row in rows),
        )


def build_regions(
    entries: Iterable[Region], texts: Texts, carried: tuple[IntArray, IntArray, IntArray]
) -> RegionTable:
    """The region table; ``carried`` are region rows, producers and consumers as node numbers."""
    rows = [
        (entry.parent, parse_enum(RegionKind, entry.kind), parse_number(entry.trips), texts.add(entry.label))
        for entry in entries
    ]
    for row, (parent, *_) in enumerate(rows):
        _checked(f"regions[{row}].parent", parent, -1, row)
    return RegionTable(
        parent=np.array([row[0] for row in rows], np.int32),
        kind=np.array([row[1] for row in rows], np.uint8),
        trips=np.array([row[2] for row in rows], np.float64),
        label=np.array([row[3] for row in rows], np.int32),
        carried_region=carried[0].astype(np.int32),
        carried_producer=carried[1].astype(np.int32),
        carried_consumer=carried[2].astype(np.int32),
    )


def _checked(name: str, row: int, low: int, high: int) -> int:
    if not low <= row < high:
        raise ValueError(f"{name} {row} does not exist; there are {high} (rows 0..{high - 1})")
    return row
