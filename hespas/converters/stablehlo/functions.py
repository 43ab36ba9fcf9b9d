"""Templates of a module's functions. A function is read when it is first called."""

from __future__ import annotations

from collections.abc import Sequence

from hespas.converters.stablehlo.mlir import Bindings
from hespas.converters.stablehlo.module import ModuleHeader, function_calls
from hespas.converters.stablehlo.template import FunctionTemplate, check_size
from hespas.converters.stablehlo.walker import ModuleContext, Walker
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = ["FunctionLibrary"]

_MAX_ACTIVE = 20
"""Limit of nested reads of functions; deeper call chains are read without nesting, callees first."""

_FEW_NODES = 1 << 16
"""Size of a function after inlining that starts the check of the total size."""


class FunctionLibrary:
    """Library of the functions of one module as templates, which are lists of operations with costs. A
    template is made when it is first needed. The reader sets ``context`` after it has created the library.
    """

    def __init__(self, header: ModuleHeader, bindings: Bindings) -> None:
        self.context: ModuleContext | None = None
        self._header = header
        self._bindings = bindings
        self._templates: dict[str, FunctionTemplate] = {}
        self._active: dict[str, None] = {}
        self._is_counted = False

    def template(self, name: str) -> FunctionTemplate:
        """Return the template of a function.

        Raises ``FormatError`` if the function has no body or calls itself, ``UnsupportedError`` if it has
        several blocks.
        """
        template = self._templates.get(name)
        if template is not None:
            return template
        if name in self._active:
            raise _cycle(list(self._active), name)
        if len(self._active) < _MAX_ACTIVE:
            return self._read(name)
        for callee in self._callees_first(name):
            if callee not in self._templates:
                self._read(callee)
        return self._templates[name]

    def _read(self, name: str) -> FunctionTemplate:
        block = self._header.body(name)
        if block is None or self.context is None:
            raise FormatError(
                f"@{name} is called but has no body in this module",
                position=f"function @{name}",
                hint="export the module with all its functions",
            )
        if len(self._header.functions[name].regions[0].blocks) > 1:
            raise UnsupportedError(
                f"@{name} has several blocks",
                position=f"function @{name}",
                hint="convert other control flow to while, if and case first",
            )
        self._active[name] = None
        # Arguments of the entry have no producers in the program.
        is_entry = name == self._header.entry
        template = FunctionTemplate(name, 0 if is_entry else len(block.arguments))
        Walker(self.context, template).read(block, is_entry=is_entry)
        del self._active[name]
        self._templates[name] = template
        if len(template) > _FEW_NODES and not self._is_counted:
            self._is_counted = True
            self._check_inlined()
        return template

    def _check_inlined(self) -> None:
        """Raise ``UnsupportedError`` if the entry function would become too large through inlined calls. This
        is checked before calls are inlined.

        The size is computed from the templates made so far and the number of calls of each.
        """
        sizes: dict[str, int] = {}
        for name in self._callees_first(self._header.entry):
            template = self._templates.get(name)
            calls = (
                []
                if template is not None
                else function_calls(self._header.functions.get(name), self._bindings)
            )
            copied = sum(sizes.get(callee, 0) for callee, op in calls if op.name == "func.call")
            sizes[name] = copied if template is None else len(template)
        check_size(self._header.entry, sizes[self._header.entry])

    def _callees_first(self, start: str) -> list[str]:
        """Return the functions that ``start`` reaches, callees first.

        Raises ``FormatError`` for recursion.
        """
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
            function = self._header.functions.get(name)
            for callee in list(
                dict.fromkeys(callee for callee, _ in function_calls(function, self._bindings) if callee)
            ):
                if callee in active:
                    raise _cycle(list(active), callee)
                if callee not in finished:
                    pending.append((callee, False))
        return list(finished)


def _cycle(active: Sequence[str], callee: str) -> FormatError:
    cycle = [*active[active.index(callee) :], callee]
    return FormatError(
        f"functions call one another in a cycle: {' -> '.join(f'@{name}' for name in cycle[:20])}",
        position=f"function @{callee}",
        hint="write the repetition as a while loop: StableHLO has no recursion",
    )
