"""Nodes of the graph from instructions: names, types, provenance, verbatim attributes."""

from __future__ import annotations

from collections.abc import Sequence

from hespas.converters.hlo.attributes import fields
from hespas.converters.hlo.findings import Findings
from hespas.converters.hlo.module import Computation
from hespas.converters.hlo.program import Program
from hespas.converters.hlo.shapes import ArrayShape
from hespas.costs import Contraction, Cost
from hespas.graph import DYNAMIC, GraphBuilder, NodeKind

__all__ = ["Emitter"]

_HOST_MEMORY = "S(5)"
_TEXT = 0
"""The tag of plain text in ``extra``, which every format can write."""

_DECODED = frozenset({"metadata"})
"""Attributes that a graph column holds; all others are kept verbatim in ``extra``."""


class Emitter:
    """A :class:`GraphBuilder` that knows HLO. Rows of texts and types are looked up once per distinct
    value.
    """

    def __init__(self, program: Program, findings: Findings, *, locations: bool) -> None:
        """Start an empty graph named after the module."""
        self.program = program
        self.findings = findings
        self.builder = GraphBuilder(program.module.name)
        self._locations = locations
        self._type_rows: dict[int, tuple[int, ...]] = {}
        self._array_rows: dict[ArrayShape, int] = {}
        self._provenance: dict[str, tuple[int, int]] = {}

    def types(self, row: int, place: tuple[Computation, int]) -> tuple[int, ...]:
        """Type rows of the arrays of one shape, tuples flattened; ``place`` is where it stands first."""
        found = self._type_rows.get(row)
        if found is None:
            leaves = self.program.shapes[row].leaves
            found = self._type_rows[row] = tuple(self._array_row(leaf, place) for leaf in leaves)
        return found

    def _array_row(self, leaf: ArrayShape, place: tuple[Computation, int]) -> int:
        row = self._array_rows.get(leaf)
        if row is None:
            strings, types = self.builder.strings, self.builder.types
            encoding = strings.add(leaf.layout)
            row = types.add(leaf.dtype, leaf.dims, encoding=encoding, bounded=leaf.bounded)
            self._array_rows[leaf] = row
            self._report_type(leaf, place)
        return row

    def _report_type(self, leaf: ArrayShape, place: tuple[Computation, int]) -> None:
        """Tell of an element type nobody knows, and of extents that are bounds or not stated."""
        add = self.findings.add
        if leaf.dtype is None:
            add("hlo.unknown-type", leaf.element, place, "element type not known, so are its bytes")
        if leaf.bounded:
            add("hlo.bounded-shape", "", place, "extents are upper bounds, and so are FLOPs and bytes")
        if DYNAMIC in leaf.dims:
            add("hlo.dynamic-shape", "", place, "extents known at run time only, cost unknown")

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
        """Add the node of one instruction, with its contractions, provenance and attributes."""
        builder = self.builder
        strings = builder.strings
        place = (computation, index)
        node = builder.add_node(
            name_row=strings.add(computation.names[index]),
            op_row=strings.add(computation.opcodes[index]),
            op_class=cost.op_class,
            kind=kind,
            data_deps=deps,
            control_deps=control,
            operands=[row for shape in operand_rows for row in self.types(shape, place)],
            results=self.types(result_row, place),
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
            self._contraction(node, contraction)
            for key, text in contraction.attributes.items():
                builder.add_extra(node, key, _TEXT, text.encode())
        attributes = computation.attributes[index]
        if attributes:
            self._attributes(node, attributes)
        return node

    def _contraction(self, node: int, part: Contraction) -> None:
        self.builder.add_contraction(
            node,
            batch=part.batch,
            m=part.m,
            n=part.n,
            k=part.k,
            flops=part.flops,
            useful_flops=part.useful_flops,
            lhs=part.lhs,
            rhs=part.rhs,
            accumulator=part.accumulator,
            products=part.products,
        )

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
            builder.set(node, framework_row=framework)
        if source:
            builder.set(node, source_row=source)

    def _read_metadata(self, metadata: str) -> tuple[int, int]:
        """String rows of the framework's op name and of ``file:line``, 0 where not stated."""
        found = fields(metadata)
        strings = self.builder.strings
        framework = strings.add(found.get("op_name", ""))
        rows = (framework, strings.add(self._source(found)) if self._locations else 0)
        self._provenance[metadata] = rows
        return rows

    def _source(self, found: dict[str, str]) -> str:
        if "source_file" in found:
            line = found.get("source_line", "")
            return f"{found['source_file']}:{line}" if line else found["source_file"]
        frame = found.get("stack_frame_id", "")
        return self.program.module.frames.source(int(frame)) if frame.isdigit() and len(frame) < 19 else ""

    def in_host_memory(self, row: int) -> bool:
        """Whether a shape's first array lives in host memory."""
        shape = self.program.shapes[row]
        while shape.elements:
            shape = shape.elements[0]
        return shape.array is not None and _HOST_MEMORY in shape.array.layout
