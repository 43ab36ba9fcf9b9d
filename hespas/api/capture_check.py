"""Whether a captured program is what ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hespas.api.arguments import checked
from hespas.api.io import Result, read
from hespas.converters import ReadOptions, Value
from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.errors import FormatError, UnsupportedError, UsageError

if TYPE_CHECKING:
    import pandas

    from hespas.validators.capture import CaptureCheck

__all__ = ["CaptureCheckReport", "validate_capture"]


@dataclass(frozen=True, slots=True, repr=False)
class CaptureCheckReport(Result):
    """What a captured program and a trace of its run have in common, and what not."""

    result: CaptureCheck
    inputs: tuple[str, ...]
    diagnostics: Diagnostics

    @property
    def equal(self) -> bool:
        """Whether the capture is what ran."""
        return self.result.equal

    def headline(self) -> str:
        """The verdict, and over how many ranks."""
        done = self.result
        verdict = "what ran" if done.equal else f"not what ran: {done.differences:,} differences"
        return f"{done.program} is {verdict} ({len(done.ranks):,} ranks, {done.runs:,} runs)"

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.capture-check/1``."""
        from hespas.validators.capture import capture_check_json

        return capture_check_json(self.result, inputs=self.inputs, diagnostics=self.diagnostics)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per operation of which another number ran, explained or not."""
        import pandas as pd

        columns = ["rank", "operation", "captured", "measured", "explained"]
        return pd.DataFrame(self.to_dict()["operations"], columns=columns)


@checked()
def validate_capture(
    graph: str | Path | Workload,
    trace: str | Path | Value,
    *,
    format: str | None = None,  # noqa: A002 # the word users know
    options: ReadOptions | None = None,
    diagnostics: Diagnostics | None = None,
) -> CaptureCheckReport:
    """Hold a captured program (any workload) against the trace of a run of the same program: a profile of
    XLA, a profile or execution trace of PyTorch, a Chakra trace. Compared are the numbers of operations,
    every dependency with the order that was measured, and the collectives of each rank: kind, group, bytes.

    ``format`` and ``options`` say how ``graph`` is read. Raises what ``read`` does, and ``UsageError`` where
    ``graph`` is a profile or the trace has no rank of the program.
    """
    from hespas.validators.capture import check_capture

    found = diagnostics if diagnostics is not None else Diagnostics()
    captured = graph if isinstance(graph, Workload) else _program(graph, format, options, found)
    measured = trace if isinstance(trace, Profile | Workload) else read(trace, diagnostics=found)
    ran = None if isinstance(trace, Profile | Workload) else _as_graph(trace, measured)
    return CaptureCheckReport(
        result=check_capture(captured, measured, found, ran=ran),
        inputs=_names((graph, trace)),
        diagnostics=found,
    )


def _names(given: Sequence[str | Path | Value]) -> tuple[str, ...]:
    return tuple(each.name if isinstance(each, Profile | Workload) else str(each) for each in given)


def _program(
    path: str | Path, form: str | None, options: ReadOptions | None, diagnostics: Diagnostics
) -> Workload:
    value = read(path, format=form, options=options, diagnostics=diagnostics)
    if isinstance(value, Profile):
        raise UsageError("a profile is no captured program", path=str(path), hint="name the program first")
    return value


def _as_graph(trace: str | Path, measured: Value) -> Workload | None:
    """A profile of operations read as the graph that ran: it says more of its collectives. None where no
    graph can be made of it.
    """
    if isinstance(measured, Workload) or not len(measured.host):
        return None
    try:
        value = read(trace, workload=True)
    except (FormatError, UnsupportedError, UsageError):
        return None
    return value if isinstance(value, Workload) else None
