"""Accounts of conversions: totals before and after, read back from the written files, and reasons for
losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np

from hespas.api.documents import STANDARD_STREAM, spooled_output
from hespas.api.io import read, write
from hespas.api.lowering import ConversionAccount, MergedOps, rank_totals
from hespas.converters import Format, ReadOptions, Value, WriteOptions
from hespas.files.documents import Count, Figure
from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = ["AccountedWrite", "EventAccount", "event_account"]

_COLUMNS_WITHOUT_TOTALS = frozenset(
    {"metadata", "attachments", "extra", "name_id", "source_id", "framework_id"}
)
"""Columns that no total includes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EventTotals:
    """Totals of a profile: sums over the events that state a figure, the numbers of events that have a
    property, and the numbers of host operations, communications and attached documents.
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

    @classmethod
    def of(cls, profile: Profile) -> _EventTotals:
        """Return the totals (events, time, bytes) of a profile. O(events)."""
        return cls(
            events=len(profile),
            device_time_ns=float(np.nansum(profile.duration_ns)),
            bytes_moved=float(np.nansum(profile.bytes_moved)),
            operations=int((profile.op_id > 0).sum()),
            modules=int((profile.module_id > 0).sum()),
            kernels=int((profile.kernel_id > 0).sum()),
            categories=int((profile.category_id > 0).sum()),
            shapes=int((profile.shapes_id > 0).sum()),
            runs=int((profile.run >= 0).sum()),
            bytes_stated=int((~np.isnan(profile.bytes_moved)).sum()),
            host_links=int((profile.host_event >= 0).sum()),
            host_operations=len(profile.host),
            communications=len(profile.comms),
            attachments=len(profile.attachments),
        )


_LABELS: Mapping[str, str] = {
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
"""Counts of :class:`_EventTotals` that reports show -> their labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventAccount:
    """Totals of a profile before and after a conversion, and the reasons for the difference."""

    before: _EventTotals
    after: _EventTotals
    dropped: tuple[MergedOps, ...]

    def rows(self) -> tuple[tuple[str, int, int], ...]:
        """Return rows of label, count before and count after the conversion. Rows that are 0 in both are left
        out.
        """
        before, after = asdict(self.before), asdict(self.after)
        rows = ((label, int(before[name]), int(after[name])) for name, label in _LABELS.items())
        return tuple(row for row in rows if row[1] or row[2])


def event_account(
    profile: Value, written: Path, target: Format, reported: Mapping[str, int], diagnostics: Diagnostics
) -> EventAccount | None:
    """Return the account of ``profile`` against the written file, which is read back. None for a workload,
    and for a format that Hespas cannot read. ``reported`` counts the diagnostics of the writer by code.
    """
    if target.read is None or not isinstance(profile, Profile):
        return None
    read_back = read(written, format=target.name, options=ReadOptions(locations=False))
    if not isinstance(read_back, Profile):
        return None
    before, after = _EventTotals.of(profile), _EventTotals.of(read_back)
    dropped = list(_reported_losses(reported, diagnostics))
    for column in fields(_EventTotals):
        lost = getattr(before, column.name) - getattr(after, column.name)
        if lost > 0 and column.name in _LABELS:
            message = f"{_LABELS[column.name]} are not kept"
            dropped.append(MergedOps(f"profile.{column.name}", message, int(lost)))
    return EventAccount(before=before, after=after, dropped=tuple(dropped))


def _reported_losses(reported: Mapping[str, int], diagnostics: Diagnostics) -> tuple[MergedOps, ...]:
    """Return the losses that the writer reported: a row per diagnostic code, with its first message."""
    messages = {diagnostic.code: diagnostic.message for diagnostic in diagnostics}
    return tuple(MergedOps(code, messages.get(code, ""), count) for code, count in reported.items())


class AccountedWrite:
    """Writer of a value that computes the account from the new files before they replace existing files.

    ``account`` is the account of a workload, ``events`` the account of a profile. Both are complete after
    :meth:`put`.
    """

    def __init__(
        self,
        value: Value,
        account: ConversionAccount | None,
        target: Format,
        options: WriteOptions,
        diagnostics: Diagnostics,
    ) -> None:
        """Prepare to write ``value`` in the ``target`` format. ``account`` has the totals before the
        write.
        """
        self.account = account
        self.events: EventAccount | None = None
        self.value, self.target, self.diagnostics = value, target, diagnostics
        self._options = options
        self._counts_before = diagnostics.counts()

    def put(self, destination: str | Path, stack: ExitStack, *, overwrite: bool) -> int:
        """Write to a path, or through a temporary file to standard output; return the number of bytes. Raises
        what :func:`hespas.api.write` raises.
        """
        write_to = partial(
            write,
            self.value,
            format=self.target.name,
            overwrite=overwrite,
            options=self._options,
            diagnostics=self.diagnostics,
            check=self.verify,
        )
        if str(destination) != STANDARD_STREAM:
            return write_to(str(destination))
        with spooled_output(stack) as spool:
            return write_to(str(spool))

    def verify(self, written: Path) -> None:
        """Read the written files back and add their totals to the account. Raises ``UnsupportedError`` if
        they cannot be read.
        """
        increases = (
            (code, count - self._counts_before.get(code, 0))
            for code, count in self.diagnostics.counts().items()
        )
        reported = {code: count for code, count in increases if count > 0}
        try:
            self.events = event_account(self.value, written, self.target, reported, self.diagnostics)
            account = self._with_written_totals(written, reported)
        except (FormatError, UnsupportedError) as error:
            raise UnsupportedError(
                f"format {self.target.name!r} cannot store the workload, because the written file could "
                f"not be read again: {error.message}",
                hint="choose another format: see hespas-convert --list-formats",
            ) from error
        if account is not None:  # the writer reports after the totals were taken
            losses = _reported_losses(reported, self.diagnostics)
            account = replace(account, dropped=(*account.dropped, *losses))
        self.account = account

    def _with_written_totals(self, written: Path, reported: Mapping[str, int]) -> ConversionAccount | None:
        """Return the account with the totals of the written file, if the writer reported that they differ."""
        account, target = self.account, self.target
        differs = any(
            code in reported and not set(columns) <= _COLUMNS_WITHOUT_TOTALS
            for code, columns in target.losses.items()
        )
        if account is None or target.flat or target.read is None or not differs:
            return account
        options = ReadOptions(locations=False)
        read_back = read(written, format=target.name, options=options)
        if not isinstance(read_back, Workload):  # profiles have no such totals
            return account
        if len(read_back.classes) == 1:  # a program of all ranks does not always state their number
            return replace(account, after=rank_totals(read_back.classes, [account.num_ranks]))
        sizes = read_back.sizes_within(self._options.ranks or range(read_back.num_ranks))
        return replace(account, after=rank_totals(read_back.classes, sizes))
