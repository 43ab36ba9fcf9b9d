"""The shape of a systolic array, and how it is written: ``128x128``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hespas.graph.errors import UsageError

__all__ = ["Array", "Dataflow", "parse_array", "parse_dataflow"]

Dataflow = Literal["os", "ws", "is"]
"""What stays in the cells while the rest streams by: outputs, weights (the filter) or inputs."""

_SHAPE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Array:
    """One array of ``rows`` x ``columns`` multiply-accumulate cells."""

    rows: int
    columns: int
    dataflow: Dataflow

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} {self.dataflow}"


def parse_array(text: str) -> tuple[int, int]:
    """Rows and columns of ``RxC``. Raises ``UsageError``."""
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise UsageError(f"'{text}' is no shape of an array", hint="write rows x columns, as in 128x128")
    return int(found[1]), int(found[2])


def parse_dataflow(text: str) -> Dataflow:
    """``os``, ``ws`` or ``is``. Raises ``UsageError``."""
    match text.lower():
        case "os":
            return "os"
        case "ws":
            return "ws"
        case "is":
            return "is"
        case _:
            raise UsageError(
                f"'{text}' is no dataflow",
                hint="os, ws or is: outputs, weights or inputs stay in the array",
            )
