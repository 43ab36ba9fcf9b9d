"""All-reduces of accumulated gradients, moved out of their loops as XLA's compilers for devices do.

A loop over microbatches adds an all-reduced gradient to a buffer in every iteration. XLA adds the local
gradients and reduces their sum once behind the loop (``while_loop_all_reduce_code_motion.cc`` of
openxla/xla), in a pass that runs after the partitioner, whose text is read here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hespas.graph import Diagnostics

__all__ = ["moved_reductions"]

_HEAD = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{$")
_LINE = re.compile(r"^(  (?:ROOT )?)%(\S+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)$")
_NAME = re.compile(r"%([^\s,()]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_CALLED = re.compile(r"\b(body|condition|to_apply)=%([^\s,]+)")
_ZERO = re.compile(r"constant\((?:0|-?0\.0*|false)\)")

_FORWARDED = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})
"""Operations of one operand that map elements alike on all ranks."""


@dataclass(frozen=True, slots=True)
class _Line:
    """An instruction of a dump: ``rest`` is what stands behind the opening parenthesis of its operands."""

    lead: str
    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        depth, end = 1, len(self.rest)
        for place, letter in enumerate(self.rest):
            depth += (letter == "(") - (letter == ")")
            if not depth:
                end = place
                break
        return _NAME.findall(self.rest[:end])

    @property
    def attributes(self) -> str:
        """The text behind the operands, from ``)`` on."""
        return self.rest[self.rest.index(")") :]

    def text(self) -> str:
        return f"{self.lead}%{self.name} = {self.shape} {self.opcode}({self.rest}"


_Block = list[str | _Line]


@dataclass(frozen=True, slots=True)
class _Motion:
    """An all-reduce of a body that may move: ``index`` is the element of the loop's state it is added to."""

    body: str
    name: str
    index: int


def moved_reductions(text: str, path: str, diagnostics: Diagnostics) -> str:
    """Return a partitioned program whose accumulated all-reduces stand behind their loops.

    Those that may only be accumulated stay, with a warning: the compiler for a device may move more.
    O(instructions) for each that moves.
    """
    if "all-reduce(" not in text or " while(" not in text:
        return text
    blocks = _blocks(text)
    moved = 0
    while (found := next(_movable(blocks), None)) is not None:
        blocks = _without(blocks, *found)
        moved += 1
    diagnostics.info(
        "capture.moved-reductions",
        path,
        "all-reduces that a loop accumulates run once behind it, as XLA's compilers move them",
        count=moved,
    )
    diagnostics.warning(
        "capture.accumulated-reductions",
        path,
        "an all-reduce in a loop is added to a buffer of the loop: the compiler of a device may run it once "
        "behind the loop, and this counts it in every iteration",
        count=sum(_may_accumulate(block) for name, block in blocks.items() if name in _bodies(blocks)),
    )
    if not moved:
        return text
    return "".join(
        f"{line if isinstance(line, str) else line.text()}\n" for block in blocks.values() for line in block
    )


def _blocks(text: str) -> dict[str, _Block]:
    """Return the lines of each computation by its name, with those up to the next computation."""
    blocks: dict[str, _Block] = {"": []}
    current = blocks[""]
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = blocks.setdefault(head[2], [])
        found = _LINE.match(line)
        current.append(_Line(*found.groups()) if found else line)
    return blocks


def _lines(block: _Block) -> dict[str, _Line]:
    return {line.name: line for line in block if isinstance(line, _Line)}


def _users(lines: Mapping[str, _Line]) -> dict[str, list[_Line]]:
    users: dict[str, list[_Line]] = {name: [] for name in lines}
    for line in lines.values():
        for operand in line.operands:
            if operand in users:
                users[operand].append(line)
    return users


def _bodies(blocks: Mapping[str, _Block]) -> dict[str, tuple[str, str]]:
    """Return the computation and the name of the loop of each body that one loop alone runs."""
    found: dict[str, tuple[str, str]] = {}
    calls = Counter[str]()
    for caller, block in blocks.items():
        for line in _lines(block).values():
            for role, name in _CALLED.findall(line.rest):
                calls[name] += 1
                if role == "body" and line.opcode == "while":
                    found[name] = caller, line.name
    return {name: place for name, place in found.items() if calls[name] == 1}


