"""The functions of a module as templates: each read once, when it is first called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hespas.converters.stablehlo.attributes import symbol_of
from hespas.converters.stablehlo.bindings import Bindings
from hespas.converters.stablehlo.control import CONTROL
from hespas.converters.stablehlo.mlir import Operation
from hespas.converters.stablehlo.module import Frame
from hespas.converters.stablehlo.scope import check_size
from hespas.converters.stablehlo.template import Template
from hespas.converters.stablehlo.walker import Shared, Walker
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = ["FunctionLibrary", "call_sites"]

_MAX_ACTIVE = 20
"""Functions read inside one another before the rest of a chain is read callees first, without nesting."""

_FEW_NODES = 1 << 16
"""A function of more, calls written out, has calls counted before they are written out any further."""

_CALLERS = {
    "func.call": "callee",
    "stablehlo.composite": "decomposition",
    "mhlo.composite": "decomposition",
    "stablehlo.async_start": "called_computation",
    "mhlo.async_start": "called_computation",
}


class FunctionLibrary:
    """Templates of one module. ``shared`` is set once the reader has built it around the library."""

    def __init__(self, frame: Frame, bindings: Bindings, path: str) -> None:
        self.shared: Shared | None = None
        self._frame = frame
        self._bindings = bindings
        self._path = path
        self._templates: dict[str, Template] = {}
        self._active: dict[str, None] = {}
        self._is_counted = False

    def template(self, name: str) -> Template:
        """The template of a function. Raises ``FormatError`` where it has no body or calls itself,
        ``UnsupportedError`` where it has several blocks.
        """
        known = self._templates.get(name)
        if known is not None:
            return known
        if name in self._active:
            raise _cycle(list(self._active), name, self._path)
        if len(self._active) < _MAX_ACTIVE:
            return self._read(name)
        for each in self._callees_first(name):
            if each not in self._templates:
                self._read(each)
        return self._templates[name]

    def _read(self, name: str) -> Template:
        block = self._frame.body(name)
        if block is None or self.shared is None:
            raise FormatError(
                f"@{name} is called and has no body here",
                path=self._path,
                position=f"function @{name}",
                hint="export the module with all its functions",
            )
        if len(self._frame.functions[name].regions[0].blocks) > 1:
            raise UnsupportedError(
                f"@{name} jumps between blocks",
                path=self._path,
                position=f"function @{name}",
                hint="StableHLO has while, if and case; lift other control flow to them first",
            )
        self._active[name] = None
        # Nobody makes the arguments of the entry: they depend on nothing.
        is_entry = name == self._frame.entry
        template = Template(name, 0 if is_entry else len(block.arguments))
        Walker(self.shared, template, CONTROL).read(block, is_entry=is_entry)
        del self._active[name]
        self._templates[name] = template
        if len(template) > _FEW_NODES and not self._is_counted:
            self._is_counted = True
            self._check_inlined()
        return template

    def _check_inlined(self) -> None:
        """Refuse, before more is copied, what calls would make too large: functions that are known, as often
        as others call them. Raises ``UnsupportedError``.
        """
        sizes: dict[str, int] = {}
        for name in self._callees_first(self._frame.entry):
            known = self._templates.get(name)
            calls = [] if known is not None else _calls(self._frame.functions.get(name), self._bindings)
            copied = sum(sizes.get(callee, 0) for callee, op in calls if op.name == "func.call")
            sizes[name] = copied if known is None else len(known)
        check_size(self._frame.entry, sizes[self._frame.entry], self._path)

    def _callees_first(self, start: str) -> list[str]:
        """Functions that ``start`` reaches, callees before callers. Raises ``FormatError`` for recursion."""
        finished: dict[str, None] = {}
        active: dict[str, None] = {}
        pending: list[tuple[str, bool]] = [(start, False)]
        while pending:
            name, is_done = pending.pop()
            if is_done:
                del active[name]
                finished[name] = None
                continue
            if name in finished or name in active:
                continue
            active[name] = None
            pending.append((name, True))
            for callee in _callees(self._frame.functions.get(name), self._bindings):
                if callee in active:
                    raise _cycle(list(active), callee, self._path)
                if callee not in finished:
                    pending.append((callee, False))
        return list(finished)


def _cycle(active: Sequence[str], callee: str, path: str) -> FormatError:
    cycle = [*active[active.index(callee) :], callee]
    return FormatError(
        f"functions call one another in a cycle: {' -> '.join(f'@{name}' for name in cycle[:20])}",
        path=path,
        position=f"function @{callee}",
        hint="StableHLO has no recursion; write the repetition as a while loop",
    )


def _calls(function: Operation | None, bindings: Bindings) -> list[tuple[str, Operation]]:
    """Calls in a function: callee and call operation."""
    found: list[tuple[str, Operation]] = []
    if function is None:
        return found
    advance: object = bindings.ir.WalkResult.ADVANCE

    def visit(op: Operation) -> object:
        attribute = _CALLERS.get(op.name)
        if attribute is not None:
            found.append((symbol_of(op, attribute), op))
        return advance

    function.walk(visit)
    return found


def _callees(function: Operation | None, bindings: Bindings) -> list[str]:
    return list(dict.fromkeys(callee for callee, _ in _calls(function, bindings) if callee))


def call_sites(frame: Frame, bindings: Bindings) -> Mapping[str, Sequence[Operation]]:
    """The call operations of each function."""
    sites: dict[str, list[Operation]] = {}
    for function in frame.functions.values():
        for callee, op in _calls(function, bindings):
            sites.setdefault(callee, []).append(op)
    return sites
