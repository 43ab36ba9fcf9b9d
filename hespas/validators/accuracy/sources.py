"""Sources of cases in a recording, and the device to which each part of a recording belongs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import nan

import msgspec
import numpy as np

from hespas.converters.measured_ops.build import costed_ops
from hespas.converters.measured_ops.steps import recorded_steps_of
from hespas.fitting.statistics import medians_of
from hespas.graph import Diagnostics, HostOps, OpClass, Profile, Workload
from hespas.graph.columns import StringTableBuilder
from hespas.graph.errors import UsageError, clipped
from hespas.graph.passes import with_durations, without_waits
from hespas.hardware import Device, canonical_name, load_device
from hespas.measurements import LeftOut, Measurements, joined
from hespas.operations import Labels, operations_of
from hespas.validators.accuracy.cases import LEAST_NS, CaseSource, cases_of, events_of
from hespas.validators.accuracy.programs import sources_of_attached, sources_of_program

__all__ = ["HOLDS_NO_PROGRAM", "by_device", "measurements_of", "sources_of"]

_ATTACHED = "hlo/"

HOLDS_NO_PROGRAM = (
    "give the .xplane.pb of the same recording, or the optimised HLO that ran as `workload`: this file "
    "contains no compiled program"
)
_ANY_CPU = "CPU"
"""Device name in recordings of a host; a CPU that a user describes has its own name."""


def sources_of(
    profile: Profile | Workload, workload: Workload | None, hardware: str, diagnostics: Diagnostics
) -> Iterator[CaseSource]:
    """Yield the cases of a profile, matched with ``workload`` or with the compiled programs in the profile.

    Without any program, the operations of the profile are compared one by one. Their costs are computed from
    the recorded shapes. If the input is a workload whose nodes have times, its nodes are the cases.

    Events that belong to no program are a source without cases. Raises ``UsageError`` for a profile without
    programs, costed operations and times, and for a workload with times if ``workload`` is given too.
    """
    if isinstance(profile, Workload):
        if workload is not None:
            raise UsageError(
                "this trace has both times and operations, so no other program can be matched with it",
                path=profile.name,
                hint="leave `workload` out",
            )
        yield from _sources_of_timed(profile, hardware, diagnostics)
        return
    if workload is not None:
        program = replace(workload, classes=tuple(map(without_waits, workload.classes)))
        yield from sources_of_program(profile, program, hardware, diagnostics)
        return
    if any(name.startswith(_ATTACHED) for name in profile.attachments):
        sources = sources_of_attached(profile, hardware, diagnostics)
        yield from sources
        if sources:
            return
    if not len(profile.host) and bool((profile.op_id > 0).any()) and bool((profile.shapes_id > 0).any()):
        profile = _with_own_shapes(profile)
    if not len(profile.host):
        raise UsageError(
            "the profile has no operations with shapes, and no program to match it with",
            path=profile.name,
            hint=HOLDS_NO_PROGRAM
            if bool((profile.module_id > 0).any())
            else "give the program with `workload`, or record shapes: profile(record_shapes=True)",
        )
    # One case per operation of the trace; equal shapes are repeats and are not averaged here.
    costed = costed_ops(profile, diagnostics)
    node = np.flatnonzero(costed.busy_ns >= LEAST_NS)
    times = np.ones(len(node))
    runs = len(np.unique(profile.run[profile.run >= 0]))
    yield CaseSource(
        profile=profile,
        graph=costed.graph,
        node=node,
        times=times,
        cases=replace(
            cases_of(costed.graph, node, times, (profile.name, profile.name, hardware)),
            steps=float(runs) if runs else nan,
        ),
        coverage=None,
        program=None,
    )


def _sources_of_timed(workload: Workload, hardware: str, diagnostics: Diagnostics) -> Iterator[CaseSource]:
    """Yield the nodes of a graph that have a time as cases, once per rank class.

    Nodes without work (calls that contain others, bookkeeping) are not cases; their time counts as outside of
    all cases. If the times of the recorded steps are known, the graph without its times and waits is used as
    the program that ran.
    """
    for measured in workload.classes:
        graph = without_waits(measured)
        timed = (graph.duration_ns >= LEAST_NS) & (graph.executions > 0)
        idle = timed & (graph.op_class == int(OpClass.FREE))
        node = np.flatnonzero(timed & ~idle)
        times = graph.executions[node]
        if not len(node):
            continue
        recorded = recorded_steps_of(graph.attachments, graph.name)
        if recorded is not None and not recorded.describes(measured):
            diagnostics.warning(
                "accuracy.times-changed",
                graph.name,
                "times differ from the recorded ones: this may compare one estimate with another; the "
                "steps of the recording are ignored",
            )
            recorded = None
        untimed = with_durations(graph, np.full(len(graph), np.nan))
        yield CaseSource(
            profile=None,
            graph=graph,
            node=node,
            times=times,
            cases=replace(
                cases_of(graph, node, times, (graph.name, workload.name, hardware)),
                outside_ns=float((graph.duration_ns * graph.executions)[idle].sum()),
                steps=nan if recorded is None else float(recorded.count),
            ),
            coverage=None,
            program=None if recorded is None else Workload.spmd(untimed, workload.num_ranks),
            num_ranks=workload.num_ranks,
            recorded=recorded,
        )


def _with_own_shapes(profile: Profile) -> Profile:
    """Return a table of operations with names and shapes as a profile that has one host operation per
    event.
    """
    zeros = np.zeros(len(profile), np.int32)
    # A table has one element type for all operands, but host operations have one per operand.
    strings = StringTableBuilder(profile.strings)
    pairs = profile.dtype_id.astype(np.int64) << 32 | profile.shapes_id
    distinct, index = np.unique(pairs, return_inverse=True)
    rows: list[int] = []
    for pair in distinct.tolist():
        row, shapes = pair >> 32, profile.strings[pair & 0xFFFFFFFF]
        dtype = profile.strings[row]
        if dtype and not dtype.startswith("["):
            try:
                operands = msgspec.json.decode(shapes, type=list[msgspec.Raw])
            except (msgspec.DecodeError, RecursionError):
                operands = []  # without a list of shapes, the cost is unknown anyway
            row = strings.add(msgspec.json.encode([dtype] * len(operands)).decode())
        rows.append(row)
    host = HostOps(
        name_id=profile.op_id,
        thread_id=zeros,
        parent=zeros - 1,
        start_ns=profile.start_ns,
        duration_ns=profile.duration_ns,
        sequence=np.full(len(profile), -1, np.int64),
        shapes_id=profile.shapes_id,
        dtype_id=np.array(rows, np.int32)[index],
        strides_id=zeros,
        values_id=zeros,
    )
    events = np.arange(len(profile), dtype=np.int32)
    return replace(profile, strings=strings.build(), host=host, host_event=events)


def by_device(
    profile: Profile | Workload, named: Mapping[str, Device], diagnostics: Diagnostics
) -> list[tuple[Profile | Workload, str]]:
    """Split a profile by device. Each part is returned with the name of its device as the user wrote it,
    which is a key of ``named``.

    A profile of a single device is compared with the only device in ``named``, with a warning if the profile
    has a different device name. In a profile of several devices, events of devices that are not in ``named``
    are skipped with a warning. Raises ``UsageError`` if no device of the profile is in ``named`` and
    ``named`` has several devices.
    """
    if isinstance(profile, Workload):
        recorded = profile.metadata.get("device", "")
        spelling = _spelling_of(recorded, named)
        return [(profile, spelling)] if spelling else [_with_only(profile, [recorded], named, diagnostics)]
    count = len(profile.devices)
    texts = (*profile.devices, "")
    device_of_event = profile.device_index.astype(np.int64)
    device_of_event[(device_of_event < 0) | (device_of_event >= count)] = count
    used: list[int] = np.unique(device_of_event).tolist() if len(profile) else list(range(count))
    fits = {index: spelling for index in used if (spelling := _spelling_of(texts[index], named))}
    if not fits:
        return [_with_only(profile, [texts[index] for index in used], named, diagnostics)]
    chosen = list(dict.fromkeys(fits.values()))
    if len(chosen) == 1:
        fits |= {index: chosen[0] for index in used if not texts[index]}
    missing = [index for index in used if index not in fits]
    diagnostics.warning(
        "accuracy.other-device",
        profile.name,
        f"events are of {', '.join(texts[index] or 'an unnamed device' for index in missing)}, which is not "
        "in `hardware`: they are skipped",
        count=int(np.isin(device_of_event, missing).sum()),
    )
    if len(chosen) == 1 and not missing:
        return [(profile, chosen[0])]
    parts: list[tuple[Profile | Workload, str]] = []
    for spelling in chosen:
        devices = [index for index in used if fits.get(index) == spelling]
        rows = np.flatnonzero(np.isin(device_of_event, devices))
        parts.append((events_of(profile, rows, f"{profile.name} on {named[spelling].name}"), spelling))
    return parts


def _spelling_of(text: str, named: Mapping[str, Device]) -> str:
    """Return the name that the user wrote for the device that a profile calls ``text``; empty if no device in
    ``named`` has that name.
    """
    shipped = canonical_name(text)
    for spelling, device in named.items():
        own = {name.casefold() for name in (device.name, *device.aliases)}
        if text and (text.casefold() in own or shipped.casefold() in own):
            return spelling
    return ""


def _with_only(
    profile: Profile | Workload,
    texts: Sequence[str],
    named: Mapping[str, Device],
    diagnostics: Diagnostics,
) -> tuple[Profile | Workload, str]:
    """Return a profile, assigned to the only device in ``named``, although its device name is not in
    ``named``.

    If the profile has another device name, it is added to the name of the profile in tables and documents.
    """
    name = profile.name
    shipped = {device for text in texts if (device := canonical_name(text))}
    if len(shipped) > 1 or len(named) > 1:
        listed = ", ".join(text for text in texts if text)
        raise UsageError(
            f"measured on {listed or 'an unnamed device'}: which `hardware` is that?",
            path=name,
            hint="give one `hardware` per device, or a hardware file that has this name among its aliases",
        )
    spelling = next(iter(named))
    device = named[spelling].name
    recorded = next((text for text in texts if text), "")
    message = ""
    if shipped:
        message = f"recorded on {shipped.pop()}, but compared with estimates for {device}"
    elif recorded and (recorded != _ANY_CPU or canonical_name(device)):
        message = f"recorded on {recorded}, but compared with estimates for {device}, which has no such alias"
    diagnostics.warning("accuracy.other-device", name, message, count=int(bool(message)))
    if not message:
        return profile, spelling
    suffix = f" (recorded on {clipped(recorded)})"
    if isinstance(profile, Profile):
        return replace(profile, name=profile.name + suffix), spelling
    graphs = tuple(replace(graph, name=graph.name + suffix) for graph in profile.classes)
    return replace(profile, name=profile.name + suffix, classes=graphs), spelling


_EXCLUDED_KINDS = ("other", "collective")
"""Kinds whose time depends on more than the operation: messages wait for other ranks."""


def measurements_of(
    profile: Profile | Workload,
    hardware: str | Device,
    *,
    workload: Workload | None = None,
    diagnostics: Diagnostics | None = None,
) -> Measurements:
    """Return each distinct operation of a recording once, with the median and spread of its times.

    The spread is the mean distance from the median. Operations are the operations of ``workload``, of the
    compiled programs in the profile, or the profile's own costed operations: see
    :func:`~hespas.validators.accuracy.sources.sources_of`. They have no variant: they represent a program on
    ``hardware``. Events of other devices are skipped if the profile has several, as
    :func:`~hespas.validators.accuracy.sources.by_device` does. Raises ``UsageError`` for a profile without
    operations of known cost and time.
    """
    diagnostics = diagnostics if diagnostics is not None else Diagnostics()
    device = load_device(hardware) if isinstance(hardware, str) else hardware
    [(part, _)] = by_device(profile, {device.name: device}, diagnostics)
    tables: list[Measurements] = []
    for source in sources_of(part, workload, device.name, diagnostics):
        ops = operations_of(source.graph).take(source.node)
        duration = source.cases.measured_ns / source.times
        is_usable = (duration > 0) & np.isfinite(ops.flops) & np.isfinite(ops.bytes_moved)
        is_usable[ops.kind.where(*_EXCLUDED_KINDS)] = False
        is_usable[ops.scheme.where("")] = False
        usable = np.flatnonzero(is_usable)
        distinct, index = ops.take(usable).distinct()
        median, spread = medians_of(duration[usable], index)
        count = len(distinct)
        tables.append(
            Measurements(
                name=source.cases.source,
                provenance=f"the recording {source.cases.source} of {source.cases.workload}",
                ops=distinct,
                duration_ns=median,
                spread_ns=spread,
                hardware=Labels.constant(device.name, count),
                split=Labels.constant("", count),
                left_out=(
                    LeftOut("no known cost, or a time that depends on others", int(len(ops) - len(usable))),
                ),
                recorded=True,
            )
        )
    if not any(len(table) for table in tables):
        unread = [event.message for event in diagnostics if event.code == "accuracy.unreadable-module"]
        reason = f": {unread[0]}" if unread else ""
        raise UsageError(
            f"no operation of {profile.name} has a known cost and a time{reason}",
            hint="give the program that ran with `workload`",
        )
    return joined(tables, profile.name)
