"""HLO computations -> nodes. Calls, loop bodies and branches are written out in place; a fusion is one node.

Text order is kept: in a scheduled module it is the schedule. A tuple is followed element by element, so that
a ``get-tuple-element`` waits for its element only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isnan

from hespas.converters.hlo.attributes import integer, names
from hespas.converters.hlo.bodies import (
    UPDATING,
    Bodies,
    BodyCost,
    branch_names,
    fusion_bytes,
    loop_trips,
)
from hespas.converters.hlo.communication import Communication, NodeEmitter, communication_kind
from hespas.converters.hlo.in_place import OverwrittenOperands
from hespas.converters.hlo.module import Computation, Gate, LoweredValue, LoweringFrame
from hespas.converters.hlo.program import base_opcode, source_dtypes, widens
from hespas.converters.hlo.scan import unquote
from hespas.costs.operation import FREE, Cost
from hespas.graph import (
    DONATED_TO,
    IN_PLACE,
    RETURNED,
    SOURCE_DTYPE,
    NodeKind,
    OpClass,
    RegionKind,
    Resource,
    Severity,
)
from hespas.graph.errors import UnsupportedError

__all__ = ["GraphLowering"]

_MAX_CALL_DEPTH = 100
"""Calls, loops and branches nested deeper are refused; compiled programs stay below ten."""

_MESSAGES = frozenset({"send", "recv"})
_CALLS = frozenset({"call", "conditional"})
"""What they run is in order itself."""
_ANYWHERE, _BESIDE, _IN_LINE = range(3)
_START_NAME, _DONE_NAME = "async-collective-start", "async-collective-done"
"""Of fusions of TPUs that begin and complete a collective."""
_MOST_AWAITED = 64
"""What waits for the issue of a start waits for so many nodes at most, else for what the start began."""
_FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "reshape",
        "after-all",
        "add-dependency",
        "opt-barrier",
        "partition-id",
        "replica-id",
        "domain",
    }
)
"""Opcodes that take no time: structure, views, bookkeeping."""


class GraphLowering:
    """Writes a module's entry computation into a graph. Use :meth:`run` once."""

    def __init__(
        self, emitter: NodeEmitter, bodies: Bodies, communication: Communication, *, in_order: bool = False
    ) -> None:
        """Bring the parts together. ``in_order``: what the device runs waits for what stands before it."""
        self.emitter = emitter
        self.program = emitter.program
        self.findings = emitter.findings
        self.bodies = bodies
        self.communication = communication
        self.overwritten = OverwrittenOperands(emitter.program)
        self.gate: Gate | None = None
        self._control = _ControlDeps(self)
        self._open_channels: dict[str, int] = {}
        self._handles: set[int] = set()
        self.last = -1
        """What the device ran last, where it runs in order."""
        self._in_order = in_order
        self._handlers: dict[str, Callable[[LoweringFrame, int], None]] = {
            "parameter": self._parameter,
            "get-tuple-element": self._element,
            "tuple": self._tuple,
            "fusion": self._fusion,
            "while": self._control.loop,
            "conditional": self._control.conditional,
            "call": self._control.call,
            "async-start": self._control.async_start,
            "call-start": self._control.async_start,
            "fusion-start": self._fusion,
        }

    def run(self) -> None:
        """Write the entry computation out, and mark what it returns."""
        entry = self.program.module.entry
        frame = self.write(LoweringFrame(entry, -1, 0))
        if len(entry):
            self.emitter.builder.add_extra(frame.nodes[entry.root], RETURNED, 0, b"true")

    def write(self, frame: LoweringFrame) -> LoweringFrame:
        """Write one computation out, instruction by instruction."""
        if frame.depth > _MAX_CALL_DEPTH:
            raise UnsupportedError(
                f"calls, loops and branches nested more than {_MAX_CALL_DEPTH} deep",
                path=self.program.module.source.path,
                position=f"computation {frame.computation.name}",
                hint="no compiler writes such programs; is the file damaged?",
            )
        handlers = self._handlers
        for index, opcode in enumerate(frame.computation.opcodes):
            handler = handlers.get(opcode)
            if handler is not None:
                handler(frame, index)
            else:
                self._operation(frame, index, opcode)
        return frame

    def operand_nodes(self, frame: LoweringFrame, index: int) -> list[int]:
        """The nodes an instruction waits for, each once, in operand order."""
        nodes = frame.nodes
        operands = frame.computation.operands[index]
        if len(operands) == 1:
            return [nodes[operands[0]]]
        return list(dict.fromkeys([nodes[operand] for operand in operands]))

    def control_nodes(self, frame: LoweringFrame, index: int) -> list[int]:
        """Nodes of ``control-predecessors``; one that does not stand above is reported and left out. Behind
        an asynchronous start means behind its issue, which waits for what the start waits for; what it began
        goes on meanwhile.
        """
        text = frame.computation.attributes[index].get("control-predecessors")
        if text is None:
            return []
        found = [frame.number_of(name) for name in names(text)]
        above = [number for number in found if 0 <= number < len(frame.nodes)]
        if len(above) < len(found):
            place = (frame.computation, index)
            self.findings.add("hlo.control-order", "", place, "a control predecessor does not stand above it")
        known = [node for number in above for node in frame.issues.get(number, (frame.nodes[number],))]
        return list(dict.fromkeys(known))

    def add(
        self,
        frame: LoweringFrame,
        index: int,
        cost: Cost,
        *,
        deps: list[int] | None = None,
        operand_rows: tuple[int, ...] = (),
        result_row: int | None = None,
        kind: NodeKind = NodeKind.COMPUTE,
    ) -> int:
        """Add the node of an instruction and bind its value."""
        computation = frame.computation
        needed = self.operand_nodes(frame, index) if deps is None else deps
        control = self.control_nodes(frame, index)
        place_in_order = self._place_in_order(computation, index) if self._in_order else _ANYWHERE
        if place_in_order != _ANYWHERE and self.last >= 0 and self.last not in needed:
            control = list(dict.fromkeys([*control, self.last]))
        if self.gate is not None:
            control = self.gate.control(len(self.emitter.builder), needed, control)
        node = self.emitter.node(
            computation,
            index,
            cost,
            deps=needed,
            control=control,
            operand_rows=operand_rows,
            result_row=computation.shapes[index] if result_row is None else result_row,
            region=frame.region,
            kind=kind,
        )
        frame.nodes.append(node)
        if place_in_order == _IN_LINE:
            self.last = node
        opcode = computation.opcodes[index]
        if (opcode.endswith("-start") or opcode in _MESSAGES) and len(needed) + len(control) <= _MOST_AWAITED:
            frame.issues[index] = [*needed, *control]
        self._note_widened(node, (computation, index), cost)
        if frame.state:
            # Remember which element of the loop state a node reads.
            opcodes = computation.opcodes
            for operand in computation.operands[index]:
                if self.reads_state(frame, operand):
                    whole = opcodes[index] != "get-tuple-element"
                    frame.readers.append((-1 if whole else self.element_index(frame, index), node))
        return node

    def _place_in_order(self, computation: Computation, index: int) -> int:
        """How an instruction stands to those before and after it on a device that runs in order.

        A start is issued after what stands above it and holds up nothing; what completes it does.
        """
        opcode = computation.opcodes[index]
        if opcode.endswith("-start") or (
            _START_NAME in computation.names[index] and computation.opcodes[index] == "fusion"
        ):
            return _BESIDE
        if opcode.endswith("-done") or opcode == "while":
            return _IN_LINE
        return _ANYWHERE if opcode in _FREE or opcode.endswith("-update") or opcode in _CALLS else _IN_LINE

    def _note_widened(self, node: int, place: tuple[Computation, int], cost: Cost) -> None:
        """Keep the types of narrow values that are multiplied as f32, and which conversions are for that."""
        opcode = place[0].opcodes[place[1]]
        if cost.contractions:
            narrow = source_dtypes(self.program, *place)
            if narrow is not None:
                types = ",".join(dict.fromkeys(each.name for each in narrow))
                self.emitter.builder.add_extra(node, SOURCE_DTYPE, 0, types.encode())
                message = (
                    "multiplies values that the compiler widened to f32, as XLA does for CPUs; estimates for "
                    "other devices take the narrow type"
                )
                self.findings.add("hlo.widened-product", types, place, message, Severity.INFO)
        elif opcode in {"convert", "fusion"} and widens(self.program, *place):
            self.emitter.builder.add_extra(node, SOURCE_DTYPE, 0, b"convert")

    def reads_state(self, frame: LoweringFrame, operand: int) -> bool:
        """Whether an instruction of a frame is a parameter that holds the state of a loop."""
        if not frame.state or frame.computation.opcodes[operand] != "parameter":
            return False
        return self.program.parameter_number(frame.computation, operand) in frame.state

    def element_index(self, frame: LoweringFrame, index: int) -> int:
        """The index of a ``get-tuple-element``."""
        try:
            return integer(frame.computation.attributes[index].get("index", ""))
        except ValueError as error:
            raise self.program.error(frame.computation, index, f"attribute index: {error}") from error

    def _parameter(self, frame: LoweringFrame, index: int) -> None:
        number = self.program.parameter_number(frame.computation, index)
        if frame.computation is self.program.module.entry:
            node = self.add(frame, index, FREE)
            place = self.program.result_over(number)
            if place >= 0:
                self.emitter.builder.add_extra(node, DONATED_TO, 0, str(place).encode())
            return
        if not 0 <= number < len(frame.arguments):
            raise self.program.error(
                frame.computation,
                index,
                f"expected a parameter number below the {len(frame.arguments)} operands given",
            )
        argument = frame.arguments[number]
        frame.nodes.append(argument.node)
        if argument.parts is not None:
            frame.parts[index] = argument.parts

    def _element(self, frame: LoweringFrame, index: int) -> None:
        operands = frame.computation.operands[index]
        if len(operands) != 1:
            raise self.program.error(frame.computation, index, "expected one operand")
        number = self.element_index(frame, index)
        elements = self.program.shapes[frame.computation.shapes[operands[0]]].elements
        if elements is None or not 0 <= number < len(elements):
            count = 0 if elements is None else len(elements)
            raise self.program.error(
                frame.computation, index, f"expected an index below {count}, the size of the tuple"
            )
        value = frame.value(operands[0]).part(number)
        row = frame.computation.shapes[index]
        node = self.add(frame, index, FREE, deps=[value.node], operand_rows=(row,))
        if value.node in self._handles:
            self._handles.add(node)
        if value.parts is not None:
            frame.parts[index] = value.parts

    def _tuple(self, frame: LoweringFrame, index: int) -> None:
        rows = self.program.operand_rows(frame.computation, index)
        self.add(frame, index, FREE, operand_rows=rows)
        operands = frame.computation.operands[index]
        frame.parts[index] = tuple([frame.value(operand) for operand in operands])

    def _operation(self, frame: LoweringFrame, index: int, opcode: str) -> None:
        computation = frame.computation
        base, suffix = base_opcode(opcode)
        if suffix in {"-done", "-update"}:
            # ``-done`` and ``-update``: no cost of their own; they wait for the start, or for what it called.
            operands = frame.computation.operands[index]
            deps = self.operand_nodes(frame, index)
            if suffix == "-update" and operands and operands[0] in frame.issues:
                frame.issues[index] = frame.issues[operands[0]]
            result = frame.async_results.get(operands[0]) if operands else None
            if result is not None and suffix == "-update":
                frame.async_results[index] = result
            elif result is not None:
                deps.append(result)
            self.add(frame, index, FREE, deps=list(dict.fromkeys(deps)))
            return
        if opcode in _FREE:
            rows = () if opcode == "opt-barrier" else self.program.operand_rows(computation, index)
            self.add(frame, index, FREE, operand_rows=rows)
            return
        scheduled = self.program.is_scheduled
        operands = computation.operands[index]
        updates = opcode in UPDATING and bool(operands)
        in_place = updates and self.program.dies(computation, index, operands[0])
        cost = self.program.cost(computation, index, in_place=in_place, materialised=scheduled)
        if isnan(cost.flops):
            self._report_unknown(computation, index, base)
        if base == "iota" and scheduled:
            cost = Cost(
                OpClass.GENERATE,
                bytes_written=sum(tensor.bytes for tensor in self.program.tensors(computation.shapes[index])),
            )
        kind = communication_kind(opcode) or NodeKind.COMPUTE
        self.add_operation(frame, index, cost, kind)

    def add_operation(
        self, frame: LoweringFrame, index: int, cost: Cost, kind: NodeKind, *, deps: list[int] | None = None
    ) -> int:
        """Add a node with its operand types, and its communication row where it has one."""
        computation = frame.computation
        rows = self.program.operand_rows(computation, index)
        result = self.program.result_row(computation, index)
        if computation.opcodes[index] == "copy-start":
            cost, kind = self._transfer(rows, result, cost)
        elif kind is NodeKind.SEND:
            cost = replace(cost, bytes_written=0.0)
        elif kind is NodeKind.RECV:
            cost = replace(cost, bytes_read=0.0)
        node = self.add(frame, index, cost, deps=deps, operand_rows=rows, result_row=result, kind=kind)
        if kind in {NodeKind.COLLECTIVE, NodeKind.PERMUTE, NodeKind.SEND, NodeKind.RECV}:
            self.communication.annotate(node, (computation, index), rows, result)
        return node

    def _transfer(self, rows: tuple[int, ...], result: int, cost: Cost) -> tuple[Cost, NodeKind]:
        """``copy-start``: a copy by the DMA engine, to or from host memory where a layout says so."""
        kind = NodeKind.COMPUTE
        if rows and self.emitter.in_host_memory(rows[0]):
            kind = NodeKind.MEM_LOAD
        elif self.emitter.in_host_memory(result):
            kind = NodeKind.MEM_STORE
        return Cost(OpClass.MEMORY, bytes_read=cost.bytes_read, bytes_written=cost.bytes_written), kind

    def _report_unknown(self, computation: Computation, index: int, base: str) -> None:
        place = (computation, index)
        if base == "custom-call":
            target = unquote(computation.attributes[index].get("custom_call_target", ""))
            message = "custom call whose arithmetic is not known; operand and result bytes are a lower bound"
            self.findings.add("hlo.unknown-custom-call", target, place, message)
        elif not self.program.is_known(computation, index):
            message = "operation not in the cost table; operand and result bytes are a lower bound"
            self.findings.add("hlo.unknown-op", base, place, message)
        else:
            message = "arithmetic not known: an extent or an attribute it depends on is not stated"
            self.findings.add("hlo.unknown-cost", base, place, message)

    def _fusion(self, frame: LoweringFrame, index: int) -> None:
        """One node; collectives in the body make it a communicating one."""
        computation = frame.computation
        body = self.bodies.callee(computation, index)
        read, written = fusion_bytes(self.program, computation, index, body)
        for inner, place in body.unknown:
            self._report_unknown(inner, place, base_opcode(inner.opcodes[place])[0])
        cost = Cost(
            body.contraction_class or OpClass.FUSION,
            body.flops,
            body.useful_flops,
            body.transcendentals,
            read,
            written,
            body.rate_dtype,
            body.contractions,
        )
        if body.collectives:
            self._collective_fusion(frame, index, cost, body)
        else:
            # Keep which of what a fusion waits for it may write over.
            node = self.add_operation(frame, index, cost, NodeKind.COMPUTE)
            operands = frame.computation.operands[index]
            needed = self.operand_nodes(frame, index)
            places = [
                needed.index(frame.nodes[operands[place]])
                for place in self.overwritten.of(frame.computation, index)
            ]
            if places:
                text = ",".join(map(str, sorted(set(places))))
                self.emitter.builder.add_extra(node, IN_PLACE, 0, text.encode())

    def _collective_fusion(self, frame: LoweringFrame, index: int, cost: Cost, body: BodyCost) -> None:
        """A fusion around a collective. What a start fusion has begun is not counted again by the fusions
        that carry it on and complete it.
        """
        computation = frame.computation
        inner, place = body.collectives[0]
        channel = inner.attributes[place].get("channel_id", "")
        name = computation.names[index]
        # What began a collective hands out its buffers: to carry one on is not to wait for its end.
        deps = [node for node in self.operand_nodes(frame, index) if node not in self._handles]
        if _DONE_NAME in name:
            start = self._open_channels.pop(channel, -1)
            deps = self.operand_nodes(frame, index) if start < 0 else list(dict.fromkeys([*deps, start]))
            node = self.add(frame, index, FREE, deps=deps)
            self.last = node if self._in_order else self.last
            return
        if channel in self._open_channels:
            self.add_operation(frame, index, cost, NodeKind.COMPUTE, deps=deps)
            return
        if len(body.collectives) > 1:
            message = "several collectives in one fusion; the node states the first"
            self.findings.add("hlo.fused-collectives", "", (computation, index), message)
        kind = communication_kind(inner.opcodes[place]) or NodeKind.COLLECTIVE
        moved = self.program.cost(inner, place)
        cost = replace(
            cost,
            op_class=OpClass.COLLECTIVE if body.contraction_class is None else cost.op_class,
            bytes_read=cost.bytes_read + moved.bytes_read,
            bytes_written=cost.bytes_written + (moved.bytes_written if body.carried else 0.0),
        )
        rows = self.program.operand_rows(computation, index)
        node = self.add(frame, index, cost, deps=deps, operand_rows=rows, kind=kind)
        if _START_NAME in name and channel:
            self._open_channels[channel] = node
            self._handles.add(node)
        inner_rows, result = self.program.operand_rows(inner, place), self.program.result_row(inner, place)
        fused = self.program.result_row(computation, index)
        self.communication.annotate(node, (inner, place), inner_rows, result, fused)

    def bind(self, frame: LoweringFrame, index: int, value: LoweredValue) -> None:
        """Let users of a tuple follow its elements past the node of the call that made it."""
        if value.parts is not None:
            frame.parts[index] = value.parts


