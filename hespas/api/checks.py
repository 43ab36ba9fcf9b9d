"""Checks of validity: structure and rank rules, round trips between formats, captured programs against
traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from hespas.api.arguments import checked
from hespas.api.documents import Result
from hespas.api.io import read
from hespas.converters import ReadOptions, Value
from hespas.converters.format import SourceFormat
from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.deprecation import RenamedAttribute
from hespas.graph.errors import FormatError, UnsupportedError, UsageError
from hespas.graph.hints import Option, OptionsOf, PositiveInt
from hespas.graph.progress import Progress
from hespas.report import Column, Table, table_from_records, table_from_rows
from hespas.report.texts import counted
from hespas.validators.checker import CheckOptions, check_workload
from hespas.validators.checker import Profile as Rules
from hespas.validators.checker import check as check_files

if TYPE_CHECKING:
    from hespas.validators.capture import CaptureCheck
    from hespas.validators.checker import CheckResult, Violation
    from hespas.validators.roundtrip import RoundTrips

__all__ = [
    "CaptureCheckReport",
    "CheckReport",
    "RoundTripReport",
    "check",
    "roundtrip",
    "validate_capture",
]

_Path = str | Path


@dataclass(frozen=True, slots=True, repr=False)
class CheckReport(Result):
    """Violations of rules. ``details`` is the validator's own result."""

    page_title: ClassVar[str] = "Check of workloads"

    details: CheckResult
    result = RenamedAttribute("details")

    @property
    def valid(self) -> bool:
        """Return True if every input was read and no violation is an error."""
        return self.details.valid

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Return the first violations of each code."""
        return self.details.violations

    @property
    def counts(self) -> Mapping[str, int]:
        """Return the exact number of violations by code."""
        return self.details.counts

    def headline(self) -> str:
        """Return the summary line: the inputs, the verdict and the number of violations."""
        paths = ", ".join(checked_input.path for checked_input in self.details.inputs)
        verdict = "valid" if self.valid else "not valid"
        return f"{paths or 'nothing read'}, {verdict}, {sum(self.counts.values()):,} violations"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.check/1``."""
        from hespas.validators.checker import check_json

        return check_json(self.details)

    def table(self) -> Table:
        """Return the result as a table with one row per violation."""
        return table_from_records(self.to_dict()["violations"])

    def tables_by_name(self) -> Mapping[str, Table]:
        """Return the violations, and their exact numbers by rule, and the inputs."""
        rules = table_from_rows((Column("code"), Column("count", kind="count")), self.counts.items())
        header = (
            Column("path", kind="code"),
            Column("format"),
            *(Column(name, kind="count") for name in ("ranks", "rank_classes", "nodes")),
        )
        rows = [
            (checked.path, checked.format, checked.num_ranks, checked.num_classes, checked.num_nodes)
            for checked in self.details.inputs
        ]
        return {"violations": self.table(), "rules": rules, "inputs": table_from_rows(header, rows)}


_Source = Annotated[
    _Path | Workload | Sequence[_Path],
    Option(
        "Files, or folders of NAME.{rank}.et files.", metavar="PATH...", is_argument=True, is_required=False
    ),
]
_Rules = Annotated[
    Rules | None, Option("Add the rules of Chakra traces, or of traces that ASTRA-sim can run.")
]
_CheckOptions = Annotated[CheckOptions | None, OptionsOf()]


@checked()
def check(
    source: _Source,
    *,
    profile: _Rules = None,
    options: _CheckOptions = None,
) -> CheckReport:
    """Check structure and rank rules of files, of folders of rank files, or of a workload.

    ``profile`` (``chakra``, ``astra-sim``) adds the rules of such traces. An input that cannot be read
    becomes a violation. Raises ``UsageError`` without a source and ``FormatError`` for a broken
    configuration file.

    Examples:
        >>> hespas.check("samples/pipeline_2x2", profile="chakra")
        <CheckReport: samples/pipeline_2x2, valid, 0 violations>
    """
    if isinstance(source, Workload):
        return CheckReport(check_workload(source, profile, options))
    paths = [source] if isinstance(source, str | Path) else source
    return CheckReport(check_files([Path(path) for path in paths], profile, options))


