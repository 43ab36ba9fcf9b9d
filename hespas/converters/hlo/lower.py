"""Lowering of HLO computations to graph nodes: calls, loops and branches are inlined, a fusion is one node.

Text order is preserved; in a scheduled module it is the schedule. Tuples are tracked by element, so that a
``get-tuple-element`` waits for its element only. The bodies of loops, conditionals, calls and asynchronous
computations are inlined in regions. The node of a ``while``, ``conditional`` or ``call`` has no cost and ends
its region, under the name that profiles show.
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
"""Maximum nesting of calls, loops and branches; compiled programs stay below ten."""

_MESSAGES = frozenset({"send", "recv"})
_CALLS = frozenset({"call", "conditional"})
"""Instructions whose callees run in order."""
_ANYWHERE, _BESIDE, _IN_LINE = range(3)
_START_NAME, _DONE_NAME = "async-collective-start", "async-collective-done"
"""Names of TPU fusions that start and complete a collective."""
_MOST_AWAITED = 64
"""Maximum number of dependencies of a start that its users wait for instead of the start itself."""
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
    """Lowering of the entry computation of a module to a graph. Call :meth:`run` once."""

    def __init__(
        self, emitter: NodeEmitter, bodies: Bodies, communication: Communication, *, in_order: bool = False
    ) -> None:
        """Prepare the lowering. ``in_order`` means that the device executes instructions in text order, so
        that each waits for the previous one.
        """
        self.emitter = emitter
        self.program = emitter.program
        self.findings = emitter.findings
        self.bodies = bodies
        self.communication = communication
        self.overwritten = OverwrittenOperands(emitter.program)
        self.gate: Gate | None = None
        self._control = _ControlFlow(self)
        self._open_channels: dict[str, int] = {}
        self._handles: set[int] = set()
        self.last = -1
        """Last node of a device that runs in order."""
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
        """Lower the entry computation; mark the node of its result."""
        entry = self.program.module.entry
        frame = self.write(LoweringFrame(entry, -1, 0))
        if len(entry):
            self.emitter.builder.add_extra(frame.nodes[entry.root], RETURNED, 0, b"true")

    def write(self, frame: LoweringFrame) -> LoweringFrame:
        """Lower one computation, instruction by instruction."""
        if frame.depth > _MAX_CALL_DEPTH:
            raise UnsupportedError(
                f"calls, loops and branches nested more than {_MAX_CALL_DEPTH} deep",
                path=self.program.module.source.path,
                position=f"computation {frame.computation.name}",
                hint="dump the module again; compilers do not write such programs",
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
        """Return the distinct nodes of an instruction's operands, in operand order."""
        nodes = frame.nodes
        operands = frame.computation.operands[index]
        if len(operands) == 1:
            return [nodes[operands[0]]]
        return list(dict.fromkeys([nodes[operand] for operand in operands]))

    def control_nodes(self, frame: LoweringFrame, index: int) -> list[int]:
        """Return the nodes of an instruction's ``control-predecessors``. A predecessor that does not precede
        the instruction in the text is reported and left out. If a predecessor is an asynchronous start, the
        instruction waits only until it is issued: for the dependencies of the start, and not for the
        operation that it started.
        """
        text = frame.computation.attributes[index].get("control-predecessors")
        if text is None:
            return []
        predecessors = [frame.number_of(name) for name in names(text)]
        above = [number for number in predecessors if 0 <= number < len(frame.nodes)]
        if len(above) < len(predecessors):
            message = "a control predecessor is not above the instruction"
            self.findings.add("hlo.control-order", "", (frame.computation, index), message)
        issued = [node for number in above for node in frame.issues.get(number, (frame.nodes[number],))]
        return list(dict.fromkeys(issued))

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
        """Add the node of an instruction and record it as the value of the instruction."""
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
            # Record the element of the loop state that the node reads.
            opcodes = computation.opcodes
            for operand in computation.operands[index]:
                if self.reads_state(frame, operand):
                    whole = opcodes[index] != "get-tuple-element"
                    frame.readers.append((-1 if whole else self.element_index(frame, index), node))
        return node

    def _place_in_order(self, computation: Computation, index: int) -> int:
        """Classify an instruction for a device that executes instructions in order. :data:`_IN_LINE` waits
        for the previous instruction and delays the next one. :data:`_BESIDE` (an asynchronous start) waits
        for the previous instruction but delays none. :data:`_ANYWHERE` does neither.
        """
        opcode = computation.opcodes[index]
        if opcode.endswith("-start") or (
            _START_NAME in computation.names[index] and computation.opcodes[index] == "fusion"
        ):
            return _BESIDE
        if opcode.endswith("-done") or opcode == "while":
            return _IN_LINE
        return _ANYWHERE if opcode in _FREE or opcode.endswith("-update") or opcode in _CALLS else _IN_LINE

    def _note_widened(self, node: int, where: tuple[Computation, int], cost: Cost) -> None:
        """Mark matmuls whose operands the compiler converted to f32 with the narrow types before the
        conversion, and mark the conversions.
        """
        opcode = where[0].opcodes[where[1]]
        if cost.contractions:
            narrow = source_dtypes(self.program, *where)
            if narrow is not None:
                types = ",".join(dict.fromkeys(dtype.name for dtype in narrow))
                self.emitter.builder.add_extra(node, SOURCE_DTYPE, 0, types.encode())
                message = (
                    "multiplies values that the compiler widened to f32, as XLA does for CPUs; estimates for "
                    "other devices use the narrow type"
                )
                self.findings.add("hlo.widened-product", types, where, message, Severity.INFO)
        elif opcode in {"convert", "fusion"} and widens(self.program, *where):
            self.emitter.builder.add_extra(node, SOURCE_DTYPE, 0, b"convert")

    def reads_state(self, frame: LoweringFrame, operand: int) -> bool:
        """Return True if an operand is a parameter that holds the state of an enclosing loop."""
        if not frame.state or frame.computation.opcodes[operand] != "parameter":
            return False
        return self.program.parameter_number(frame.computation, operand) in frame.state

    def element_index(self, frame: LoweringFrame, index: int) -> int:
        """Return the tuple index of a ``get-tuple-element``."""
        try:
            return integer(frame.computation.attributes[index].get("index", ""))
        except ValueError as error:
            raise self.program.error(frame.computation, index, f"attribute index: {error}") from error

    def _parameter(self, frame: LoweringFrame, index: int) -> None:
        number = self.program.parameter_number(frame.computation, index)
        if frame.computation is self.program.module.entry:
            node = self.add(frame, index, FREE)
            result = self.program.result_over(number)
            if result >= 0:
                self.emitter.builder.add_extra(node, DONATED_TO, 0, str(result).encode())
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
            raise self.program.error(frame.computation, index, f"expected one operand, found {len(operands)}")
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
            # ``-done`` and ``-update`` have no cost; they wait for the start, or for its computation.
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
        """Add the node of an instruction with its operand types. If the instruction communicates, add its
        collective or message.
        """
        computation = frame.computation
        rows = self.program.operand_rows(computation, index)
        result = self.program.result_row(computation, index)
        if computation.opcodes[index] == "copy-start":
            # A copy by the DMA engine, to or from host memory if a layout says so.
            kind = NodeKind.COMPUTE
            if rows and self.emitter.in_host_memory(rows[0]):
                kind = NodeKind.MEM_LOAD
            elif self.emitter.in_host_memory(result):
                kind = NodeKind.MEM_STORE
            cost = Cost(OpClass.MEMORY, bytes_read=cost.bytes_read, bytes_written=cost.bytes_written)
        elif kind is NodeKind.SEND:
            cost = replace(cost, bytes_written=0.0)
        elif kind is NodeKind.RECV:
            cost = replace(cost, bytes_read=0.0)
        node = self.add(frame, index, cost, deps=deps, operand_rows=rows, result_row=result, kind=kind)
        if kind in {NodeKind.COLLECTIVE, NodeKind.PERMUTE, NodeKind.SEND, NodeKind.RECV}:
            self.communication.annotate(node, (computation, index), rows, result)
        return node

    def _report_unknown(self, computation: Computation, index: int, base: str) -> None:
        where = (computation, index)
        if base == "custom-call":
            target = unquote(computation.attributes[index].get("custom_call_target", ""))
            message = "custom call with unknown arithmetic; operand and result bytes are a lower bound"
            self.findings.add("hlo.unknown-custom-call", target, where, message)
        elif not self.program.is_known(computation, index):
            message = "operation not in the cost table; operand and result bytes are a lower bound"
            self.findings.add("hlo.unknown-op", base, where, message)
        else:
            message = "unknown arithmetic: a required extent or attribute is missing"
            self.findings.add("hlo.unknown-cost", base, where, message)

    def _fusion(self, frame: LoweringFrame, index: int) -> None:
        """Add a fusion to the graph as one node. If its body has a collective, the node communicates."""
        computation = frame.computation
        body = self.bodies.callee(computation, index)
        read, written = fusion_bytes(self.program, computation, index, body)
        for inner, unknown in body.unknown:
            self._report_unknown(inner, unknown, base_opcode(inner.opcodes[unknown])[0])
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
            # Record the dependencies that the fusion may overwrite.
            node = self.add_operation(frame, index, cost, NodeKind.COMPUTE)
            operands = frame.computation.operands[index]
            needed = self.operand_nodes(frame, index)
            positions = [
                needed.index(frame.nodes[operands[number]])
                for number in self.overwritten.of(frame.computation, index)
            ]
            if positions:
                text = ",".join(map(str, sorted(set(positions))))
                self.emitter.builder.add_extra(node, IN_PLACE, 0, text.encode())

    def _collective_fusion(self, frame: LoweringFrame, index: int, cost: Cost, body: BodyCost) -> None:
        """Add a fusion that contains a collective as a node. The collective is added only with the fusion
        that starts it, and not with the fusions that continue and complete it.
        """
        computation = frame.computation
        inner, inner_index = body.collectives[0]
        channel = inner.attributes[inner_index].get("channel_id", "")
        name = computation.names[index]
        # A start passes on the buffers of its collective; a fusion that continues it does not wait for its
        # end.
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
            message = "several collectives in one fusion; the node has the first one only"
            self.findings.add("hlo.fused-collectives", "", (computation, index), message)
        kind = communication_kind(inner.opcodes[inner_index]) or NodeKind.COLLECTIVE
        moved = self.program.cost(inner, inner_index)
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
        inner_rows, result = (
            self.program.operand_rows(inner, inner_index),
            self.program.result_row(inner, inner_index),
        )
        fused = self.program.result_row(computation, index)
        self.communication.annotate(node, (inner, inner_index), inner_rows, result, fused)

    def bind(self, frame: LoweringFrame, index: int, value: LoweredValue) -> None:
        """Record the nodes that produce the elements of a tuple that a call returned. Users of an element
        then depend on the node of that element and not on the node of the call.
        """
        if value.parts is not None:
            frame.parts[index] = value.parts


