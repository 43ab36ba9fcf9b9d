"""Events of a trace as a :class:`Profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

from hespas.converters.perfetto.events import EventColumns, EventKind
from hespas.converters.perfetto.places import Descriptions, Place
from hespas.converters.perfetto.telling import MOVED_BY, SCHEMA_ID
from hespas.converters.perfetto.told import Told
from hespas.converters.tracks.measured import HOST_CATEGORY
from hespas.converters.tracks.pairs import enclosing, overlapping, pair
from hespas.graph import Diagnostics, HostOps, Profile
from hespas.graph.columns import BoolArray, IntArray, SmallIntArray
from hespas.graph.errors import FormatError

__all__ = ["TextColumns", "TraceFacts", "profile_of"]

_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What was read of a trace."""

    path: Path
    columns: EventColumns
    descriptions: Descriptions
    attributes: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class _Slices:
    """Slices as columns; ``event`` is the row of what began each."""

    event: IntArray
    track: IntArray
    start_ns: IntArray
    duration_ns: IntArray

    def only(self, chosen: BoolArray) -> _Slices:
        """Some of them."""
        return _Slices(
            self.event[chosen], self.track[chosen], self.start_ns[chosen], self.duration_ns[chosen]
        )

    def __len__(self) -> int:
        return len(self.event)


class TextColumns(TypedDict):
    """What texts tell of events."""

    op_row: SmallIntArray
    kernel_row: SmallIntArray
    module_row: SmallIntArray
    shapes_row: SmallIntArray
    dtype_row: SmallIntArray


def profile_of(facts: TraceFacts, diagnostics: Diagnostics) -> Profile:
    """Device slices as events, the others as host operations, joined by flows. Raises ``FormatError`` where
    there is no slice at all.
    """
    slices = _slices(facts.columns, diagnostics, str(facts.path))
    if not len(slices):
        raise FormatError(
            "the trace holds neither slices nor stages of a GPU", path=str(facts.path),
            position="all packets",
            hint="was a source of track events or of GPU render stages recorded?",
        )  # fmt: skip
    places = [facts.descriptions.place(key, number) for number, key in enumerate(facts.columns.tracks)]
    is_device = _device(facts, slices, places, diagnostics)
    device, host = slices.only(is_device), slices.only(~is_device)
    moments = _column(facts.columns.kind)[host.event] == EventKind.INSTANT
    diagnostics.info(
        "perfetto.host-moments", str(facts.path), "moments on the host took no time and are left out",
        count=int(moments.sum()),
    )  # fmt: skip
    return _profile(facts, device, host.only(~moments), places, diagnostics)


def _slices(columns: EventColumns, diagnostics: Diagnostics, path: str) -> _Slices:
    """Pairs of begin and end, complete events, and moments (0 ns)."""
    kind, track = _column(columns.kind), _column(columns.track)
    time_ns, duration_ns = _column(columns.time_ns), _column(columns.duration_ns)
    halves = np.flatnonzero((kind == EventKind.BEGIN) | (kind == EventKind.END))
    whole = np.flatnonzero((kind == EventKind.COMPLETE) | (kind == EventKind.INSTANT))
    pairs = pair(track[halves], time_ns[halves], kind[halves] == EventKind.BEGIN)
    begin, ended = halves[pairs.begin], pairs.end >= 0
    last_ns = int((time_ns + duration_ns).max()) if len(kind) else 0
    end = halves[np.where(ended, pairs.end, 0)] if len(begin) else begin
    end_ns = np.where(ended, time_ns[end], last_ns)
    diagnostics.warning(
        "perfetto.unfinished", path, "slices that do not end are counted to the end of the trace",
        count=int((~ended).sum()),
    )  # fmt: skip
    diagnostics.warning(
        "perfetto.end-without-begin", path, "slices end that did not begin, and are left out",
        count=pairs.orphans,
    )  # fmt: skip
    event = np.concatenate([begin, whole])
    return _Slices(
        event,
        track[event],
        time_ns[event],
        np.concatenate([end_ns - time_ns[begin], duration_ns[whole]]),
    )


def _column(values: object) -> IntArray:
    return np.array(values, np.int64)


def _device(facts: TraceFacts, slices: _Slices, places: list[Place], diagnostics: Diagnostics) -> BoolArray:
    strings, category = facts.columns.strings, _column(facts.columns.category_row)[slices.event]
    if facts.attributes.get("schema") == SCHEMA_ID:  # ours says what is of the host, also beside a CPU's work
        ours: BoolArray = category != strings.add(HOST_CATEGORY)
        return ours
    by_track = np.array([place.is_device for place in places], np.bool_)[slices.track]
    rows = [strings.add(name) for name in sorted(_DEVICE_CATEGORIES)]
    found = by_track | np.isin(category, rows)
    if found.any():
        return found
    other = ~np.array([place.is_host for place in places], np.bool_)[slices.track]
    taken = other if other.any() else np.ones(len(slices), np.bool_)
    diagnostics.warning(
        "perfetto.no-device-track", str(facts.path),
        "no track says it is a device, so all slices but those of a host are taken for device events",
        count=int(taken.sum()),
    )  # fmt: skip
    return taken


