"""The step as the embedded simulator, a user's ASTRA-sim and a profile have it, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hespas.cli.session import emit
from hespas.cli.text import count_text, table_text, time_text
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.api import SimulationResult

__all__ = ["check_binary", "show_others"]


def check_binary(simulator: str, astra_bin: Path | None) -> None:
    """Raise ``UsageError`` where simulator and binary are not both given."""
    if simulator == "astra-sim" and astra_bin is None:
        raise UsageError("--simulator astra-sim needs --astra-bin", hint="--astra-bin PATH of its binary")
    if simulator != "astra-sim" and astra_bin is not None:
        raise UsageError("--astra-bin belongs to --simulator astra-sim", hint="add --simulator astra-sim")


def show_others(done: SimulationResult) -> None:
    """One line per answer, where there is another one than that of this simulation."""
    rows = [(f"hespas, mode {done.mode}", time_text(done.step_ns), "", "")]
    if done.external is not None and done.statistics is not None:
        from hespas.api.external import external_document

        said = external_document(done.external, done.statistics)
        ranks = len(said.ranks)
        rows.append(
            (
                f"ASTRA-sim ({Path(said.binary).name})",
                time_text(said.step_ns),
                _difference(done.step_ns, said.step_ns),
                f"{count_text(said.differing_ranks)} of {count_text(ranks)}",
            )
        )
    if np.isfinite(done.measured_ns):
        measured_ns = done.measured_ns
        rows.append(("measured", time_text(measured_ns), _difference(done.step_ns, measured_ns), ""))
    if len(rows) > 1:
        emit("")
        heads = ("step", "time", "hespas differs by", "ranks that differ")
        emit(table_text(heads, rows))


def _difference(ours_ns: float, theirs_ns: float) -> str:
    return f"{ours_ns / theirs_ns - 1.0:+.2%}" if theirs_ns else ""