_CONTROL = Cost(OpClass.CONTROL)
_NO_BODY = BodyCost()
_HOST_THREAD = "host"


class _ControlFlow:
    """Lowering of calls, loops and branches for a :class:`~hespas.converters.hlo.lower.GraphLowering`."""

    def __init__(self, lowering: GraphLowering) -> None:
        """Use the builder and the findings of ``lowering``."""
        self.lowering = lowering
        self.program = lowering.program
        self.findings = lowering.findings
        self.builder = lowering.emitter.builder

    def _open(self, frame: LoweringFrame, kind: RegionKind, trips: float, label: str) -> int:
        return self.builder.add_region(kind, parent=frame.region, trips=trips, label=label)

    def _enclosed(
        self, frame: LoweringFrame, callee: Computation, region: int, operands: tuple[int, ...]
    ) -> LoweringFrame:
        """Lower ``callee`` inside a region. Nodes in it that read the state of an outer loop are recorded in
        ``frame``.
        """
        arguments = tuple([frame.value(operand) for operand in operands])
        reads_state = self.lowering.reads_state
        state = frozenset(number for number, operand in enumerate(operands) if reads_state(frame, operand))
        inner = self.lowering.write(LoweringFrame(callee, region, frame.depth + 1, arguments, state))
        frame.readers.extend(inner.readers)
        return inner

    def _part(self, frame: LoweringFrame, part: Computation, region: int, operand: int) -> LoweringFrame:
        """Lower the condition or the body (``part``) of a loop, and record the nodes that read elements of
        the loop state.
        """
        arguments = (frame.value(operand),)
        return self.lowering.write(LoweringFrame(part, region, frame.depth + 1, arguments, frozenset({0})))

    def _gate(self, frame: LoweringFrame, index: int, node: int, outer: Gate | None) -> Gate | None:
        """Return the gate for nodes that wait for ``node``, the loop or branch decision that instruction
        ``index`` makes (see :class:`~hespas.converters.hlo.module.Gate`). For a constant decision return
        ``outer``, because nodes do not wait for a constant.
        """
        is_constant = frame.computation.opcodes[index] == "constant"
        return outer if is_constant else Gate(node, len(self.builder), outer)

    def call(self, frame: LoweringFrame, index: int) -> None:
        """Lower a ``call``: the nodes of the callee, then a node for the end of the call."""
        key = "to_apply" if "to_apply" in frame.computation.attributes[index] else "calls"
        callee = self.program.callee(frame.computation, index, key)
        region = self._open(frame, RegionKind.CALL, 1.0, callee.name)
        inner = self._enclosed(frame, callee, region, frame.computation.operands[index])
        result = inner.value(callee.root)
        deps = [result.node, *self.lowering.operand_nodes(frame, index)]
        self.lowering.add(frame, index, _CONTROL, deps=list(dict.fromkeys(deps)))
        self.lowering.bind(frame, index, result)

    def loop(self, frame: LoweringFrame, index: int) -> None:
        """Lower a ``while`` to one region with condition and body, a trip count, and loop-carried
        dependencies. The final evaluation of the condition is left out.
        """
        computation = frame.computation
        if len(computation.operands[index]) != 1:
            found = len(computation.operands[index])
            raise self.program.error(
                computation, index, f"expected one operand, the loop state, found {found}"
            )
        condition = self.program.callee(computation, index, "condition")
        body = self.program.callee(computation, index, "body")
        trips = loop_trips(self.program.module, computation, index, condition, body)
        where = (computation, index)
        if isnan(trips.count):
            message = "trip count known at run time only"
            self.findings.add("hlo.unknown-trips", "", where, message)
        elif not trips.stated:
            message = "trip count inferred from condition and body"
            self.findings.add("hlo.inferred-trips", "", where, message, Severity.INFO)
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
        # Add edges from an iteration to the next one; an element that passes unchanged has none.
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
        """Lower a ``conditional``. The most expensive branch runs once, and the others never. Users of the
        result wait only for the results of that branch.
        """
        computation = frame.computation
        computations = self.program.module.computations
        branches = [computations[name] for name in branch_names(computation, index)]
        operands = computation.operands[index]
        if not branches or len(operands) != len(branches) + 1:
            raise self.program.error(
                computation,
                index,
                f"expected a predicate and one operand for each of {len(branches)} branches, found "
                f"{len(operands)} operands",
            )
        bodies = [self.lowering.bodies.costs.get(branch.name, _NO_BODY) for branch in branches]
        taken = max(range(len(branches)), key=lambda number: bodies[number].about_ns)
        where = (computation, index)
        message = f"the most expensive of {len(bodies)} branches, %{branches[taken].name}, is assumed to run"
        self.findings.add("hlo.assumed-branch", f"%{computation.names[index]}", where, message)
        sequences = {tuple(inner.opcodes[at] for inner, at in body.collectives) for body in bodies}
        if len(sequences) > 1:
            message = "branches differ in their collectives: ranks that branch differently would hang"
            self.findings.add("hlo.branch-collectives", "", where, message)
        outer, before, after = self.lowering.gate, self.lowering.last, -1
        deps = [frame.nodes[operands[0]]]
        for number, branch in enumerate(branches):
            region = self._open(frame, RegionKind.BRANCH, float(number == taken), branch.name)
            self.lowering.gate = self._gate(frame, operands[0], deps[0], outer)
            self.lowering.last = before
            inner = self._enclosed(frame, branch, region, operands[number + 1 : number + 2])
            if number == taken:
                deps.append(inner.nodes[branch.root])
                after = self.lowering.last
        self.lowering.gate, self.lowering.last = outer, after
        self.lowering.add(frame, index, _CONTROL, deps=list(dict.fromkeys(deps)))

    def async_start(self, frame: LoweringFrame, index: int) -> None:
        """Lower an ``async-start`` whose computation has several operations. They follow the node of the
        start, in a region.
        """
        computation = frame.computation
        attributes = computation.attributes[index]
        key = "calls" if "calls" in attributes else "to_apply"
        callee = self.program.callee(computation, index, key)
        node = self.lowering.add(frame, index, _CONTROL)
        region = self._open(frame, RegionKind.ASYNC, 1.0, callee.name)
        first, before = len(self.builder), self.lowering.last
        arguments = tuple([LoweredValue(node)] * len(computation.operands[index]))
        inner = self.lowering.write(LoweringFrame(callee, region, frame.depth + 1, arguments))
        self.lowering.last = before  # it overlaps with the following instructions
        if callee.thread == _HOST_THREAD:
            for made in range(first, len(self.builder)):
                self.builder.set(made, resource=int(Resource.HOST))
        frame.async_results[index] = inner.nodes[callee.root]