def _movable(blocks: Mapping[str, _Block]) -> Iterator[tuple[_Motion, str, str]]:
    """Return all-reduces that can be proven to move, with the caller and the name of their loop."""
    for body, (caller, loop) in _bodies(blocks).items():
        lines = _lines(blocks[body])
        users = _users(lines)
        for line in lines.values():
            if line.opcode != "all-reduce" or len(line.operands) != 1 or not _is_sum(blocks, line):
                continue
            index = _accumulated_in(lines, users, line)
            if index is None or _is_read_elsewhere(blocks, body, (caller, loop), index):
                continue
            yield _Motion(body, line.name, index), caller, loop


def _is_sum(blocks: Mapping[str, _Block], line: _Line) -> bool:
    called = dict(_CALLED.findall(line.rest)).get("to_apply", "")
    body = _lines(blocks.get(called, []))
    root = [each for each in body.values() if "ROOT" in each.lead]
    return len(body) == 3 and len(root) == 1 and root[0].opcode == "add" and len(set(root[0].operands)) == 2


def _accumulated_in(
    lines: Mapping[str, _Line], users: Mapping[str, Sequence[_Line]], reduction: _Line
) -> int | None:
    """Return the element of the state that an all-reduce is added to, where that is all it is used for."""
    value = reduction
    while len(users[value.name]) == 1 and users[value.name][0].opcode in _FORWARDED:
        value = users[value.name][0]
    if len(users[value.name]) != 1 or (total := users[value.name][0]).opcode != "add":
        return None
    others = [each for each in total.operands if each != value.name]
    if len(others) != 1 or (index := _element(lines, users, others[0])) is None:
        return None
    while len(users[total.name]) == 1 and users[total.name][0].opcode in _FORWARDED - {"convert"}:
        total = users[total.name][0]
    ends = users[total.name]
    if len(ends) != 1 or ends[0].opcode != "tuple" or "ROOT" not in ends[0].lead:
        return None
    places = [place for place, each in enumerate(ends[0].operands) if each == total.name]
    return index if places == [index] else None


def _element(lines: Mapping[str, _Line], users: Mapping[str, Sequence[_Line]], name: str) -> int | None:
    """Return the element of the state that a value is, where nothing else in the body reads it."""
    while name in lines and len(users[name]) == 1:
        line = lines[name]
        if line.opcode == "get-tuple-element" and lines[line.operands[0]].opcode == "parameter":
            found = _INDEX.search(line.attributes)
            return int(found[1]) if found else None
        if line.opcode not in _FORWARDED - {"convert"}:
            return None
        name = line.operands[0]
    return None


def _is_read_elsewhere(blocks: Mapping[str, _Block], body: str, place: tuple[str, str], index: int) -> bool:
    """Return whether the loop reads the buffer for anything else, or its result is used as a whole."""
    caller, loop = place
    around = _lines(blocks[caller])
    condition = dict(_CALLED.findall(around[loop].rest)).get("condition", "")
    for name, allowed in ((body, 1), (condition, 0)):
        reads = [
            line
            for line in _lines(blocks.get(name, [])).values()
            if line.opcode == "get-tuple-element" and (found := _INDEX.search(line.attributes))
            if int(found[1]) == index
        ]
        if len(reads) > allowed:
            return True
    behind = _users(around)[loop]
    start = around.get(around[loop].operands[0])
    is_plain = start is not None and start.opcode == "tuple" and len(_users(around)[start.name]) == 1
    return (
        not is_plain
        or "ROOT" in around[loop].lead
        or any(line.opcode != "get-tuple-element" for line in behind)
    )


