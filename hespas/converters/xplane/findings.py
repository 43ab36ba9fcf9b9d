"""What reading a trace has to tell: what time went where, and what was left out or repaired."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hespas.converters.xplane.collect import Collected
from hespas.converters.xplane.cores import Ranked
from hespas.converters.xplane.labels import Labels
from hespas.converters.xplane.lines import LineKind, has_devices
from hespas.converters.xplane.space import SpaceFacts
from hespas.converters.xplane.texts import Texts
from hespas.graph import Diagnostics
from hespas.graph.columns import BoolArray, IntArray

__all__ = ["Found", "report"]


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """All that is reported on; columns are of the device events that are left in ``on``."""

    collected: Collected
    on: Ranked
    labels: Labels
    label_row: IntArray
    host_event: IntArray
    facts: SpaceFacts
    programs: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class _Sink:
    """Where findings go; their codes begin with ``prefix``."""

    diagnostics: Diagnostics
    path: str
    prefix: str

    def info(self, code: str, message: str, count: int) -> None:
        self.diagnostics.info(f"{self.prefix}.{code}", self.path, message, count=count)

    def warning(self, code: str, message: str, count: int) -> None:
        self.diagnostics.warning(f"{self.prefix}.{code}", self.path, message, count=count)


def report(found: Found, strings: Texts, diagnostics: Diagnostics, path: str, prefix: str) -> None:
    """Add all findings, their codes beginning with ``prefix``."""
    sink = _Sink(diagnostics, path, prefix)
    _report_work(found, sink)
    _report_cores(found, sink)
    _report_programs(found, strings, sink)
    _report_times(found, strings, sink)
    _report_file(found.facts, sink)


def _report_work(found: Found, sink: _Sink) -> None:
    device = found.on.device
    taken, total_ps = device.exclusive_ps, int(device.exclusive_ps.sum())

    def share(rows: BoolArray) -> str:
        return f"{int(taken[rows].sum()) / total_ps if total_ps else 0.0:.1%} of the device time"

    spans_ps = int(found.collected.device.duration_ps.sum())
    counted = f"{_ns(total_ps)} of device time counted; the events span {_ns(spans_ps)}"
    sink.info("device-time", counted, len(device))
    wrapping = f"operations enclose others and keep what is left: {share(device.is_wrapper)}"
    sink.info("wrapper", wrapping, int(device.is_wrapper.sum()))
    unnamed = (found.labels.op_row == 0) | (found.label_row == 0)
    no_op = f"device events name no operation or program: {share(unnamed)}, kept by kernel and stream"
    sink.warning("no-op", no_op, int(unnamed.sum()))
    kinds = np.array([line.kind for line in found.collected.lines], np.int64)[device.line]
    unlaunched = (kinds == LineKind.STREAM) & (found.host_event < 0)
    no_launch = f"device events have no launch record: {share(unlaunched)}"
    sink.warning("no-launch", no_launch, int(unlaunched.sum()))
    overlap = "operations reach beyond the end of one that they begin in; both count in full"
    sink.warning("overlapping", overlap, found.collected.overlapping)


def _ns(picoseconds: int) -> str:
    return f"{picoseconds // 1000:,}.{picoseconds % 1000:03d} ns"


def _report_cores(found: Found, sink: _Sink) -> None:
    on = found.on
    merged = f"events of second cores were merged into those of first ones: {_ns(on.merged_ps)} of core time"
    sink.info("merged-cores", merged, on.merged)
    alone = "events of one core of a megacore have none on the other, and count in full"
    sink.warning("lone-core", alone, on.alone)
    undecided = (
        "pairs of cores ran the same programs, and the file does not say whether each pair is one device (a "
        "megacore): they count as two devices, each with its own half of every operation; the .xplane.pb "
        "recorded beside it says which, or --num-devices with half as many devices as there are cores"
    )
    sink.warning("megacore-not-stated", undecided, on.undecided)


def _report_programs(found: Found, strings: Texts, sink: _Sink) -> None:
    """Programs that ran and whose HLO is not in the file; one that has no HLO at all is not reproached."""
    if not found.programs:
        return
    ran = [strings[row] for row in np.unique(found.label_row).tolist() if row]
    missing = [name for name in ran if f"hlo/{name}" not in found.programs]
    listed = ", ".join(name[:60] for name in missing[:5])
    sink.warning("no-hlo", f"the HLO of programs is not in the file: {listed}", len(missing))


def _report_times(found: Found, strings: Texts, sink: _Sink) -> None:
    negative = np.flatnonzero(found.on.device.duration_ps < 0)
    if len(negative):
        name = strings[int(found.labels.kernel_row[negative[0]])]
        message = f"device events end before they start, the first is {name[:80]!r}"
        sink.warning("negative-duration", message, len(negative))
    silent = [plane for plane in found.facts.planes if has_devices([plane])]
    listed = ", ".join(plane[:60] for plane in silent[:4])
    nothing = f"nothing was recorded on devices: {listed}; what the host names of them are launches"
    sink.warning("no-device-events", nothing, 0 if len(found.on.device) else len(silent))
    zero = int((found.on.device.duration_ps == 0).sum())
    sink.warning("zero-duration", "device events of 0 ps", zero)


def _report_file(facts: SpaceFacts, sink: _Sink) -> None:
    listed = ", ".join(f"{name[:60]} {count:,}" for name, count in sorted(facts.left_out.items())[:12])
    left_out = f"events of lines that say the same again or run beside the operations are left out: {listed}"
    sink.info("other-lines", left_out, sum(facts.left_out.values()))
    sink.warning("unknown-kind", "events are of a kind that the file does not describe", facts.unnamed)
    sink.warning("aggregated", "events stand for many; each keeps the time of all", facts.aggregated)
    sink.warning("profiler-message", "errors and warnings of the profiler are in the file", facts.errors)
    sink.warning("cut", "the file ends inside a plane, which is left out", facts.cut_planes)
