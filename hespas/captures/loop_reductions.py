"""Motion of all-reduces of accumulated gradients out of loops, as XLA's compilers for devices do it.

A loop over microbatches adds an all-reduced gradient to a buffer in every iteration. XLA adds the local
gradients and reduces their sum once after the loop (``while_loop_all_reduce_code_motion.cc`` of openxla/xla).
That pass runs after the partitioner, whose output is read here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hespas.graph import Diagnostics

__all__ = ["move_reductions"]

_HEAD = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_LINE = re.compile(r"^(  (?:ROOT )?)%(\S+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)$")
_NAME = re.compile(r"%([^\s,()]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_CALLED = re.compile(r"\b(body|condition|to_apply)=%([^\s,]+)")
_ZERO = re.compile(r"constant\((?:0|-?0\.0*|false)\)")

_FORWARDED = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})
"""Operations of one operand that map elements in the same way on all ranks."""


@dataclass(frozen=True, slots=True)
class _DumpInstruction:
    """HLO instruction in a text dump; ``rest`` is the text after the opening parenthesis of its operands."""

    lead: str
    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        depth, end = 1, len(self.rest)
        for position, letter in enumerate(self.rest):
            depth += (letter == "(") - (letter == ")")
            if not depth:
                end = position
                break
        return _NAME.findall(self.rest[:end])

    @property
    def attributes(self) -> str:
        """Text after the operands, from the closing ``)`` on."""
        return self.rest[self.rest.index(")") :]

    @property
    def index(self) -> int | None:
        """Attribute ``index`` of a ``get-tuple-element``; None if it is missing."""
        match = _INDEX.search(self.attributes)
        return int(match[1]) if match else None

    @property
    def is_root(self) -> bool:
        return "ROOT" in self.lead

    def text(self) -> str:
        return f"{self.lead}%{self.name} = {self.shape} {self.opcode}({self.rest}"


_Computation = list[str | _DumpInstruction]


@dataclass(frozen=True, slots=True)
class _Motion:
    """All-reduce in the body of a loop that can be moved after the loop. ``body`` is the computation of the
    loop body, and ``name`` the all-reduce.

    ``index`` is the element of the loop state to which its result is added, ``caller`` the computation that
    contains the loop, and ``loop`` the name of the loop.
    """

    body: str
    name: str
    index: int
    caller: str
    loop: str


def move_reductions(text: str, path: str, diagnostics: Diagnostics) -> str:
    """Return the text of a partitioned program in which accumulated all-reduces are moved behind their loops,
    as compilers of devices do.

    An all-reduce stays in the loop, with a warning, if it cannot be proven that its result is only
    accumulated. The compiler of a device may move more of them. O(instructions) per moved all-reduce.
    """
    if "all-reduce(" not in text or " while(" not in text:
        return text
    # Lines of each computation by its name, including the lines up to the next computation.
    computations: dict[str, _Computation] = {"": []}
    current = computations[""]
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations.setdefault(head[2], [])
        match = _LINE.match(line)
        current.append(_DumpInstruction(*match.groups()) if match else line)
    num_moved = 0
    while (motion := next(_motions(computations), None)) is not None:
        computations = _moved(computations, motion)
        num_moved += 1
    diagnostics.info(
        "capture.moved-reductions",
        path,
        "all-reduces that a loop accumulates run once after the loop, as in XLA's compilers",
        count=num_moved,
    )
    bodies = _loop_bodies(computations)
    diagnostics.warning(
        "capture.accumulated-reductions",
        path,
        "an all-reduce in a loop is added to a buffer of the loop: the compiler of a device may run it once "
        "after the loop, but Hespas counts it in every iteration",
        count=sum(_num_accumulated(block) for name, block in computations.items() if name in bodies),
    )
    if not num_moved:
        return text
    return "".join(
        f"{line if isinstance(line, str) else line.text()}\n"
        for block in computations.values()
        for line in block
    )


def _instructions(block: _Computation) -> dict[str, _DumpInstruction]:
    return {line.name: line for line in block if isinstance(line, _DumpInstruction)}


def _users(instructions: Mapping[str, _DumpInstruction]) -> dict[str, list[_DumpInstruction]]:
    users: dict[str, list[_DumpInstruction]] = {name: [] for name in instructions}
    for instruction in instructions.values():
        for operand in instruction.operands:
            if operand in users:
                users[operand].append(instruction)
    return users


def _loop_bodies(computations: Mapping[str, _Computation]) -> dict[str, tuple[str, str]]:
    """Return the calling computation and the loop for each loop body. Bodies that several loops call are left
    out.
    """
    loops: dict[str, tuple[str, str]] = {}
    num_calls = Counter[str]()
    for caller, block in computations.items():
        for instruction in _instructions(block).values():
            for role, name in _CALLED.findall(instruction.rest):
                num_calls[name] += 1
                if role == "body" and instruction.opcode == "while":
                    loops[name] = caller, instruction.name
    return {name: loop for name, loop in loops.items() if num_calls[name] == 1}


def _motions(computations: Mapping[str, _Computation]) -> Iterator[_Motion]:
    """Yield the all-reduces that provably can be moved behind their loop."""
    for body, (caller, loop) in _loop_bodies(computations).items():
        instructions = _instructions(computations[body])
        users = _users(instructions)
        for reduction in instructions.values():
            if reduction.opcode != "all-reduce" or len(reduction.operands) != 1:
                continue
            reducer = dict(_CALLED.findall(reduction.rest)).get("to_apply", "")
            combine = _instructions(computations.get(reducer, []))
            roots = [instruction for instruction in combine.values() if instruction.is_root]
            if (
                len(combine) != 3
                or [root.opcode for root in roots] != ["add"]
                or len(set(roots[0].operands)) != 2
            ):
                continue
            index = _accumulated_in(instructions, users, reduction)
            if index is None:
                continue
            motion = _Motion(body, reduction.name, index, caller, loop)
            if not _is_read_elsewhere(computations, motion):
                yield motion


def _accumulated_in(
    instructions: Mapping[str, _DumpInstruction],
    users: Mapping[str, Sequence[_DumpInstruction]],
    reduction: _DumpInstruction,
) -> int | None:
    """Return the index of the loop state element to which the result of an all-reduce is added; None if the
    result has other uses.
    """
    value = reduction
    while len(users[value.name]) == 1 and users[value.name][0].opcode in _FORWARDED:
        value = users[value.name][0]
    if len(users[value.name]) != 1 or (total := users[value.name][0]).opcode != "add":
        return None
    others = [operand for operand in total.operands if operand != value.name]
    if len(others) != 1 or (index := _state_element(instructions, users, others[0])) is None:
        return None
    while len(users[total.name]) == 1 and users[total.name][0].opcode in _FORWARDED - {"convert"}:
        total = users[total.name][0]
    ends = users[total.name]
    if len(ends) != 1 or ends[0].opcode != "tuple" or not ends[0].is_root:
        return None
    positions = [position for position, operand in enumerate(ends[0].operands) if operand == total.name]
    return index if positions == [index] else None


def _state_element(
    instructions: Mapping[str, _DumpInstruction], users: Mapping[str, Sequence[_DumpInstruction]], name: str
) -> int | None:
    """Return the index of the loop state element from which the value ``name`` is read; None if the loop body
    also uses that element for anything else.
    """
    while name in instructions and len(users[name]) == 1:
        instruction = instructions[name]
        if (
            instruction.opcode == "get-tuple-element"
            and instructions[instruction.operands[0]].opcode == "parameter"
        ):
            return instruction.index
        if instruction.opcode not in _FORWARDED - {"convert"}:
            return None
        name = instruction.operands[0]
    return None


def _is_read_elsewhere(computations: Mapping[str, _Computation], motion: _Motion) -> bool:
    """Return True if the loop reads the accumulated buffer for anything but the sum, or if the result of the
    loop is used without selecting an element.
    """
    around = _instructions(computations[motion.caller])
    loop = around[motion.loop]
    condition = dict(_CALLED.findall(loop.rest)).get("condition", "")
    for name, allowed in ((motion.body, 1), (condition, 0)):
        reads = [
            instruction
            for instruction in _instructions(computations.get(name, [])).values()
            if instruction.opcode == "get-tuple-element" and instruction.index == motion.index
        ]
        if len(reads) > allowed:
            return True
    start = around.get(loop.operands[0])
    users = _users(around)
    is_plain = start is not None and start.opcode == "tuple" and len(users[start.name]) == 1
    return (
        not is_plain
        or loop.is_root
        or any(instruction.opcode != "get-tuple-element" for instruction in users[loop.name])
    )


def _moved(computations: dict[str, _Computation], motion: _Motion) -> dict[str, _Computation]:
    """Return the program with the all-reduce of ``motion`` after its loop instead of inside it."""
    reduction = _instructions(computations[motion.body])[motion.name]
    (operand,) = reduction.operands
    pattern = re.compile(rf"%{re.escape(motion.name)}(?=[,)}}\s])")
    body = [
        line if isinstance(line, str) else replace(line, rest=pattern.sub(lambda _: f"%{operand}", line.rest))
        for line in computations[motion.body]
        if isinstance(line, str) or line.name != motion.name
    ]
    around = _instructions(computations[motion.caller])
    start = around[around[motion.loop].operands[0]]
    first = start.operands[motion.index]
    source = first
    while source in around and around[source].opcode in {"broadcast", *_FORWARDED}:
        source = around[source].operands[0]
    starts_at_zero = source in around and bool(_ZERO.match(f"{around[source].opcode}({around[source].rest}"))
    outer: _Computation = []
    for line in computations[motion.caller]:
        if isinstance(line, str):
            outer.append(line)
        elif line.name == start.name and not starts_at_zero:
            shape = around[first].shape
            zero, zeros = f"{motion.loop}.zero.{motion.index}", f"{motion.loop}.zeros.{motion.index}"
            operands = start.operands
            operands[motion.index] = zeros
            outer += [
                _DumpInstruction("  ", zero, f"{shape.partition('[')[0]}[]", "constant", "0)"),
                _DumpInstruction("  ", zeros, shape, "broadcast", f"%{zero}), dimensions={{}}"),
                replace(start, rest=", ".join(f"%{operand}" for operand in operands) + start.attributes),
            ]
        elif (
            line.opcode == "get-tuple-element"
            and line.operands == [motion.loop]
            and line.index == motion.index
        ):
            outer += _reduced(line, reduction.attributes, "" if starts_at_zero else first)
        else:
            outer.append(line)
    return computations | {motion.body: body, motion.caller: outer}


def _reduced(element: _DumpInstruction, attributes: str, first: str) -> list[_DumpInstruction]:
    """Return instructions that replace an element of a loop's result after its all-reduce was moved behind
    the loop. They all-reduce the element and add the value that it had before the loop, ``first`` (empty:
    zeros).
    """
    local = replace(element, lead="  ", name=f"{element.name}.local")
    operands = f"%{local.name}{attributes}"
    total = _DumpInstruction(element.lead, element.name, element.shape, "all-reduce", operands)
    if not first:
        return [local, total]
    total = replace(total, lead="  ", name=f"{element.name}.total")
    total_sum = _DumpInstruction(
        element.lead, element.name, element.shape, "add", f"%{first}, %{total.name})"
    )
    return [local, total, total_sum]


def _num_accumulated(block: _Computation) -> int:
    """Return the number of all-reduces in a loop body whose results are added, directly or through other
    operations, to an element of the loop state.
    """
    instructions = _instructions(block)
    users = _users(instructions)

    def is_state(name: str) -> bool:
        while name in instructions and instructions[name].opcode in {*_FORWARDED, "dynamic-slice"}:
            name = instructions[name].operands[0]
        value = instructions.get(name)
        return (
            value is not None
            and value.opcode == "get-tuple-element"
            and instructions[value.operands[0]].opcode == "parameter"
        )

    count = 0
    for reduction in instructions.values():
        if reduction.opcode != "all-reduce":
            continue
        seen, waiting = {reduction.name}, [reduction]
        while waiting:
            for user in users[waiting.pop().name]:
                if user.opcode in {*_FORWARDED, "select", "get-tuple-element", "dynamic-slice", "fusion"}:
                    if user.name not in seen:
                        seen.add(user.name)
                        waiting.append(user)
                elif user.opcode == "add" and any(map(is_state, user.operands)):
                    count += 1
                    waiting = []
                    break
    return count
