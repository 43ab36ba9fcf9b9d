"""An HLO module as this package holds it between text and graph: columns per computation, no object per
op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hespas.converters.hlo.scan import Source
from hespas.converters.hlo.shapes import Shape

__all__ = ["Computation", "FrameTable", "HloModule"]


@dataclass(slots=True, eq=False)
class Computation:
    """One computation; the lists have one entry per instruction, in text order.

    ``shapes`` are rows of the module's shapes; ``operands`` instruction numbers of the same computation;
    ``parameters`` lead from a parameter's number to its instruction; ``payloads`` are the number of a
    parameter and the text of a short constant (else ``""``); ``attributes`` the values as written;
    ``positions`` offsets into the text. ``root`` is an instruction number.
    """

    name: str
    position: int
    thread: str = ""
    parameters: dict[str, int] = field(default_factory=dict[str, int])
    root: int = -1
    names: list[str] = field(default_factory=list[str])
    opcodes: list[str] = field(default_factory=list[str])
    shapes: list[int] = field(default_factory=list[int])
    operands: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    payloads: list[str] = field(default_factory=list[str])
    attributes: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    positions: list[int] = field(default_factory=list[int])

    def __len__(self) -> int:
        return len(self.opcodes)


@dataclass(slots=True, eq=False)
class FrameTable:
    """The header's stack frame tables: where an instruction's ``stack_frame_id`` leads."""

    files: dict[int, str] = field(default_factory=dict[int, str])
    functions: dict[int, str] = field(default_factory=dict[int, str])
    locations: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    frames: dict[int, int] = field(default_factory=dict[int, int])

    def source(self, frame: int) -> str:
        """``file:line`` of a frame's innermost location, ``""`` where a table does not have it."""
        file, line = self.locations.get(self.frames.get(frame, -1), (-1, 0))
        name = self.files.get(file, "")
        return f"{name}:{line}" if name else ""


@dataclass(frozen=True, slots=True, eq=False)
class HloModule:
    """A parsed module. ``attributes`` are those of the header line, as written; ``marked`` says that the text
    names its entry, which is the last computation otherwise.
    """

    name: str
    source: Source
    attributes: Mapping[str, str]
    computations: Mapping[str, Computation]
    entry: Computation
    shapes: list[Shape]
    frames: FrameTable
    marked: bool = True

    @property
    def num_instructions(self) -> int:
        """Instructions of all computations."""
        return sum(len(computation) for computation in self.computations.values())

    def shape_of(self, computation: Computation, index: int) -> Shape:
        """The result shape of one instruction."""
        return self.shapes[computation.shapes[index]]

    def line_of(self, computation: Computation, index: int) -> int:
        """The text line of one instruction."""
        return self.source.line(computation.positions[index])
