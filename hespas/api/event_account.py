"""The account of a profile that was converted: what of its events is in the file that was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from hespas.api.io import read
from hespas.api.preparation import Dropped
from hespas.converters import Format, ReadOptions, Value
from hespas.files.documents import Count, Figure
from hespas.graph import Diagnostics, Profile

__all__ = ["EventConservation", "event_account"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _EventTotals:
    """Counts of events that state something, and sums over all that state it; operations of the host,
    communications and attached documents.
    """

    events: Count
    device_time_ns: Figure
    bytes_moved: Figure
    operations: Count
    modules: int
    kernels: int
    categories: int
    shapes: int
    runs: int
    bytes_stated: int
    host_links: int
    host_operations: int
    communications: int
    attachments: int


_NAMES: Mapping[str, str] = {
    "operations": "events that name an operation",
    "modules": "events that name a program",
    "kernels": "events that name a kernel",
    "categories": "events with a category",
    "shapes": "events with shapes",
    "runs": "events that belong to a run",
    "bytes_stated": "events that state their bytes",
    "host_links": "events linked to the host",
    "host_operations": "operations of the host",
    "communications": "communications with sizes and groups",
    "attachments": "attached documents",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EventConservation:
    """A profile before and after, and what accounts for the difference."""

    before: _EventTotals
    after: _EventTotals
    dropped: tuple[Dropped, ...]

    def rows(self) -> tuple[tuple[str, int, int], ...]:
        """What is counted, before and after; nothing of what neither has."""
        before, after = asdict(self.before), asdict(self.after)
        told = ((text, int(before[name]), int(after[name])) for name, text in _NAMES.items())
        return tuple(row for row in told if row[1] or row[2])


def _event_totals(profile: Profile) -> _EventTotals:
    """The sums of a profile. O(events)."""
    return _EventTotals(
        events=len(profile),
        device_time_ns=float(np.nansum(profile.duration_ns)),
        bytes_moved=float(np.nansum(profile.bytes_moved)),
        operations=int((profile.op_row > 0).sum()),
        modules=int((profile.module_row > 0).sum()),
        kernels=int((profile.kernel_row > 0).sum()),
        categories=int((profile.category_row > 0).sum()),
        shapes=int((profile.shapes_row > 0).sum()),
        runs=int((profile.run >= 0).sum()),
        bytes_stated=int((~np.isnan(profile.bytes_moved)).sum()),
        host_links=int((profile.host_event >= 0).sum()),
        host_operations=len(profile.host),
        communications=len(profile.comms),
        attachments=len(profile.attachments),
    )


def event_account(
    profile: Value, written: Path, target: Format, told: Mapping[str, int], found: Diagnostics
) -> EventConservation | None:
    """The account of ``profile`` against the file that was written, read again; None for a workload, and
    where that format cannot be read. ``told`` counts what the writer reported, by code.
    """
    if target.read is None or not isinstance(profile, Profile):
        return None
    again = read(written, format=target.name, options=ReadOptions(locations=False, comm_groups=None))
    if not isinstance(again, Profile):
        return None
    before, after = _event_totals(profile), _event_totals(again)
    examples = {diagnostic.code: diagnostic.message for diagnostic in found}
    dropped = [Dropped(code, examples.get(code, ""), count) for code, count in told.items()]
    for column in fields(_EventTotals):
        less = getattr(before, column.name) - getattr(after, column.name)
        if less > 0 and column.name in _NAMES:
            dropped.append(
                Dropped(f"profile.{column.name}", f"{_NAMES[column.name]} are not kept", int(less))
            )
    return EventConservation(before=before, after=after, dropped=tuple(dropped))
