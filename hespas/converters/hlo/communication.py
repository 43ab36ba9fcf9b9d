"""Builder of graph nodes from HLO instructions, of their communication, and of diagnostics about them.

Groups of collectives and peers of permutations and messages are converted to global device ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hespas.converters.hlo.attributes import (
    Mesh,
    backend_config,
    fields,
    frontend_pairs,
    header_meshes,
    int_rows,
    integer,
    is_true,
    names,
    parse_groups,
)
from hespas.converters.hlo.carried import keeps_a_slice
from hespas.converters.hlo.module import ArrayShape, Computation
from hespas.converters.hlo.program import HloProgram, base_opcode
from hespas.converters.replica_groups import IdMode, group_mode, normalise_groups, normalise_pairs
from hespas.costs.operation import Cost
from hespas.costs.payloads import COLLECTIVE_KINDS, payload
from hespas.costs.table import canonical_name
from hespas.graph import DYNAMIC, CollectiveKind, Diagnostics, GraphBuilder, NodeKind, Permutation, Severity

__all__ = ["Communication", "HloFindings", "NodeEmitter", "communication_kind"]


@dataclass(slots=True)
class _FindingGroup:
    severity: Severity
    message: str
    first: tuple[Computation, int]
    names: list[str] = field(default_factory=list[str])
    count: int = 0


_KEPT_NAMES = 10
_SHOWN_NAME = 120


@dataclass(slots=True)
class HloFindings:
    """Diagnostics about instructions, grouped by code and subject (an opcode or a custom call target). Each
    group is reported once with its count.
    """

    program: HloProgram
    _kinds: dict[tuple[str, str], _FindingGroup] = field(default_factory=dict[tuple[str, str], _FindingGroup])

    def add(
        self,
        code: str,
        subject: str,
        place: tuple[Computation, int],
        message: str,
        severity: Severity = Severity.WARNING,
    ) -> None:
        """Record a diagnostic about the instruction at ``place``."""
        kind = self._kinds.get((code, subject))
        if kind is None:
            kind = self._kinds[code, subject] = _FindingGroup(severity, message, place)
        kind.count += 1
        if len(kind.names) < _KEPT_NAMES:
            kind.names.append(f"%{place[0].names[place[1]][:_SHOWN_NAME]}")

    def report(self, diagnostics: Diagnostics) -> None:
        """Add one diagnostic per group to ``diagnostics``."""
        path = self.program.module.source.path
        for (code, subject), kind in self._kinds.items():
            listed = ", ".join(dict.fromkeys(kind.names))
            more = f" and {kind.count - len(kind.names)} more" if kind.count > len(kind.names) else ""
            where = f" ({listed}{more})" if kind.count > 1 else ""
            prefix = f"{subject}: " if subject else ""
            diagnostics.add(
                code,
                kind.severity,
                self.program.location(*kind.first),
                f"{prefix}{kind.message}{where}",
                path=path,
                count=kind.count,
            )


_HOST_MEMORY = "S(5)"
_TEXT = 0
"""Tag of plain text in ``extra``, which every format can write."""

_DECODED = frozenset({"metadata"})
"""Attributes that have a graph column; all others are copied verbatim to ``extra``."""


class NodeEmitter:
    """Builder of graph nodes from HLO instructions, with caches of types and metadata."""

    def __init__(self, program: HloProgram, findings: HloFindings, *, locations: bool) -> None:
        """Start an empty graph with the name of the module."""
        self.program = program
        self.findings = findings
        self.builder = GraphBuilder(program.module.name)
        self._locations = locations
        self._type_rows: dict[int, tuple[int, ...]] = {}
        self._array_rows: dict[ArrayShape, int] = {}
        self._provenance: dict[str, tuple[int, int]] = {}

    def types(self, row: int, place: tuple[Computation, int]) -> tuple[int, ...]:
        """Return the type table rows of the arrays in shape ``row``, with nested tuples flattened. Problems
        are reported at the instruction ``place``.
        """
        type_rows = self._type_rows.get(row)
        if type_rows is None:
            leaves = self.program.shapes[row].leaves
            type_rows = self._type_rows[row] = tuple(self._array_row(leaf, place) for leaf in leaves)
        return type_rows

    def _array_row(self, leaf: ArrayShape, place: tuple[Computation, int]) -> int:
        row = self._array_rows.get(leaf)
        if row is None:
            strings, types = self.builder.strings, self.builder.types
            encoding = strings.add(leaf.layout)
            row = types.add(leaf.dtype, leaf.dims, encoding=encoding, bounded=leaf.bounded)
            self._array_rows[leaf] = row
            # Tell of an element type nobody knows, and of extents that are bounds or not stated.
            add = self.findings.add
            if leaf.dtype is None:
                add("hlo.unknown-type", leaf.element, place, "element type not known, so are its bytes")
            if leaf.bounded:
                add("hlo.bounded-shape", "", place, "extents are upper bounds, and so are FLOPs and bytes")
            if DYNAMIC in leaf.dims:
                add("hlo.dynamic-shape", "", place, "extents known at run time only, cost unknown")
        return row

    def node(
        self,
        computation: Computation,
        index: int,
        cost: Cost,
        *,
        deps: Sequence[int],
        control: Sequence[int],
        operand_rows: Sequence[int],
        result_row: int,
        region: int,
        kind: NodeKind = NodeKind.COMPUTE,
    ) -> int:
        """Add the node of one instruction, with its matmuls, framework name, source position and
        attributes.
        """
        builder = self.builder
        strings = builder.strings
        where = (computation, index)
        node = builder.add_node(
            name_id=strings.add(computation.names[index]),
            op_id=strings.add(computation.opcodes[index]),
            op_class=cost.op_class,
            kind=kind,
            data_deps=deps,
            control_deps=control,
            operands=[row for shape in operand_rows for row in self.types(shape, where)],
            results=self.types(result_row, where),
            flops=cost.flops,
            transcendentals=cost.transcendentals,
            bytes_read=cost.bytes_read,
            bytes_written=cost.bytes_written,
            region=region,
        )
        if cost.rate_dtype >= 0:
            builder.set(node, rate_dtype=cost.rate_dtype)
        if cost.useful_flops != cost.flops and cost.useful_flops == cost.useful_flops:
            builder.set(node, useful_flops=cost.useful_flops)
        for contraction in cost.contractions:
            self.builder.add_contraction(
                node,
                batch=contraction.batch,
                m=contraction.m,
                n=contraction.n,
                k=contraction.k,
                flops=contraction.flops,
                useful_flops=contraction.useful_flops,
                lhs=contraction.lhs,
                rhs=contraction.rhs,
                accumulator=contraction.accumulator,
                products=contraction.products,
                window=contraction.window,
            )
            for key, text in contraction.attributes.items():
                builder.add_extra(node, key, _TEXT, text.encode())
        attributes = computation.attributes[index]
        if attributes:
            self._attributes(node, attributes)
        return node

    def _attributes(self, node: int, attributes: dict[str, str]) -> None:
        builder = self.builder
        for key, value in attributes.items():
            if key not in _DECODED:
                builder.add_extra(node, key, _TEXT, value.encode("utf-8", "surrogatepass"))
        metadata = attributes.get("metadata")
        if metadata is None:
            return
        framework, source = self._provenance.get(metadata) or self._read_metadata(metadata)
        if framework:
            builder.set(node, framework_id=framework)
        if source:
            builder.set(node, source_id=source)

    def _read_metadata(self, metadata: str) -> tuple[int, int]:
        """Return the string rows of the framework's operation name and of ``file:line``, 0 if missing."""
        texts = fields(metadata)
        strings = self.builder.strings
        framework = strings.add(texts.get("op_name", ""))
        source = self.program.module.frames.stated(texts) if self._locations else ""
        rows = (framework, strings.add(source))
        self._provenance[metadata] = rows
        return rows

    def in_host_memory(self, row: int) -> bool:
        """Return True if a shape's first array is in host memory."""
        shape = self.program.shapes[row]
        while shape.elements:
            shape = shape.elements[0]
        return shape.array is not None and _HOST_MEMORY in shape.array.layout


