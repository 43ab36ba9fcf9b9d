"""Conformance of tools: run Hespas, or another tool, on a kit of execution traces with known results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from hespas.api.arguments import Seed, checked
from hespas.api.documents import Result, write_json
from hespas.graph.errors import UsageError
from hespas.graph.hints import OUTPUT, AtLeast, Option, PositiveInt
from hespas.graph.progress import Progress
from hespas.report import Table
from hespas.report.texts import counted

if TYPE_CHECKING:
    from hespas.validators.conformance import CaseResult, ConformanceRun

__all__ = ["ConformanceReport", "conform"]

_TIMEOUT_S = 10.0
_MEMORY_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, repr=False)
class ConformanceReport(Result):
    """Results of a tool for the cases of a conformance kit. ``details`` is the validator's own result."""

    page_title: ClassVar[str] = "Conformance"

    details: ConformanceRun
    inputs: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        """Return True if no case failed."""
        return self.details.valid

    @property
    def failures(self) -> tuple[CaseResult, ...]:
        """Return the cases that failed."""
        return tuple(result for result in self.details.results if result.outcome == "failed")

    def headline(self) -> str:
        """Return the summary line: the tool, and the number of cases that passed."""
        run = self.details
        skipped, tool = run.number("skipped"), run.tool or "hespas"
        count = f"{run.number('passed'):,} of {counted(len(run.results) - skipped, 'case')} passed"
        return f"{tool}: {count}" + (f", {skipped:,} skipped" if skipped else "")

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.conform/1``."""
        from hespas.validators.conformance import conformance_json

        return conformance_json(self.details, self.inputs)

    def table(self) -> Table:
        """Return the result as a table with one row per case."""
        from hespas.validators.conformance import results_table

        return results_table(self.details.results)

    def tables_by_name(self) -> Mapping[str, Table]:
        """Return the number of cases by kind and outcome, and all cases."""
        from hespas.validators.conformance import kinds_table

        return {"kinds": kinds_table(self.details), "cases": self.table()}


_Tool = Annotated[
    str,
    Option(
        "Run this command on the files of each case, instead of Hespas: {files}, {file}, {folder} and other "
        "placeholders are replaced.",
        metavar="CMD",
        is_text=True,
    ),
]
_Adapter = Annotated[
    Literal["exit-code", "counts", "chakra", "astra-sim"],
    Option("Read the result of `tool` in this way; chakra: `tool` is a Python that has Chakra installed."),
]
_Kit = Annotated[
    str | Path | None,
    Option("Read this archive of a kit (default: make the kit).", metavar="KIT.zip", label="a kit"),
]
_Cases = Annotated[
    str | Sequence[str],
    Option(
        "Run only the cases whose name matches this pattern, such as 'frames/*'; repeatable.",
        metavar="PATTERN",
    ),
]
_Timeout = Annotated[
    float, AtLeast(0.01), Option("Limit each run of `tool` in seconds.", flag="timeout", metavar="SECONDS")
]
_Memory = Annotated[PositiveInt, Option("Limit the memory of `tool` in bytes.", metavar="BYTES")]
_Out = Annotated[
    str | Path | None,
    Option("Write the kit as an archive.", metavar="KIT.zip", panel=OUTPUT, access="writes"),
]


@checked()
def conform(
    *,
    tool: _Tool = "",
    adapter: _Adapter = "exit-code",
    cases: _Cases = (),
    kit: _Kit = None,
    seed: Seed = 0,
    timeout_s: _Timeout = _TIMEOUT_S,
    memory_bytes: _Memory = _MEMORY_BYTES,
    out: _Out = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConformanceReport:
    """Run Hespas, or the command ``tool``, on 200 sets of execution traces with known results: valid ones,
    and ones that break one rule each, of all schema versions.

    ``adapter`` is the way to read the result of the tool: its exit code (0: it accepts the case), the counts
    that it prints for each file, the reader of Chakra's Python package, or the times that ASTRA-sim prints.
    ``out`` is written before the first case runs. Raises ``FormatError`` for a file that is not a kit, and
    ``UsageError`` for a tool that cannot be started or if no case matches.

    Examples:
        >>> hespas.conform(cases="schema/*")
        <ConformanceReport: hespas: 20 of 20 cases passed>
    """
    from hespas.validators.conformance import ForeignTool, kit_bytes, make_kit, read_kit, run_kit

    if adapter != "exit-code" and not tool:
        raise UsageError(f"`adapter={adapter}` requires `tool`", hint="name the program with `tool`")
    if kit is not None and seed:
        raise UsageError("`seed` cannot be combined with `kit`", hint="leave `seed` out: the kit has its own")
    loaded = make_kit(seed) if kit is None else read_kit(Path(kit))
    if out is not None:
        write_json(kit_bytes(loaded), Path(out), overwrite=overwrite)
    program = ForeignTool(tool, adapter, timeout_s, memory_bytes) if tool else None
    names = [cases] if isinstance(cases, str) else list(cases)
    inputs = () if kit is None else (str(kit),)
    return ConformanceReport(run_kit(loaded, program, names, progress), inputs)
