"""Whether the shapes of a module fit one another: every instruction against its operands, every call against
what it calls, the entry against the header. What XLA's verifier refuses of shapes is refused here.

A program with one extent changed still reads as text, and all its costs would be wrong without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hespas.converters.hlo.attributes import integer, is_true
from hespas.converters.hlo.groups import Mesh, header_meshes, parse_groups
from hespas.converters.hlo.inference import (
    ELEMENTWISE,
    same_extents,
)
from hespas.converters.hlo.inference_calls import Inference
from hespas.converters.hlo.module import Computation
from hespas.converters.hlo.program import Program, base_opcode
from hespas.converters.hlo.shapes import Shape, parse_shape, shown_shape
from hespas.converters.replica_groups import MAX_DEVICES, IdMode, group_mode
from hespas.costs import canonical_name
from hespas.graph.errors import UnsupportedError

__all__ = ["check_shapes"]

_HINT = "was an extent edited by hand? dump the module again; XLA refuses these shapes too"
_GROUPS_HINT = (
    "was an extent edited by hand, or replica_groups, replica_count or num_partitions? dump the module "
    "again; XLA refuses shards that are not one for each device of a group"
)
_GROUPS = ("replica_groups", "channel_id", "use_global_device_ids", "dimensions")
_CALLED = ("to_apply", "calls", "dimensions", "window")
_NONE_READ = """
bitcast reshape convert bitcast-convert compare select clamp is-finite real imag complex abs tuple
dynamic-update-slice all-reduce all-reduce-start all-reduce-done all-gather-done copy-start copy-done
collective-permute collective-permute-start collective-permute-done after-all partition-id replica-id
"""
_READ: dict[str, tuple[str, ...]] = {
    "dot": ("lhs_batch_dims", "rhs_batch_dims", "lhs_contracting_dims", "rhs_contracting_dims", "sparsity"),
    "convolution": ("window", "dim_labels", "feature_group_count", "batch_group_count"),
    "broadcast": ("dimensions",),
    "transpose": ("dimensions",),
    "reverse": ("dimensions",),
    "concatenate": ("dimensions",),
    "slice": ("slice",),
    "dynamic-slice": ("dynamic_slice_sizes",),
    "pad": ("padding",),
    "iota": ("iota_dimension",),
    "get-tuple-element": ("index",),
    "reduce": _CALLED,
    "reduce-window": _CALLED,
    "all-gather": _GROUPS,
    "all-gather-start": _GROUPS,
    "reduce-scatter": _GROUPS,
    "all-to-all": _GROUPS,
    **dict.fromkeys(_NONE_READ.split(), ()),
}
"""Attributes that a rule reads, of operations that stand often and alike: such a one is checked once."""

_GROUPED = frozenset({"all-gather", "all-gather-start", "reduce-scatter", "all-to-all"})
_UNCHECKED = frozenset({"parameter", "constant", "custom-call", "infeed", "outfeed"})


class _Checker:
    """Checks one module. ``_numbers`` gives shapes of the same types and extents one number."""

    def __init__(self, program: Program, inference: Inference) -> None:
        self.program = program
        self.module = program.module
        self.inference = inference
        self._signatures: dict[str, tuple[list[int], int]] = {}
        self._fitting: set[tuple[object, ...]] = set()
        self._sizes: dict[tuple[str | None, ...], int] = {}
        self._meshes: Mapping[str, Mesh] | None = None
        self._known: dict[Shape, int] = {}
        self._structures: dict[object, int] = {}
        self._numbers = [self._number(shape) for shape in self.module.shapes]

    def _number(self, shape: Shape) -> int:
        """The number of a shape's types and extents without its layouts. A tuple that others share is
        numbered once; recursion is as deep as tuples may be.
        """
        leaf, structures = shape.array, self._structures
        if leaf is not None:
            return structures.setdefault((leaf.element, leaf.dims), len(structures))
        number = self._known.get(shape)
        if number is None:
            parts = () if shape.elements is None else tuple([self._number(part) for part in shape.elements])
            number = self._known[shape] = structures.setdefault(parts, len(structures))
        return number

    def computation(self, computation: Computation) -> None:
        """Check every instruction. O(instructions)."""
        numbers, fitting = self._numbers, self._fitting
        made = [numbers[row] for row in computation.shapes]
        parts = zip(computation.opcodes, computation.operands, computation.attributes, made, strict=True)
        for index, (opcode, operands, texts, own) in enumerate(parts):
            if opcode in ELEMENTWISE:
                for operand in operands:
                    if made[operand] != own:
                        self._instruction(computation, index)
                        break
            elif opcode == "fusion":
                given = [made[operand] for operand in operands]
                if not self._is_called_right(texts, given, own):
                    self._instruction(computation, index)
            elif opcode not in _UNCHECKED:
                read = _READ.get(opcode)
                if read is None:
                    self._instruction(computation, index)
                    continue
                key = (
                    opcode,
                    own,
                    *[made[operand] for operand in operands],
                    *[texts.get(name) for name in read],
                )
                if key not in fitting:
                    self._instruction(computation, index)
                    fitting.add(key)

    def _is_called_right(self, attributes: Mapping[str, str], given: list[int], made: int) -> bool:
        """Whether what a fusion is given and makes is what its computation takes and makes, to the letter."""
        name = attributes.get("calls", "").lstrip("%")
        wanted = self._signatures.get(name)
        if wanted is None:
            body = self.module.computations.get(name)
            if body is None:
                return False
            places = [body.parameters.get(str(number), body.root) for number in range(len(body.parameters))]
            numbers = [self._numbers[body.shapes[place]] for place in [*places, body.root]]
            wanted = self._signatures[name] = (numbers[:-1], numbers[-1])
        return wanted == (given, made)

    def _instruction(self, computation: Computation, index: int) -> None:
        opcode, attributes = computation.opcodes[index], computation.attributes[index]
        all_shapes, rows = self.module.shapes, computation.shapes
        operands = tuple([all_shapes[rows[operand]] for operand in computation.operands[index]])
        stated = all_shapes[rows[index]]
        try:
            size = self._group_size(opcode, attributes) if opcode in _GROUPED else 1
            made = self.inference.result(opcode, operands, attributes, stated, size)
        except (ValueError, IndexError) as error:
            what = str(error) if isinstance(error, ValueError) else "expected operands that fit the operation"
            hint = _GROUPS_HINT if opcode in _GROUPED else _HINT
            raise self.program.error(computation, index, what, hint) from error
        except UnsupportedError as error:
            error.path, error.position = self.module.source.path, self.program.location(computation, index)
            raise
        if made is not None and not same_extents(made, stated):
            expected = f"expected the result {shown_shape(made)}, which its operands and attributes make"
            raise self.program.error(computation, index, f"{expected}, found {shown_shape(stated)}", _HINT)

    def _group_size(self, opcode: str, attributes: Mapping[str, str]) -> int:
        """How many devices an operation spans, 1 where the module does not say. Raises ``ValueError``."""
        base = base_opcode(opcode)[0]
        groups, channel, flat = [attributes.get(key) for key in _GROUPS[:3]]
        key = (base, groups, channel, flat)
        size = self._sizes.get(key)
        if size is None:
            number = -1 if channel is None else integer(channel)
            mode = group_mode(canonical_name(base), number, use_global_device_ids=is_true(flat))
            if self._meshes is None:
                self._meshes = header_meshes(self.module.attributes)
            written = parse_groups(groups, MAX_DEVICES, self._meshes)
            size = self._sizes[key] = self._spanned(mode, None if written is None else written.group_size)
        return size

    def _spanned(self, mode: IdMode, stated: int | None) -> int:
        """Devices in a group of the stated size, or in one group of all."""
        replicas, partitions = (self._count(key) for key in ("replica_count", "num_partitions"))
        everybody = partitions if mode is IdMode.CROSS_PARTITION else replicas
        size = everybody if stated is None else max(stated, 1)
        return size * partitions if mode is IdMode.CROSS_REPLICA_AND_PARTITION else size

    def _count(self, key: str) -> int:
        text = self.module.attributes.get(key, "1")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 1

    def entry(self) -> None:
        """The header's layout of the entry names the shapes of its parameters and of its result."""
        text = self.module.attributes.get("entry_computation_layout")
        if text is None:
            return
        taken, arrow, made = text.removeprefix("{").removesuffix("}").rpartition("->")
        entry = self.module.entry
        try:
            given = parse_shape(taken).elements
            result = parse_shape(made)
        except ValueError:
            return
        except UnsupportedError as error:
            error.path = self.module.source.path
            error.position = f"{self.module.source.origin}line 1, entry_computation_layout"
            raise
        if not arrow or given is None:
            return
        if len(given) != len(entry.parameters):
            message = f"expected {len(given)} parameters, as the header says, found {len(entry.parameters)}"
            raise self.program.error(entry, entry.root, message, _HINT)
        for number, index in [*entry.parameters.items(), (None, entry.root)]:
            wanted = result if number is None else given[int(number)] if int(number) < len(given) else None
            stated = self.module.shapes[entry.shapes[index]]
            if wanted is not None and not same_extents(wanted, stated):
                what = "the result" if number is None else f"parameter {number}"
                message = f"expected {what} to be {shown_shape(wanted)}, as the header says"
                raise self.program.error(entry, index, f"{message}, found {shown_shape(stated)}", _HINT)


def check_shapes(program: Program, ordered: Sequence[Computation]) -> None:
    """Check the computations that run. Raises ``FormatError``. O(instructions)."""
    checker = _Checker(program, Inference(program.module.computations, program.module.shapes))
    for computation in ordered:
        checker.computation(computation)
    checker.entry()
