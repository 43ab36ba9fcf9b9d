"""What of a recording is compared, with which device, and the cases that gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hespas.converters.measured_ops import RecordedSteps, costed_ops, recorded_steps_of
from hespas.graph import Diagnostics, EventColumns, HostOps, OpClass, OpGraph, Profile, Workload
from hespas.graph.columns import (
    FloatArray,
    IntArray,
    SmallIntArray,
    StringTable,
    StringTableBuilder,
)
from hespas.graph.errors import UsageError, clipped
from hespas.graph.passes import with_durations, without_waits
from hespas.hardware import Device, canonical
from hespas.validators.accuracy.cases import (
    LEAST_NS,
    Cases,
    case_dtypes,
    case_labels,
)

if TYPE_CHECKING:
    from hespas.validators.accuracy.coverage import Coverage, Join

__all__ = ["HOLDS_NO_PROGRAM", "Source", "by_device", "cases_of", "events_of", "sources_of"]

_ATTACHED = "hlo/"

HOLDS_NO_PROGRAM = (
    "this file holds no compiled program: give the .xplane.pb recorded beside it, or the optimised HLO that "
    "ran as `workload`"
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Source:
    """One program in one profile. ``graph`` has one node per group; ``node`` is the node of each case and
    ``times`` how often a step runs it. ``program`` is what runs end to end (None: a trace of operations, or a
    further class of ranks of a program already given); ``profile`` what was recorded of it, on all ranks
    (None: a graph that carries measured times itself, and ``recorded`` what its steps took, where that is
    known). ``joins`` say what each instruction carries out; ``num_ranks`` is the size of the job (-1:
    unknown).
    """

    profile: Profile | None
    graph: OpGraph
    node: IntArray
    times: FloatArray
    cases: Cases
    coverage: Coverage | None
    program: Workload | None
    joins: tuple[Join, ...] = ()
    num_ranks: int = -1
    recorded: RecordedSteps | None = None


def sources_of(
    profile: Profile | Workload, workload: Workload | None, hardware: str, diagnostics: Diagnostics
) -> Iterator[Source]:
    """The cases of a profile: against the work of ``workload``, else against the compiled programs it brings
    along, else operation by operation with the costs its recorded shapes give. Of a workload with times: its
    nodes.

    Events that belong to none of the programs are a source without cases: nobody matches them. Raises
    ``UsageError`` for a profile without anything of these.
    """
    if isinstance(profile, Workload):
        if workload is not None:
            raise UsageError(
                "a graph with times is its own program", path=profile.name, hint="leave `workload` out"
            )
        yield from _timed(profile, hardware, diagnostics)
        return
    if workload is not None:
        from hespas.validators.accuracy.programs import sources_of_program

        program = replace(workload, classes=tuple(map(without_waits, workload.classes)))
        yield from sources_of_program(profile, program, hardware, diagnostics)
        return
    if any(name.startswith(_ATTACHED) for name in profile.attachments):
        from hespas.validators.accuracy.programs import sources_of_attached

        sources = sources_of_attached(profile, hardware, diagnostics)
        yield from sources
        if sources:
            return
    if not len(profile.host) and bool((profile.op_row > 0).any()) and bool((profile.shapes_row > 0).any()):
        profile = _with_own_shapes(profile)
    if not len(profile.host):
        raise UsageError(
            "the profile names no operations with shapes, and there is no program to match it with",
            path=profile.name,
            hint=HOLDS_NO_PROGRAM
            if bool((profile.module_row > 0).any())
            else "give the program with `workload`, or record shapes: profile(record_shapes=True)",
        )
    yield _operations(profile, hardware, diagnostics)


_COLUMNS = tuple(EventColumns.__annotations__)


def events_of(profile: Profile, rows: IntArray, name: str) -> Profile:
    """A profile of some events only; what they communicate is left behind."""
    columns = {column: getattr(profile, column)[rows] for column in (*_COLUMNS, "start_ns", "duration_ns")}
    return replace(profile, name=name, comms=type(profile.comms).empty(), **columns)


def _timed(workload: Workload, hardware: str, diagnostics: Diagnostics) -> Iterator[Source]:
    """The nodes of a graph that carry a time, once per rank class. What does no work (calls around others,
    bookkeeping) is no case; its time is nobody's. Where it is known how long its steps took, the graph
    without its times and its waits is the program that ran.
    """
    for measured in workload.classes:
        graph = without_waits(measured)
        timed = (graph.duration_ns >= LEAST_NS) & (graph.multiplicity > 0)
        idle = timed & (graph.op_class == int(OpClass.FREE))
        node = np.flatnonzero(timed & ~idle)
        times = graph.multiplicity[node]
        if not len(node):
            continue
        recorded = recorded_steps_of(graph.attachments, graph.name)
        if recorded is not None and not recorded.describes(measured):
            diagnostics.warning(
                "accuracy.times-changed",
                graph.name,
                "its times are not those that were recorded: what is compared here may be one estimate with "
                "another; the steps of the recording are left out",
            )
            recorded = None
        untimed = with_durations(graph, np.full(len(graph), np.nan))
        yield Source(
            profile=None,
            graph=graph,
            node=node,
            times=times,
            cases=replace(
                cases_of(graph, node, times, (graph.name, workload.name, hardware)),
                outside_ns=float((graph.duration_ns * graph.multiplicity)[idle].sum()),
                steps=nan if recorded is None else float(recorded.count),
            ),
            coverage=None,
            program=None if recorded is None else Workload.spmd(untimed, workload.num_ranks),
            num_ranks=workload.num_ranks,
            recorded=recorded,
        )


def _operations(profile: Profile, hardware: str, diagnostics: Diagnostics) -> Source:
    """Each operation of a trace as one case; equal shapes are repeats of one another, never averaged here."""
    found = costed_ops(profile, diagnostics)
    graph = found.graph
    node = np.flatnonzero(found.busy_ns >= LEAST_NS)
    times = np.ones(len(node))
    runs = len(np.unique(profile.run[profile.run >= 0]))
    cases = replace(
        cases_of(graph, node, times, (profile.name, profile.name, hardware)),
        steps=float(runs) if runs else nan,
    )
    return Source(
        profile=profile,
        graph=graph,
        node=node,
        times=times,
        cases=cases,
        coverage=None,
        program=None,
    )


def cases_of(graph: OpGraph, node: IntArray, times: FloatArray, names: tuple[str, str, str]) -> Cases:
    """Nodes, which carry measured times, as one case each for all their ``times`` in a step; ``names`` are
    source, workload and hardware.
    """
    labels, shapes, shape = case_labels(graph, node, times)
    return Cases(
        source=names[0],
        workload=names[1],
        hardware=names[2],
        labels=labels,
        shapes=shapes,
        shape=shape,
        op_class=graph.op_class[node].astype(np.int8),
        measured_ns=graph.duration_ns[node] * times,
        spread_ns=np.full(len(node), np.nan),
        repeats=np.ones(len(node), np.int64),
        flops=graph.flops[node] * times,
        bytes_moved=graph.bytes_moved[node] * times,
        useful_flops=graph.useful_flops[node] * times,
        dtypes=case_dtypes(graph, node),
    )


# Tables of operations, which state the shapes of each: as traces of a host have them.


def _with_own_shapes(profile: Profile) -> Profile:
    """A table of operations, which states name and shapes of each: as many host operations, one for each."""
    nothing = np.zeros(len(profile), np.int32)
    strings, dtype_row = _listed_dtypes(profile)
    host = HostOps(
        name_row=profile.op_row,
        thread_row=nothing,
        parent=nothing - 1,
        start_ns=profile.start_ns,
        duration_ns=profile.duration_ns,
        sequence=np.full(len(profile), -1, np.int64),
        shapes_row=profile.shapes_row,
        dtype_row=dtype_row,
        strides_row=nothing,
        values_row=nothing,
    )
    events = np.arange(len(profile), dtype=np.int32)
    return replace(profile, strings=strings, host=host, host_event=events)


def _listed_dtypes(profile: Profile) -> tuple[StringTable, SmallIntArray]:
    """One element type per operand, as traces list them: tables state one for all."""
    strings = StringTableBuilder(profile.strings)
    pairs = profile.dtype_row.astype(np.int64) << 32 | profile.shapes_row
    distinct, place = np.unique(pairs, return_inverse=True)
    rows: list[int] = []
    for pair in distinct.tolist():
        row, shapes = pair >> 32, profile.strings[pair & 0xFFFFFFFF]
        dtype = profile.strings[row]
        if dtype and not dtype.startswith("["):
            try:
                operands = msgspec.json.decode(shapes, type=list[msgspec.Raw])
            except (msgspec.DecodeError, RecursionError):
                operands = []  # no list of shapes: no cost either
            row = strings.add(msgspec.json.encode([dtype] * len(operands)).decode())
        rows.append(row)
    return strings.build(), np.array(rows, np.int32)[place]


# Which of the devices a user names a recording was made on: each event is compared with its own device.

_ANY_CPU = "CPU"
"""What recordings of a host call their device; a CPU that a user describes has a name of its own."""


def by_device(
    profile: Profile | Workload, named: Mapping[str, Device], diagnostics: Diagnostics
) -> list[tuple[Profile | Workload, str]]:
    """The parts of a profile, each with the spelling of its device; ``named`` is by the user's spellings.

    A profile of a single device is taken for the only one named, with a warning where it states a name that
    this one does not have; of several devices, events of those that are not named are left out with a
    warning. Raises ``UsageError`` where none fits and there is a choice.
    """
    if isinstance(profile, Workload):
        stated = profile.metadata.get("device", "")
        fitting = _fitting(stated, named)
        return [(profile, fitting)] if fitting else [_taken_for(profile, [stated], named, diagnostics)]
    texts = (*profile.devices, "")
    place = _places(profile)
    used: list[int] = np.unique(place).tolist() if len(place) else list(range(len(profile.devices)))
    fits = {each: spelling for each in used if (spelling := _fitting(texts[each], named))}
    if not fits:
        return [_taken_for(profile, [texts[each] for each in used], named, diagnostics)]
    chosen = list(dict.fromkeys(fits.values()))
    if len(chosen) == 1:
        fits |= {each: chosen[0] for each in used if not texts[each]}
    missing = [each for each in used if each not in fits]
    diagnostics.warning(
        "accuracy.other-device",
        profile.name,
        f"events are of {', '.join(texts[each] or 'an unnamed device' for each in missing)}, which no "
        "`hardware` names: they are left out",
        count=int(np.isin(place, missing).sum()),
    )
    if len(chosen) == 1 and not missing:
        return [(profile, chosen[0])]
    parts: list[tuple[Profile | Workload, str]] = []
    for spelling in chosen:
        rows = np.flatnonzero(np.isin(place, [each for each in used if fits.get(each) == spelling]))
        parts.append((events_of(profile, rows, f"{profile.name} on {named[spelling].name}"), spelling))
    return parts


def _places(profile: Profile) -> IntArray:
    """The device of each event; the number of devices for those without."""
    count = len(profile.devices)
    stated = profile.device_index.astype(np.int64)
    return np.where((stated >= 0) & (stated < count), stated, count)


def _fitting(text: str, named: Mapping[str, Device]) -> str:
    """The spelling of the device that a profile calls ``text``; empty where it is none of them."""
    shipped = canonical(text)
    for spelling, device in named.items():
        own = {name.casefold() for name in (device.name, *device.aliases)}
        if text and (text.casefold() in own or shipped.casefold() in own):
            return spelling
    return ""


def _taken_for(
    profile: Profile | Workload,
    texts: Sequence[str],
    named: Mapping[str, Device],
    diagnostics: Diagnostics,
) -> tuple[Profile | Workload, str]:
    """A profile whose own names fit none, with the device it is compared with. Where it states another one,
    its name says so in all tables and documents.
    """
    name = profile.name
    known = {shipped for text in texts if (shipped := canonical(text))}
    if len(known) > 1 or len(named) > 1:
        listed = ", ".join(text for text in texts if text)
        raise UsageError(
            f"measured on {listed or 'an unnamed device'}: which `hardware` is that?",
            path=name,
            hint="give one `hardware` per device, or a hardware file that has this name among its aliases",
        )
    spelling = next(iter(named))
    device = named[spelling].name
    stated = next((text for text in texts if text), "")
    told = ""
    if known:
        told = f"recorded on {known.pop()}, and compared with estimates for {device}"
    elif stated and (stated != _ANY_CPU or canonical(device)):
        told = f"recorded on {stated}, and compared with estimates for {device}, which has no such name"
    diagnostics.warning("accuracy.other-device", name, told, count=int(bool(told)))
    return (_recorded_on(profile, stated) if told else profile), spelling


def _recorded_on(profile: Profile | Workload, device: str) -> Profile | Workload:
    """The same under a name that says where it was recorded."""
    told = f" (recorded on {clipped(device)})"
    if isinstance(profile, Profile):
        return replace(profile, name=profile.name + told)
    graphs = tuple(replace(graph, name=graph.name + told) for graph in profile.classes)
    return replace(profile, name=profile.name + told, classes=graphs)