# Loops, conditionals, calls and asynchronous computations: bodies written out in regions, then one node
# each.
#
# The node of a ``while``, ``conditional`` or ``call`` costs nothing: it stands for the end of what it called,
# under the name that profiles show.

_CONTROL = Cost(OpClass.CONTROL)
_NO_BODY = BodyCost()
_HOST_THREAD = "host"


class _ControlDeps:
    """The control flow part of a :class:`~hespas.converters.hlo.lower.GraphLowering`."""

    def __init__(self, lowering: GraphLowering) -> None:
        """Work for one lowering."""
        self.lowering = lowering
        self.program = lowering.program
        self.findings = lowering.findings
        self.builder = lowering.emitter.builder

    def _open(self, frame: LoweringFrame, kind: RegionKind, trips: float, label: str) -> int:
        return self.builder.add_region(kind, parent=frame.region, trips=trips, label=label)

    def _enclosed(
        self, frame: LoweringFrame, callee: Computation, region: int, operands: tuple[int, ...]
    ) -> LoweringFrame:
        """Write ``callee`` out in a region; readers of the state of a loop further out go to ``frame``."""
        arguments = tuple([frame.value(operand) for operand in operands])
        reads_state = self.lowering.reads_state
        state = frozenset(place for place, operand in enumerate(operands) if reads_state(frame, operand))
        inner = self.lowering.write(LoweringFrame(callee, region, frame.depth + 1, arguments, state))
        frame.readers.extend(inner.readers)
        return inner

    def _part(self, frame: LoweringFrame, part: Computation, region: int, operand: int) -> LoweringFrame:
        """Write a loop's condition or body out, keeping which node reads which element of the state."""
        arguments = (frame.value(operand),)
        return self.lowering.write(LoweringFrame(part, region, frame.depth + 1, arguments, frozenset({0})))

    def _gate(self, frame: LoweringFrame, index: int, node: int, outer: Gate | None) -> Gate | None:
        """The gate that the decision made by instruction ``index`` puts before the nodes to come: none inside
        ``outer`` where it is a constant.
        """
        is_constant = frame.computation.opcodes[index] == "constant"
        return outer if is_constant else Gate(node, len(self.builder), outer)

    def call(self, frame: LoweringFrame, index: int) -> None:
        """``call``: the callee in place, then a node that ends it."""
        key = "to_apply" if "to_apply" in frame.computation.attributes[index] else "calls"
        callee = self.program.callee(frame.computation, index, key)
        region = self._open(frame, RegionKind.CALL, 1.0, callee.name)
        inner = self._enclosed(frame, callee, region, frame.computation.operands[index])
        result = inner.value(callee.root)
        deps = [result.node, *self.lowering.operand_nodes(frame, index)]
        self.lowering.add(frame, index, _CONTROL, deps=list(dict.fromkeys(deps)))
        self.lowering.bind(frame, index, result)

    def loop(self, frame: LoweringFrame, index: int) -> None:
        """``while``: one region with the condition and then the body, how often they run, and what a trip
        hands to the next. The evaluation of the condition that ends the loop is left out.
        """
        computation = frame.computation
        if len(computation.operands[index]) != 1:
            raise self.program.error(computation, index, "expected one operand, the loop state")
        condition = self.program.callee(computation, index, "condition")
        body = self.program.callee(computation, index, "body")
        trips = loop_trips(self.program.module, computation, index, condition, body)
        place = (computation, index)
        if isnan(trips.count):
            message = "trip count known at run time only"
            self.findings.add("hlo.unknown-trips", "", place, message)
        elif not trips.stated:
            message = "trip count inferred from condition and body"
            self.findings.add("hlo.inferred-trips", "", place, message, Severity.INFO)
        operands = computation.operands[index]
        region = self._open(frame, RegionKind.LOOP_BODY, trips.count, body.name)
        first = len(self.builder)
        tested = self._part(frame, condition, region, operands[0])
        test = tested.value(condition.root)
        outer = self.lowering.gate
        self.lowering.gate = gate = self._gate(tested, condition.root, test.node, outer)
        inner = self._part(frame, body, region, operands[0])
        self.lowering.gate = outer
        readers = [*tested.readers, *inner.readers]
        if gate is not None and gate is not outer and self.lowering.reads_state(tested, condition.root):
            readers += [(-1, node) for node in gate.waiting]
        if self.lowering.reads_state(frame, operands[0]):
            frame.readers.extend(readers)
        result = inner.value(body.root)
        # Edges from what a trip makes to what the next one reads; an element handed on unchanged has none.
        handed_on = set(readers)
        edges: dict[tuple[int, int], None] = {}
        for element, reader in readers:
            maker = result.node if element < 0 else result.part(element).node
            if maker >= first and (element, maker) not in handed_on:
                edges[maker, reader] = None
        for maker, reader in edges:
            self.builder.add_carried(region, maker, reader)
        if trips.count == 0:
            result = frame.value(operands[0])
        deps = [result.node, test.node, *self.lowering.operand_nodes(frame, index)]
        self.lowering.add(frame, index, _CONTROL, deps=list(dict.fromkeys(deps)))
        self.lowering.bind(frame, index, result)

    def conditional(self, frame: LoweringFrame, index: int) -> None:
        """``conditional``: all branches, of which the costliest runs once and the others never; only what it
        makes is waited for.
        """
        computation = frame.computation
        known = self.program.module.computations
        branches = [known[name] for name in branch_names(computation, index)]
        operands = computation.operands[index]
        if not branches or len(operands) != len(branches) + 1:
            raise self.program.error(
                computation, index, "expected a predicate and one operand for each branch"
            )
        bodies = [self.lowering.bodies.costs.get(branch.name, _NO_BODY) for branch in branches]
        kept = max(range(len(branches)), key=lambda place: bodies[place].about_ns)
        self._report_branches((computation, index), branches[kept], bodies)
        outer, before, after = self.lowering.gate, self.lowering.last, -1
        deps = [frame.nodes[operands[0]]]
        for place, branch in enumerate(branches):
            region = self._open(frame, RegionKind.BRANCH, float(place == kept), branch.name)
            self.lowering.gate = self._gate(frame, operands[0], deps[0], outer)
            self.lowering.last = before
            inner = self._enclosed(frame, branch, region, operands[place + 1 : place + 2])
            if place == kept:
                deps.append(inner.nodes[branch.root])
                after = self.lowering.last
        self.lowering.gate, self.lowering.last = outer, after
        self.lowering.add(frame, index, _CONTROL, deps=list(dict.fromkeys(deps)))

    def _report_branches(
        self, place: tuple[Computation, int], kept: Computation, bodies: list[BodyCost]
    ) -> None:
        message = f"of {len(bodies)} branches the costliest, %{kept.name}, is taken to run"
        self.findings.add("hlo.assumed-branch", f"%{place[0].names[place[1]]}", place, message)
        spoken = {tuple(inner.opcodes[at] for inner, at in body.collectives) for body in bodies}
        if len(spoken) > 1:
            message = "branches differ in their collectives: ranks that branch differently would hang"
            self.findings.add("hlo.branch-collectives", "", place, message)

    def async_start(self, frame: LoweringFrame, index: int) -> None:
        """A start that names a computation of several operations: they are written out behind it."""
        computation = frame.computation
        attributes = computation.attributes[index]
        key = "calls" if "calls" in attributes else "to_apply"
        callee = self.program.callee(computation, index, key)
        node = self.lowering.add(frame, index, _CONTROL)
        region = self._open(frame, RegionKind.ASYNC, 1.0, callee.name)
        first, before = len(self.builder), self.lowering.last
        arguments = tuple([LoweredValue(node)] * len(computation.operands[index]))
        inner = self.lowering.write(LoweringFrame(callee, region, frame.depth + 1, arguments))
        self.lowering.last = before  # it runs beside what follows
        if callee.thread == _HOST_THREAD:
            for made in range(first, len(self.builder)):
                self.builder.set(made, resource=int(Resource.HOST))
        frame.async_results[index] = inner.nodes[callee.root]