def _profile(
    facts: TraceFacts, device: _Slices, host: _Slices, places: list[Place], diagnostics: Diagnostics
) -> Profile:
    _report_overlaps(device, diagnostics, str(facts.path))
    columns, attributes = facts.columns, dict(facts.attributes)
    ours = attributes.pop("schema", "") == SCHEMA_ID
    base_ns = _first_ns(attributes, device, host, ours=ours)
    name = attributes.pop("name", "") if ours else ""
    told = Told.of(columns, device.event)
    devices, device_index = _devices(places, device)
    event_columns = _named(columns, told, device, ours=ours)
    host_ops = _host_ops(columns, host, places, base_ns)
    return Profile.of(
        name or facts.path.name.removesuffix(".gz").rsplit(".", 1)[0],
        devices,
        columns.strings.build(),
        start_ns=told.start_ns((device.start_ns - base_ns).astype(np.float64)),
        duration_ns=told.duration_ns(device.duration_ns.astype(np.float64)),
        category_row=_column(columns.category_row)[device.event].astype(np.int32),
        op_class=told.op_class(),
        device_index=device_index,
        rank=np.array([place.rank for place in places], np.int32)[device.track],
        stream=np.array([place.stream for place in places], np.int64)[device.track],
        run=told.run(),
        bytes_moved=told.exact("bytes", np.full(len(device), np.nan)),
        host_event=_causes(columns, device, host),
        host=host_ops,
        metadata=attributes if ours else {"format": "perfetto", "first_event_ns": str(base_ns)},
        **event_columns,
    )


def _report_overlaps(device: _Slices, diagnostics: Diagnostics, path: str) -> None:
    inside = overlapping(device.track, device.start_ns, device.duration_ns)
    twice_ns = int(np.maximum(device.duration_ns[inside], 0).sum())
    diagnostics.warning(
        "perfetto.nested", path,
        f"slices run inside or over others of their track: {twice_ns:,} ns are counted more than once",
        count=int(inside.sum()),
    )  # fmt: skip


def _first_ns(attributes: dict[str, str], device: _Slices, host: _Slices, *, ours: bool) -> int:
    """What to count times from: the first event, or what our writer moved them by."""
    if not ours:
        return int(np.concatenate([device.start_ns, host.start_ns]).min())
    moved = attributes.pop(MOVED_BY, "0")
    return int(moved) if moved.isascii() and moved.isdigit() and len(moved) <= 18 else 0


def _devices(places: list[Place], device: _Slices) -> tuple[tuple[str, ...], SmallIntArray]:
    """The names of the devices that have events, and which each event ran on."""
    names: dict[str, int] = {}
    index = np.zeros(len(places), np.int32)
    used: list[int] = np.unique(device.track).tolist()
    for track in used:
        index[track] = names.setdefault(places[track].device, len(names))
    return tuple(names), index[device.track]


def _named(columns: EventColumns, told: Told, device: _Slices, *, ours: bool) -> TextColumns:
    """Texts of the events. A slice of ours is named by its kernel, else by its operation; of a slice of
    others nothing tells whether its name is the one or the other, so it is both.
    """
    name = _column(columns.name_row)[device.event].astype(np.int32)
    op, kernel = told.text("op"), told.text("kernel")
    if ours:
        kernel = np.where(kernel > 0, kernel, np.where(op == name, 0, name)).astype(np.int32)
    else:
        op, kernel = np.where(op > 0, op, name), np.where(kernel > 0, kernel, name)
    return TextColumns(
        op_row=op,
        kernel_row=kernel,
        module_row=told.text("module"),
        shapes_row=told.text("shapes"),
        dtype_row=told.text("dtype"),
    )


def _host_ops(columns: EventColumns, host: _Slices, places: list[Place], base_ns: int) -> HostOps:
    told = Told.of(columns, host.event)
    labels = np.array([columns.strings.add(place.label) for place in places], np.int32)
    nothing = np.zeros(len(host), np.int32)
    return HostOps(
        name_row=_column(columns.name_row)[host.event].astype(np.int32),
        thread_row=labels[host.track] if len(host) else nothing,
        parent=enclosing(host.track, host.start_ns, host.duration_ns).astype(np.int32),
        start_ns=told.start_ns((host.start_ns - base_ns).astype(np.float64)),
        duration_ns=told.duration_ns(host.duration_ns.astype(np.float64)),
        sequence=np.full(len(host), -1, np.int64),
        shapes_row=told.text("shapes"),
        dtype_row=told.text("dtype"),
        strides_row=nothing,
        values_row=nothing,
    )


def _causes(columns: EventColumns, device: _Slices, host: _Slices) -> SmallIntArray:
    """The host operation that a flow joins to each device slice: the last to begin before it, -1 for none."""
    cause = np.full(len(device), -1, np.int32)
    if not len(columns.flow) or not len(host):
        return cause
    flow, event = np.array(columns.flow, np.uint64), _column(columns.flow_event)
    events = len(columns.kind)
    device_of, host_of = np.full(events, -1, np.int64), np.full(events, -1, np.int64)
    device_of[device.event], host_of[host.event] = np.arange(len(device)), np.arange(len(host))
    host_at, device_at = np.flatnonzero(host_of[event] >= 0), np.flatnonzero(device_of[event] >= 0)
    time_ns = _column(columns.time_ns)[event]
    _, number = np.unique(flow, return_inverse=True)
    _, moment = np.unique(time_ns, return_inverse=True)
    key = number.reshape(-1).astype(np.int64) * (len(event) + 1) + moment.reshape(-1)
    order = host_at[np.argsort(key[host_at], kind="stable")]
    if not len(order):
        return cause
    place = np.searchsorted(key[order], key[device_at], side="right") - 1
    source = order[np.maximum(place, 0)]
    joined = (place >= 0) & (number.reshape(-1)[source] == number.reshape(-1)[device_at])
    cause[device_of[event[device_at[joined]]]] = host_of[event[source[joined]]]
    return cause