def _without(blocks: dict[str, _Block], motion: _Motion, caller: str, loop: str) -> dict[str, _Block]:
    """Return the program with an all-reduce behind its loop instead of in it."""
    lines = _lines(blocks[motion.body])
    reduction = lines[motion.name]
    (operand,) = reduction.operands
    body = [
        line if isinstance(line, str) else _renamed(line, motion.name, operand)
        for line in blocks[motion.body]
        if isinstance(line, str) or line.name != motion.name
    ]
    around = _lines(blocks[caller])
    start = around[around[loop].operands[0]]
    first = start.operands[motion.index]
    is_zero = _is_zero(around, first)
    attributes = reduction.attributes
    outer: _Block = []
    for line in blocks[caller]:
        if isinstance(line, str):
            outer.append(line)
        elif line.name == start.name and not is_zero:
            zeros = _zeros(around[first], loop, motion.index)
            outer += [*zeros, _with_operand(line, motion.index, zeros[-1].name)]
        elif line.opcode == "get-tuple-element" and line.operands == [loop] and _is_of(line, motion.index):
            outer += _reduced(line, attributes, "" if is_zero else first)
        else:
            outer.append(line)
    return blocks | {motion.body: body, caller: outer}


def _reduced(line: _Line, attributes: str, first: str) -> list[_Line]:
    """Return the element of a loop's result, reduced and added to the ``first`` value (empty: zeros)."""
    local = replace(line, lead="  ", name=f"{line.name}.local")
    total = _Line(line.lead, line.name, line.shape, "all-reduce", f"%{local.name}{attributes}")
    if not first:
        return [local, total]
    total = replace(total, lead="  ", name=f"{line.name}.total")
    return [local, total, _Line(line.lead, line.name, line.shape, "add", f"%{first}, %{total.name})")]


def _renamed(line: _Line, name: str, other: str) -> _Line:
    pattern = rf"%{re.escape(name)}(?=[,)}}\s])"
    return replace(line, rest=re.sub(pattern, lambda _: f"%{other}", line.rest))


def _is_of(line: _Line, index: int) -> bool:
    found = _INDEX.search(line.attributes)
    return found is not None and int(found[1]) == index


def _is_zero(lines: Mapping[str, _Line], name: str) -> bool:
    while name in lines and lines[name].opcode in {"broadcast", *_FORWARDED}:
        name = lines[name].operands[0]
    return name in lines and bool(_ZERO.match(f"{lines[name].opcode}({lines[name].rest}"))


def _zeros(like: _Line, loop: str, index: int) -> list[_Line]:
    element = like.shape.partition("[")[0]
    zero, zeros = f"{loop}.zero.{index}", f"{loop}.zeros.{index}"
    return [
        _Line("  ", zero, f"{element}[]", "constant", "0)"),
        _Line("  ", zeros, like.shape, "broadcast", f"%{zero}), dimensions={{}}"),
    ]


def _with_operand(line: _Line, index: int, name: str) -> _Line:
    operands = line.operands
    operands[index] = name
    return replace(line, rest=", ".join(f"%{each}" for each in operands) + line.attributes)


def _may_accumulate(block: _Block) -> int:
    """Return how many all-reduces of a body are added to an element of the state, also indirectly."""
    lines = _lines(block)
    users = _users(lines)
    found = 0
    for line in lines.values():
        if line.opcode != "all-reduce":
            continue
        seen, waiting = {line.name}, [line]
        while waiting:
            for user in users[waiting.pop().name]:
                if user.opcode in {*_FORWARDED, "select", "get-tuple-element", "dynamic-slice", "fusion"}:
                    if user.name not in seen:
                        seen.add(user.name)
                        waiting.append(user)
                elif user.opcode == "add" and any(_is_state(lines, each) for each in user.operands):
                    found += 1
                    waiting = []
                    break
    return found


def _is_state(lines: Mapping[str, _Line], name: str) -> bool:
    while name in lines and lines[name].opcode in {*_FORWARDED, "dynamic-slice"}:
        name = lines[name].operands[0]
    line = lines.get(name)
    return (
        line is not None
        and line.opcode == "get-tuple-element"
        and lines[line.operands[0]].opcode == "parameter"
    )
