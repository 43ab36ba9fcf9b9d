"""The compiled estimators: each distinct region of a program, compiled and timed on the present device.

What a compiler does across regions (fusing further, reusing memory in place, overlapping) is not seen, nor
is communication. Times are of the machine this runs on, whatever device is asked for: that is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from math import isnan
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from hespas.estimators.compiled.measuring import Measured, Measuring, Progress
from hespas.estimators.compiled.messages import Machine, Timing
from hespas.estimators.compiled.programs import Unit
from hespas.estimators.compiled.recipes import BINARY, UNARY, Asked, write_operation
from hespas.estimators.compiled.values import Tensor, Value
from hespas.estimators.registry import Availability, Prediction, takes_no_time
from hespas.graph import Diagnostics, DTypeKind, Estimate, NodeKind, OpClass, OpGraph, Resource
from hespas.graph.columns import FloatArray
from hespas.graph.errors import MissingExtraError, UnsupportedError, UsageError
from hespas.graph.passes import topological_order
from hespas.graph.tensors import DType, find_dtype
from hespas.hardware import Device, find
from hespas.operations import Operations

__all__ = ["Iree", "Xla", "units_of"]

_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    """Fields are the options.

    ``region``: ``fused`` (chains of elementwise work with their consumer, as compilers fuse them) or ``op``.
    ``repeats``: samples per region. ``timeout_s``: for one region. ``cache``: the folder of kept results
    (empty: the user's cache). ``failed``: what a region that does not compile or run is: an ``error``, or
    ``unknown``. ``progress`` is told how many regions of how many are measured.
    """

    region: str = "fused"
    repeats: int = 7
    timeout_s: float = 120.0
    cache: str = ""
    failed: str = "error"
    progress: Progress | None = field(default=None, repr=False, compare=False)

    toolchain: ClassVar[str] = ""
    extra: ClassVar[str] = ""
    modules: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        if self.region not in {"fused", "op"}:
            raise UsageError(f"{self.name}: no region {self.region!r}", hint="fused or op")
        if self.failed not in {"error", "unknown"}:
            raise UsageError(f"{self.name}: failed is {self.failed!r}", hint="error or unknown")
        if not (1 <= self.repeats <= 1000 and 0 < self.timeout_s < float("inf")):
            raise UsageError(f"{self.name}: repeats are 1 to 1000, timeout_s above 0")
        if self.progress is not None and not callable(self.progress):
            raise UsageError(f"{self.name}: progress is a function", hint="it is given in Python only")

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        return self.toolchain

    @classmethod
    def available(cls) -> Availability:
        """Whether the compiler is installed."""
        missing = [module for module in cls.modules if not _is_installed(module)]
        why = f"not installed: {', '.join(missing)}" if missing else ""
        return Availability(not missing, why, f"pip install 'hespas[{cls.extra}]'" if missing else "")

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each node; members of a region share its time by the bytes they move.

        Raises ``MissingExtraError`` without the compiler, and ``UnsupportedError`` with its message where a
        region fails (unless ``failed`` is ``unknown``).
        """
        found = Diagnostics() if diagnostics is None else diagnostics
        units = units_of(graph, fused=self.region == "fused")
        _tell_uncovered(self.name, graph.name, units.uncovered, found)
        measured = self._measured(units.units, graph.name, device, found)
        times = np.full((3, len(graph)), np.nan)
        times[:, takes_no_time(graph)] = 0.0
        if measured is not None:
            self._settle(graph, units, measured.timings, found)
            _spread(graph, units, measured.timings, times)
        known = ~np.isnan(times[0])
        return Estimate(
            hardware=device.name,
            estimators=(self.name,),
            bounds=("free", "model"),
            duration_ns=times[0],
            low_ns=times[1],
            high_ns=times[2],
            said_by=np.where(known, 0, -1).astype(np.int8),
            bound=np.where(known, times[0] > 0, -1).astype(np.int8),
        )

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """The time of each operation of a table: products, elementwise operations and sums; others none."""
        found = Diagnostics() if diagnostics is None else diagnostics
        asked = _units_asked(ops)
        distinct = {unit: number for number, unit in enumerate(dict.fromkeys(filter(None, asked)))}
        without = Counter(ops.op[row] or ops.kind[row] for row, unit in enumerate(asked) if unit is None)
        _tell_uncovered(self.name, "table", without, found)
        times = np.full((3, len(ops)), np.nan)
        measured = self._measured(tuple(distinct), "table", device, found)
        if measured is not None:
            for row, unit in enumerate(asked):
                if unit is not None:
                    timing = measured.timings[distinct[unit]]
                    self._check(timing, ops.op[row] or ops.kind[row], "table", found)
                    times[:, row] = _figures(timing)
        return Prediction.of(self.name, times[0], times[1], times[2])

    def _measured(
        self, units: Sequence[Unit], where: str, device: Device, diagnostics: Diagnostics
    ) -> Measured | None:
        if not units:
            return None
        if not self.available().is_available:
            raise MissingExtraError(f"estimator {self.name!r}", self.extra)
        measuring = Measuring(
            toolchain=self.toolchain,
            repeats=self.repeats,
            timeout_s=self.timeout_s,
            folder=Path(self.cache) if self.cache else None,
        )
        measured = measuring.run(units, self.progress)
        _tell_machine(self.name, where, measured, device, diagnostics)
        return measured

    def _settle(
        self, graph: OpGraph, units: _Found, timings: Sequence[Timing], diagnostics: Diagnostics
    ) -> None:
        for number, nodes in units.members:
            place = graph.strings[int(graph.source_row[nodes[-1]])] or f"node {int(graph.id[nodes[-1]])}"
            self._check(timings[number], graph.op_name(nodes[-1]), f"{graph.name}: {place}", diagnostics)

    def _check(self, timing: Timing, op: str, where: str, diagnostics: Diagnostics) -> None:
        """A failure is an error, or told; it never is a time."""
        if timing.is_known:
            return
        text = f"{op}: {self.name} failed: {timing.fault or 'no time was measured'}"
        if self.failed == "error":
            hint = f"--estimator {self.name}:failed=unknown (or --missing warn) leaves it unknown"
            raise UnsupportedError(f"{where}: {text}", hint=hint)
        diagnostics.error(f"{self.name}.failed", where, text)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False


def _figures(timing: Timing) -> tuple[float, float, float]:
    if not timing.is_known:
        return np.nan, np.nan, np.nan
    return timing.duration_ns, timing.low_ns, timing.high_ns


def _spread(graph: OpGraph, units: _Found, timings: Sequence[Timing], times: FloatArray) -> None:
    """Each region's time among its members, by the bytes they move."""
    moved = np.maximum(np.nan_to_num(graph.bytes_moved, nan=1.0, posinf=1.0), 1.0)
    for number, nodes in units.members:
        figures = np.array(_figures(timings[number]))
        members = np.array(nodes, np.int64)
        times[:, members] = figures[:, None] * (moved[members] / moved[members].sum())


def _tell_uncovered(name: str, where: str, uncovered: Counter[str], diagnostics: Diagnostics) -> None:
    if uncovered:
        listed = ", ".join(f"{op} ({count:,})" for op, count in uncovered.most_common(_LISTED))
        text = f"no duration: the types do not say enough to write a program of {listed}"
        diagnostics.warning(f"{name}.no-program", where, text, count=uncovered.total())


def _tell_machine(
    name: str, where: str, measured: Measured, device: Device, diagnostics: Diagnostics
) -> None:
    """Where the times are from, and that they are not of the device asked for."""
    machine = measured.machine
    clocks = sorted(each.clock_mhz for each in measured.timings if each.clock_mhz)
    at = f" at {clocks[len(clocks) // 2]:,.0f} MHz" if clocks else ""
    told = f"{machine.device} ({machine.platform}, {machine.compiler}){at}"
    diagnostics.info(f"{name}.measured", where, f"measured on {told}")
    if not _is_same(machine, device):
        text = f"times are of {told}, where this runs, not of {device.name}"
        diagnostics.warning(f"{name}.other-device", where, text)


def _is_same(machine: Machine, device: Device) -> bool:
    if device.kind == "cpu":
        return machine.platform in {"cpu", "local-task"}
    try:
        return find(machine.device) == device.name
    except UsageError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Xla(_Compiled):
    """XLA, on the device that JAX uses. Options: see :class:`_Compiled`."""

    toolchain: ClassVar[str] = "xla"
    what: ClassVar[str] = "Regions of the program, compiled by XLA and timed on the device that JAX uses."
    extra: ClassVar[str] = "jax"
    modules: ClassVar[tuple[str, ...]] = ("jax", "jaxlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Iree(_Compiled):
    """IREE's LLVM back end, on this CPU. Options: see :class:`_Compiled`."""

    toolchain: ClassVar[str] = "iree"
    what: ClassVar[str] = "Regions of the program, compiled by IREE's LLVM back end and timed on this CPU."
    extra: ClassVar[str] = "iree"
    modules: ClassVar[tuple[str, ...]] = ("iree.compiler", "iree.runtime")


# The units of a graph: operations, or chains that every compiler makes one of, each as a small program.

_JOIN = frozenset(
    {
        OpClass.FREE,
        OpClass.ELEMENTWISE,
        OpClass.TRANSCENDENTAL,
        OpClass.BROADCAST,
        OpClass.GENERATE,
        OpClass.SLICE,
        OpClass.MOVE,
        OpClass.QUANTIZE,
    }
)
_TAKE = frozenset({OpClass.ELEMENTWISE, OpClass.TRANSCENDENTAL, OpClass.QUANTIZE, OpClass.REDUCTION})
_INTO_PRODUCT = frozenset({OpClass.FREE, OpClass.MOVE})
"""What a compiler reads in place, when a product is the only one that wants it: transposed operands."""
_REPEATED = frozenset({OpClass.GENERATE, OpClass.BROADCAST, OpClass.FREE})
"""What a compiler makes anew for each of several users rather than keep."""
_NOT_STABLEHLO = frozenset({"tf32", "token", "opaque"})
_MOST_NODES = 64
_MOST_REPEATED = 3


class _Found(NamedTuple):
    """The distinct units of a graph, which nodes each stands for (by its number), and what has none."""

    units: tuple[Unit, ...]
    members: tuple[tuple[int, tuple[int, ...]], ...]
    """Unit, and the nodes that share its time; a unit that stands several times has several entries."""
    uncovered: Counter[str]


def units_of(graph: OpGraph, *, fused: bool) -> _Found:
    """The units of all nodes that take time. ``fused``: chains of elementwise work into their consumer.

    O(nodes + edges), in Python: what follows compiles.
    """
    reader = _Reader(graph)
    wanted = reader.wanted
    groups = _groups(graph, wanted) if fused else [(node,) for node, asked in enumerate(wanted) if asked]
    number: dict[Unit, int] = {}
    members: list[tuple[int, tuple[int, ...]]] = []
    uncovered: Counter[str] = Counter()
    for group in groups:
        whole = reader.unit(group, repeats=fused)
        parts = [(group, whole)] if whole is not None else [((node,), reader.unit((node,))) for node in group]
        for nodes, unit in parts:
            paid = tuple(node for node in nodes if wanted[node])
            if unit is None:
                uncovered.update(graph.op_name(node) for node in paid)
            elif paid:
                members.append((number.setdefault(unit, len(number)), paid))
    return _Found(tuple(number), tuple(members), uncovered)


def _groups(graph: OpGraph, wanted: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """Chains by their last node: what only one consumer uses joins it."""
    uses: list[int] = np.bincount(graph.data_deps.values, minlength=len(graph)).tolist()
    held = np.zeros(len(graph), np.bool_)
    held[graph.regions.carried_producer] = True
    held |= np.bincount(graph.control_deps.values, minlength=len(graph)) > 0
    kept: list[bool] = held.tolist()
    classes: list[int] = graph.op_class.tolist()
    kinds: list[int] = graph.kind.tolist()
    region: list[int] = graph.region.tolist()
    deps = graph.data_deps.to_lists()
    order: list[int] = topological_order(graph).tolist()
    owner = list(range(len(graph)))
    size = [1] * len(graph)
    for node in reversed(order):
        root = owner[node]
        joining = _joining(classes, node, root)
        for dep in deps[node]:
            joins = classes[dep] in joining and uses[dep] == 1 and not kept[dep]
            joins = joins and kinds[dep] == NodeKind.COMPUTE
            if joins and owner[dep] == dep and region[dep] == region[root] and size[root] < _MOST_NODES:
                owner[dep] = root
                size[root] += 1
    found: dict[int, list[int]] = {}
    for node in order:
        found.setdefault(owner[node], []).append(node)
    yield from (tuple(nodes) for nodes in found.values() if any(wanted[node] for node in nodes))


def _joining(classes: Sequence[int], node: int, root: int) -> frozenset[OpClass]:
    """The classes of producers that a node takes in."""
    if classes[root] == OpClass.CONTRACTION:
        return _INTO_PRODUCT
    return _JOIN if classes[node] in _TAKE or root != node else frozenset()


class _Writing:
    """A unit under way."""

    __slots__ = ("arguments", "lines", "names", "outside", "values")

    def __init__(self) -> None:
        self.names = count()
        self.lines: list[str] = []
        self.arguments: list[Tensor] = []
        self.values: dict[int, tuple[Value, ...]] = {}
        self.outside: dict[tuple[int, Tensor], Value] = {}

    def argument(self, producer: int, tensor: Tensor) -> Value:
        """What a node outside makes; an unknown producer (-1) is another each time."""
        known = self.outside.get((producer, tensor)) if producer >= 0 else None
        if known is not None:
            return known
        value = Value(f"%p{len(self.arguments)}", tensor)
        self.arguments.append(tensor)
        if producer >= 0:
            self.outside[producer, tensor] = value
        return value


class _Reader:
    """A graph as its units are read from it."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.deps = graph.data_deps.to_lists()
        self.operands, self.results = graph.operands.to_lists(), graph.results.to_lists()
        self.types = [_tensor(graph, row) for row in range(len(graph.types))]
        self.names: Mapping[int, str] = {
            row: graph.strings[row].rpartition(".")[2] for row in np.unique(graph.op_row).tolist()
        }
        self.op: list[int] = graph.op_row.tolist()
        self.classes: list[int] = graph.op_class.tolist()
        timed = (graph.kind == int(NodeKind.COMPUTE)) & (graph.resource == int(Resource.DEVICE))
        # A node of a branch that is not taken never runs.
        timed &= ~takes_no_time(graph) & (graph.multiplicity != 0)
        self.wanted: list[bool] = timed.tolist()

    def unit(self, nodes: Sequence[int], *, repeats: bool = False) -> Unit | None:
        """The program of some nodes, the last of which makes what others use; None where one has none."""
        writing = _Writing()
        inside = frozenset(nodes)
        for node in nodes:
            if not self._write(writing, node, inside, _MOST_REPEATED if repeats else 0):
                return None
        return Unit(tuple(writing.lines), tuple(writing.arguments), writing.values[nodes[-1]])

    def _write(self, writing: _Writing, node: int, inside: frozenset[int], repeats: int) -> bool:
        results = [self.types[row] for row in self.results[node]]
        wanted = [self.types[row] for row in self.operands[node]]
        stated = [each for each in results if each is not None]
        asked = [each for each in wanted if each is not None]
        if len(stated) < len(results) or len(asked) < len(wanted):
            return False
        operands = self._bound(writing, node, asked, inside, repeats)
        made = write_operation(Asked(self.names[self.op[node]], operands, tuple(stated), writing.names))
        if made is None:
            return False
        lines, writing.values[node] = made
        writing.lines += lines
        return True

    def _bound(
        self, writing: _Writing, node: int, wanted: Sequence[Tensor], inside: frozenset[int], repeats: int
    ) -> tuple[Value, ...]:
        """A value for each operand: of the first producer that makes such a one, in the order of both."""
        left = list(self.deps[node])
        bound: list[Value] = []
        for tensor in wanted:
            producer = next((dep for dep in left if self._makes(dep, tensor)), -1)
            if producer >= 0:
                left.remove(producer)
            if producer >= 0 and producer not in writing.values and producer not in inside and repeats:
                again = self.classes[producer] in _REPEATED
                if again:
                    self._write(writing, producer, inside, repeats - 1)
            made = writing.values.get(producer, ())
            bound.append(
                next((value for value in made if value.type == tensor), None)
                or writing.argument(producer, tensor)
            )
        return tuple(bound)

    def _makes(self, node: int, tensor: Tensor) -> bool:
        return any(self.types[row] == tensor for row in self.results[node])


def _tensor(graph: OpGraph, row: int) -> Tensor | None:
    """A type that a program can state: element type and all extents known, and StableHLO's own."""
    element, shape = graph.types.dtype_of(row), graph.types.shape(row)
    if (
        element is None
        or -1 in shape
        or element.block_elements
        or element.name in {"tf32", "token", "opaque"}
    ):
        return None
    return Tensor(element, shape)


# Operations of a table as programs: what a row's sizes and number format say, and no more.

_SPELLED = {
    "sub": "subtract", "mul": "multiply", "div": "divide", "exp": "exponential", "neg": "negate",
    "max": "maximum", "min": "minimum", "sigmoid": "logistic", "pow": "power", "sin": "sine", "cos": "cosine",
    "erf": "",
}  # fmt: skip
_VIEWS = frozenset({"reshape", "bitcast_convert", "convert", "optimization_barrier", "real", "imag"})
_LARGEST = 1 << 31


def _units_asked(ops: Operations) -> list[Unit | None]:
    """A unit for each operation; None where a row is no product, elementwise operation or sum of rows."""
    return [_unit(ops, row) for row in range(len(ops))]


def _unit(ops: Operations, row: int) -> Unit | None:
    element = find_dtype(ops.scheme[row].removesuffix("_full"))
    if element is None or element.block_elements or element.name == "tf32":
        return None
    match ops.kind[row]:
        case "matmul":
            return _product(ops, row, element)
        case "vector" | "reduction":
            return _elementwise(ops, row, element)
        case _:
            return None


def _sizes(ops: Operations, row: int, *names: str) -> tuple[int, ...] | None:
    sizes = [float(ops.dim(name)[row]) for name in names]
    if any(isnan(size) or size < 1 or size > _LARGEST or size != int(size) for size in sizes):
        return None
    return tuple(int(size) for size in sizes)


def _product(ops: Operations, row: int, element: DType) -> Unit | None:
    sizes = _sizes(ops, row, "batch", "m", "n", "k")
    if sizes is None:
        return None
    batch, m, n, k = sizes
    head = (batch,) if batch > 1 else ()
    lhs, rhs = Tensor(element, (*head, m, k)), Tensor(element, (*head, k, n))
    made = element if element.kind is not DTypeKind.SIGNED else find_dtype("i32") or element
    return _written("dot_general", (lhs, rhs), Tensor(made, (*head, m, n)))


def _elementwise(ops: Operations, row: int, element: DType) -> Unit | None:
    sizes = _sizes(ops, row, "rows", "columns")
    if sizes is None:
        return None
    whole = Tensor(element, sizes)
    if ops.kind[row] == "reduction":
        known = ops.op[row] in {"sum", "reduce", "reduce_sum"}
        return _written("reduce", (whole,), whole.of(sizes[0])) if known else None
    op = _SPELLED.get(ops.op[row], ops.op[row])
    if op in _VIEWS or op not in UNARY | BINARY:
        return None
    return _written(op, (whole,) * (2 if op in BINARY else 1), whole)


def _written(op: str, operands: tuple[Tensor, ...], result: Tensor) -> Unit | None:
    values = tuple(Value(f"%p{place}", each) for place, each in enumerate(operands))
    made = write_operation(Asked(op, values, (result,), count()))
    return None if made is None else Unit(tuple(made[0]), operands, made[1])