@dataclass(frozen=True, slots=True, repr=False)
class RoundTripReport(Result):
    """Preserved and lost information of each pair of formats. ``details`` is the validator's own result."""

    details: RoundTrips
    result = RenamedAttribute("details")

    @property
    def valid(self) -> bool:
        """Return True if all written files can be read back, and all losses were reported."""
        return self.details.valid

    def headline(self) -> str:
        """Return the summary line: the number of files and pairs, and the verdict."""
        verdict = "all losses are reported" if self.valid else "not valid"
        return f"{len(self.details.inputs):,} files, {len(self.details.cells):,} pairs of formats, {verdict}"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.roundtrip/1``."""
        from hespas.validators.roundtrip import roundtrip_json

        return roundtrip_json(self.details)

    def to_html(self) -> str:
        """Return the page of ``--html``."""
        from hespas.validators.roundtrip import roundtrip_html

        return roundtrip_html(self.details)

    def table(self) -> Table:
        """Return the result as a table with one row per pair of formats."""
        return table_from_records(self.to_dict()["cells"])


def _names_of(text: str) -> list[str]:
    """Parse a list of names: ``hlo,chakra``."""
    return [name.strip() for name in text.split(",") if name.strip()]


_Inputs = Annotated[
    _Path | Sequence[_Path],
    Option("Files, folders of rank files, or folders of many files.", metavar="PATH...", is_argument=True),
]
_Formats = Annotated[
    Sequence[str],
    Option("Try only these formats (see hespas-convert --list-formats).", metavar="A,B", parse=_names_of),
]
_Jobs = Annotated[PositiveInt, Option("Run N processes.", metavar="N")]
_Reading = Annotated[ReadOptions | None, OptionsOf(("comm_groups", "run_time_unit"))]


@checked()
def roundtrip(
    source: _Inputs,
    *,
    formats: _Formats = (),
    jobs: _Jobs = 2,
    options: _Reading = None,
    progress: Progress | None = None,
) -> RoundTripReport:
    """Convert files, which are read with ``options``, through every pair of ``formats`` (default: all) and
    back, in ``jobs`` processes. Raises ``FormatError`` for unreadable input, ``UsageError`` for unknown
    formats and if no pair can be tried.

    Examples:
        >>> hespas.roundtrip("samples/mlp.mlir", formats=("op-graph", "chakra"))
        <RoundTripReport: 1 files, 6 pairs of formats, all losses are reported>
    """
    from hespas.validators.roundtrip import roundtrip as run_roundtrip

    paths = [source] if isinstance(source, str | Path) else source
    return RoundTripReport(
        run_roundtrip([Path(path) for path in paths], formats, options=options, jobs=jobs, progress=progress)
    )


@dataclass(frozen=True, slots=True, repr=False)
class CaptureCheckReport(Result):
    """Comparison of a captured program with a trace of its run. ``details`` is the validator's own result."""

    details: CaptureCheck
    inputs: tuple[str, ...]
    diagnostics: Diagnostics
    result = RenamedAttribute("details")

    @property
    def equal(self) -> bool:
        """Return True if the captured program is the one that ran."""
        return self.details.equal

    @property
    def differences(self) -> int:
        """Return the number of differences between capture and trace."""
        return self.details.differences

    def headline(self) -> str:
        """Return the summary line: the verdict, and the numbers of ranks and runs."""
        verdict = "matches the trace"
        if not self.equal:
            verdict = f"does not match the trace: {self.differences:,} differences"
        ranks, runs = counted(len(self.details.ranks), "rank"), counted(self.details.runs, "run")
        return f"{self.details.program} {verdict} ({ranks}, {runs})"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.capture-check/1``."""
        from hespas.validators.capture import capture_check_json

        return capture_check_json(self.details, inputs=self.inputs, diagnostics=self.diagnostics)

    def table(self) -> Table:
        """Return the result as a table with one row per operation whose count differs, explained or not."""
        columns = ["rank", "operation", "captured", "measured", "explained"]
        return table_from_records(self.to_dict()["operations"], columns)


_Graph = Annotated[
    str | Path | Workload,
    Option("Captured program, in any readable format.", metavar="GRAPH", is_argument=True),
]
_Trace = Annotated[
    str | Path | Value,
    Option(
        "Recorded run of the program: profile, execution trace or Chakra trace.",
        metavar="TRACE",
        is_argument=True,
    ),
]
_ReadingGraph = Annotated[ReadOptions | None, OptionsOf(("num_devices",))]


@checked()
def validate_capture(
    graph: _Graph,
    trace: _Trace,
    *,
    format: SourceFormat = None,  # noqa: A002 # the word users know
    options: _ReadingGraph = None,
    diagnostics: Diagnostics | None = None,
) -> CaptureCheckReport:
    """Compare a captured program (any workload) with the trace of a run of the same program: a profile of
    XLA, a profile or execution trace of PyTorch, or a Chakra trace. It compares the numbers of operations,
    every dependency with the measured order, and the collectives of each rank (kind, group, bytes).

    ``format`` and ``options`` apply to ``graph``. Raises what ``read`` raises, and ``UsageError`` if
    ``graph`` is a profile or the trace has no rank of the program.

    Examples:
        >>> folder = "samples/rescale/gloo4"
        >>> hespas.validate_capture(f"{folder}/et.3.json.gz", f"{folder}/kineto.3.json.gz")
        <CaptureCheckReport: 3 matches the trace (1 rank, 1 run)>
    """
    from hespas.validators.capture import check_capture

    sink = diagnostics if diagnostics is not None else Diagnostics()
    program = (
        graph
        if isinstance(graph, Workload)
        else read(graph, format=format, options=options, diagnostics=sink)
    )
    if isinstance(program, Profile):
        raise UsageError(
            "expected a captured program, and this is a profile",
            path=str(graph),
            hint="name the captured program first, then the profile",
        )
    as_graph: Workload | None = None
    if isinstance(trace, Profile | Workload):
        measured: Value = trace
    else:
        measured = read(trace, diagnostics=sink)
        if isinstance(measured, Profile) and len(measured.host):
            # the graph of a profile with host operations has more details of its collectives
            with suppress(FormatError, UnsupportedError, UsageError):
                converted = read(trace, workload=True)
                as_graph = converted if isinstance(converted, Workload) else None
    return CaptureCheckReport(
        details=check_capture(program, measured, sink, ran=as_graph),
        inputs=tuple(
            source.name if isinstance(source, Profile | Workload) else str(source)
            for source in (graph, trace)
        ),
        diagnostics=sink,
    )