_Result = TypeVar("_Result")
_KINDS: dict[str, NodeKind] = {
    "collective-permute": NodeKind.PERMUTE,
    "send": NodeKind.SEND,
    "recv": NodeKind.RECV,
}
_DEVICES_HINT = "state the number of devices the program was compiled for with `num_devices`"


def communication_kind(opcode: str) -> NodeKind | None:
    """Return the node kind of an opcode that communicates, None for others and for ``-done``, whose node does
    not communicate.
    """
    base, suffix = base_opcode(opcode)
    if suffix not in {"", "-start"}:
        return None
    if base in _KINDS:
        return _KINDS[base]
    return NodeKind.COLLECTIVE if canonical_name(base) in COLLECTIVE_KINDS else None


@dataclass(frozen=True, slots=True)
class _ResolvedGroups:
    """Group set of a collective in global device ids: its row in the graph, and the size of its groups."""

    row: int
    size: int


class Communication:
    """Builder of the collectives and messages of nodes. Equal ``replica_groups`` are converted once."""

    def __init__(self, emitter: NodeEmitter, num_replicas: int, num_partitions: int) -> None:
        """Prepare for a program on ``num_replicas`` x ``num_partitions`` devices."""
        self.emitter = emitter
        self.num_replicas = num_replicas
        self.num_partitions = num_partitions
        self._groups: dict[tuple[str | None, IdMode], _ResolvedGroups] = {}
        self._meshes: dict[str, Mesh] | None = None

    @property
    def num_devices(self) -> int:
        """Number of devices that run the program."""
        return self.num_replicas * self.num_partitions

    def annotate(
        self,
        node: int,
        place: tuple[Computation, int],
        operand_rows: tuple[int, ...],
        result_row: int,
        fusion_row: int = -1,
    ) -> None:
        """Add the communication of the instruction at ``place`` to ``node``, as a row of the collective or
        message table. ``operand_rows`` and ``result_row`` are its shapes. ``fusion_row`` is the result shape
        of the fusion that contains the instruction (-1: none).
        """
        base, _ = base_opcode(place[0].opcodes[place[1]])
        if base in {"send", "recv"}:
            self._message(node, place, operand_rows, result_row)
        elif base == "collective-permute":
            computation, index = place
            channel = self._channel(place)
            mode = group_mode("collective_permute", channel, use_global_device_ids=False)
            pairs = self._pairs(place, computation.attributes[index].get("source_target_pairs"), mode)
            self.emitter.builder.add_p2p(
                node,
                permutation=-1 if pairs is None else self.emitter.builder.permutation(pairs),
                comm_bytes=_total(self.emitter.program, operand_rows),
                tag=channel,
            )
        else:
            self._collective(node, place, operand_rows, result_row, fusion_row)
        if backend_config(place[0].attributes[place[1]]).synchronous:
            self.emitter.findings.add(
                "hlo.synchronous-collective",
                base,
                place,
                "asynchronous in form only; it does not overlap with other work",
                Severity.INFO,
            )

    def _collective(
        self,
        node: int,
        place: tuple[Computation, int],
        operand_rows: tuple[int, ...],
        result_row: int,
        fusion_row: int,
    ) -> None:
        computation, index = place
        attributes = computation.attributes[index]
        base, _ = base_opcode(computation.opcodes[index])
        name = canonical_name(base)
        kind = COLLECTIVE_KINDS[name]
        channel = self._channel(place)
        flattened = is_true(attributes.get("use_global_device_ids"))
        mode = self._checked(place, lambda: group_mode(name, channel, use_global_device_ids=flattened))
        text = attributes.get("replica_groups")
        key = (text, mode)
        group = self._groups.get(key)
        if group is None:
            header, devices = self.emitter.program.module.attributes, self.num_devices
            if self._meshes is None:
                self._meshes = self._checked(place, lambda: header_meshes(header))
            meshes = self._meshes
            written = self._checked(place, lambda: parse_groups(text, devices, meshes))
            groups = self._checked(
                place, lambda: normalise_groups(written, mode, self.num_replicas, self.num_partitions)
            )
            idle = devices - groups.num_ranks
            if idle:
                self.emitter.findings.add(
                    "hlo.devices-left-out",
                    "",
                    place,
                    f"{idle} of {devices} devices are in no group of this collective",
                )
            group = self._groups[key] = _ResolvedGroups(
                self.emitter.builder.group_set(groups), groups.group_size
            )
        program = self.emitter.program
        operand_bytes, result_bytes = _total(program, operand_rows), _total(program, (result_row,))
        if kind is CollectiveKind.ALL_REDUCE and fusion_row >= 0 and keeps_a_slice(*place):
            kept_bytes = _total(program, (fusion_row,))
            if kept_bytes * group.size == operand_bytes:  # XLA for TPUs writes reduce-scatters in this form
                kind, result_bytes = CollectiveKind.REDUCE_SCATTER, kept_bytes
        sizes = payload(kind, operand_bytes, result_bytes, group.size)
        named = names(place[0].attributes[place[1]].get("to_apply"))
        body = self.emitter.program.bodies.get(named[0]) if named else None
        reduction = body.name if body is not None else ""
        self.emitter.builder.add_collective(
            node,
            kind,
            group_set=group.row,
            comm_bytes=sizes.comm_bytes,
            operand_bytes=operand_bytes,
            result_bytes=result_bytes,
            channel=channel,
            reduction=reduction,
        )
        if sizes.is_bound:
            self.emitter.findings.add(
                "hlo.bounded-collective",
                base,
                place,
                "sizes are run-time values; the result buffer bounds them",
            )

    def _message(
        self, node: int, place: tuple[Computation, int], operand_rows: tuple[int, ...], result_row: int
    ) -> None:
        """Add the message of a ``send`` or ``recv``. Its data is the first operand of a ``send`` and the
        result of a ``recv``.
        """
        computation, index = place
        attributes = computation.attributes[index]
        program = self.emitter.program
        is_send = computation.opcodes[index].startswith("send")
        if is_send and not operand_rows:
            raise program.error(computation, index, "expected the data it sends")
        row = operand_rows[0] if is_send else result_row
        host = is_true(attributes.get("is_host_transfer"))
        mode = IdMode.CROSS_PARTITION if self.num_partitions > 1 else IdMode.CROSS_REPLICA
        pairs = None if host else self._pairs(place, frontend_pairs(attributes), mode)
        if pairs is None and not host:
            self.emitter.findings.add(
                "hlo.unknown-peer", "", place, "the peer is unknown: the program has no source-target pairs"
            )
        self.emitter.builder.add_p2p(
            node,
            permutation=-1 if pairs is None else self.emitter.builder.permutation(pairs),
            comm_bytes=_total(program, (row,)),
            tag=self._channel(place),
            host=host,
        )

    def _pairs(self, place: tuple[Computation, int], text: str | None, mode: IdMode) -> Permutation | None:
        if text is None:
            return None

        def resolve() -> Permutation:
            rows = int_rows(text)
            if any(len(row) != 2 for row in rows):
                raise ValueError(f"expected pairs such as {{{{0,1}},{{1,2}}}}, found {text[:60]!r}")
            pairs = [(row[0], row[1]) for row in rows]
            return normalise_pairs(pairs, mode, self.num_replicas, self.num_partitions)

        return self._checked(place, resolve)

    def _channel(self, place: tuple[Computation, int]) -> int:
        text = place[0].attributes[place[1]].get("channel_id")
        return -1 if text is None else self._checked(place, lambda: integer(text))

    def _checked(self, place: tuple[Computation, int], make: Callable[[], _Result]) -> _Result:
        """Return the result of ``make()``. Its ``ValueError`` becomes an error with the position of the
        instruction.
        """
        try:
            return make()
        except ValueError as error:
            program = self.emitter.program
            has_counts = {"num_partitions", "replica_count"} & set(program.module.attributes)
            raise program.error(*place, str(error), None if has_counts else _DEVICES_HINT) from error


def _total(program: HloProgram, rows: tuple[int, ...]) -> float:
    """Return the bytes of all arrays in the shapes ``rows``; tokens have no bytes."""
    return sum(tensor.bytes for row in rows for tensor in program.tensors(row))
