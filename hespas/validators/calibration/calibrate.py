"""A device's file from what was measured on it: the function behind ``hespas-validate calibrate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime

import numpy as np

from hespas.estimators.measurements import Measurements
from hespas.estimators.operations import Labels
from hespas.graph import Diagnostics
from hespas.graph.errors import UsageError
from hespas.hardware import Device, Fit, load_device
from hespas.validators.accuracy.tables import rows_on
from hespas.validators.calibration.classes import FITTED_SPLITS, may_be_fitted
from hespas.validators.calibration.collectives import fit_collectives
from hespas.validators.calibration.fit import fit_device
from hespas.validators.calibration.held_out import (
    TESTS,
    HeldOut,
    Tested,
    compared,
    device_left_out,
    has_sizes_to_leave_out,
    merged,
    operations_left_out,
    recordings_left_out,
    sizes_left_out,
)
from hespas.validators.calibration.memory import FitMemory, content_key
from hespas.validators.calibration.recordings import fit_recordings

__all__ = ["KEPT_SPLIT", "Calibration", "Progress", "TableUse", "calibrate"]

KEPT_SPLIT = "devval"
"""The split that is never fitted on."""

Progress = Callable[[int, int, str], None]
"""Told how many steps are done, of how many, and what is next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableUse:
    """How many of the rows of a table on the device were fitted on."""

    name: str
    provenance: str
    rows: int
    fitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """``device`` holds the new ``fits``, and those it had of other classes."""

    device: Device
    fits: tuple[Fit, ...]
    held_out: tuple[HeldOut, ...]
    tables: tuple[TableUse, ...]
    seed: int
    fitted: str
    diagnostics: Diagnostics


def calibrate(
    tables: Sequence[Measurements],
    device: Device,
    *,
    split: str = "",
    tests: Sequence[str] | None = None,
    seed: int = 0,
    fitted: str = "",
    inputs: Sequence[str] = (),
    memory: FitMemory | None = None,
    progress: Progress | None = None,
    diagnostics: Diagnostics | None = None,
) -> Calibration:
    """Fit every class of operations that was measured on ``device``, and test the fits on what they have not
    seen (``tests``: names of :data:`TESTS`; None: by shape, where there are sizes enough).

    Only rows of ``split`` are fitted on (empty: all but those kept for testing). ``fitted`` is the date
    written into the file (ISO; empty: today); all else depends on rows, device and ``seed`` alone. ``memory``
    keeps what is done, so that an interrupted run goes on. Raises ``UsageError`` where nothing can be fitted
    or a test has nothing to leave out.
    """
    found = diagnostics if diagnostics is not None else Diagnostics()
    run = _Run(seed, _date(fitted), memory, progress)
    usable = [_usable(table, split) for table in tables]
    mine = [table.take(rows_on(table, device)) for table in usable]
    mine = [_named(table, device) for table in mine if len(table)]
    if not mine:
        raise _nothing(tables, usable, device, split)
    testing = _Tests(mine, usable, device, run)
    chosen = testing.chosen(tests, found)
    fits = run.fit(mine, device, "fits")
    if not fits:
        if memory:  # nothing in it is worth going on from
            memory.forget()
        raise UsageError(
            f"no class of operations on {device.name} has rows enough to fit",
            hint="12 of one kind, number format and variant at least, with known sizes and a published peak",
        )
    return Calibration(
        device=replace(device, own_fits=merged(fits, device.fits), fits_of=""),
        fits=fits,
        held_out=tuple(compared(by, testing.tested(by), device, inputs) for by in chosen),
        tables=tuple(_uses(tables, usable, device, found)),
        seed=seed,
        fitted=run.date,
        diagnostics=found,
    )


@dataclass(slots=True)
class _Run:
    """What all fits of a run share."""

    seed: int
    date: str
    memory: FitMemory | None
    progress: Progress | None

    def fit(self, tables: Sequence[Measurements], device: Device, purpose: str) -> tuple[Fit, ...]:
        """The fits of some rows: from memory where an interrupted run has made them."""
        bare = replace(device, own_fits=(), fits_of="", efficiencies=())
        recordings = [table for table in tables if table.recorded]
        sweeps = [table for table in tables if not table.recorded]
        key = content_key(tables, device if recordings else bare, self.seed)
        kept = self.memory.recall(key, self.date) if self.memory else None
        if kept is not None:
            return kept

        def told(done: int, total: int, name: str) -> None:
            if self.progress:
                self.progress(done, total, f"{purpose}: {name}")

        fits = fit_device(sweeps, device, seed=self.seed, fitted=self.date, progress=told) if sweeps else ()
        if recordings:
            known = replace(device, own_fits=merged(fits, device.fits), fits_of="")
            recorded = fit_recordings(recordings, known, seed=self.seed, fitted=self.date)
            fits = (*recorded, *(fit for fit in fits if fit.key not in {each.key for each in recorded}))
        collectives = [table.take(table.ops.kind.where("collective")) for table in sweeps]
        collectives = [table for table in collectives if len(table)]
        if collectives:
            fits += tuple(
                fit_collectives(collectives, device, seed=self.seed, fitted=self.date, progress=told)
            )
        if self.memory:
            self.memory.keep(key, device.name, fits)
        return fits


def _date(text: str) -> str:
    if not text:
        return datetime.now(UTC).date().isoformat()
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise UsageError(f"{text!r} is no date", hint="write 2026-01-31") from error


def _usable(table: Measurements, split: str) -> Measurements:
    """The rows that may be fitted on. Those of a split the user names are as good as rows without any."""
    if not split:
        return may_be_fitted(table)
    if split == KEPT_SPLIT:
        raise UsageError(
            f"rows of split {KEPT_SPLIT!r} are kept for testing, never fitted on",
            hint=f"--split {FITTED_SPLITS[0]}, then hespas-validate accuracy --split {KEPT_SPLIT}",
        )
    part = table.part(split)
    if not len(part):
        listed = ", ".join(sorted(name for name in table.split.used() if name)) or "no splits"
        raise UsageError(f"no row of {table.name} has split {split!r}", hint=f"it has {listed}")
    return replace(part, split=Labels.constant("", len(part)))


def _named(table: Measurements, device: Device) -> Measurements:
    """The rows of a device under the name its file has."""
    return replace(table, hardware=Labels.constant(device.name, len(table)))


def _nothing(
    tables: Sequence[Measurements], usable: Sequence[Measurements], device: Device, split: str
) -> UsageError:
    """Why no row is left."""
    names = ", ".join(table.name for table in tables)
    if any(len(rows_on(table, device)) for table in tables) and not split:
        splits = sorted({name for table in tables for name in table.split.used() if name})
        return UsageError(
            f"{names} has no row of {device.name} that may be fitted on",
            hint=f"name the split to fit on: {', '.join(splits) or 'none'}",
        )
    listed = sorted({name for table in usable for name in table.hardware.used() if name})
    return UsageError(
        f"no row of {names} is of {device.name}", hint=f"devices there: {', '.join(listed) or 'none'}"
    )


def _uses(
    tables: Sequence[Measurements], usable: Sequence[Measurements], device: Device, found: Diagnostics
) -> list[TableUse]:
    uses: list[TableUse] = []
    for table, part in zip(tables, usable, strict=True):
        for reason, count in table.left_out:
            found.info("calibrate.left-out-rows", table.name, f"rows left out: {reason}", count=count)
        rows = len(rows_on(table, device))
        entered = len(rows_on(part, device))
        found.info(
            "calibrate.kept-rows", table.name, "rows kept for testing, never fitted on", count=rows - entered
        )
        uses.append(TableUse(name=table.name, provenance=table.provenance, rows=rows, fitted=entered))
    return uses


@dataclass(frozen=True, slots=True, eq=False)
class _Tests:
    """What the tests need: rows on the device, rows on all devices, and how fits are made."""

    mine: Sequence[Measurements]
    usable: Sequence[Measurements]
    device: Device
    run: _Run

    def tested(self, by: str) -> tuple[list[Tested], int]:
        """Rows with what fits that have not seen them say, and how many rows those saw."""
        if by == "shape":
            return sizes_left_out(self.mine, self.device, self.run.seed, self.run.fit)
        if by == "op":
            return operations_left_out(self.mine, self.device, self.run.fit)
        if by == "recording":
            return recordings_left_out(self.mine, self.device, self.run.fit)
        others = _other_devices(self.usable, self.device)
        return device_left_out(self.mine, others, self.device, self.run.fit)

    def chosen(self, tests: Sequence[str] | None, found: Diagnostics) -> list[str]:
        """The tests asked for; None: by shape, where there are sizes enough. Raises ``UsageError`` for one
        that has nothing to leave out, before anything is fitted.
        """
        possible = {
            "shape": has_sizes_to_leave_out(self.mine),
            "op": any(_has_several(table) for table in self.mine),
            "recording": sum(table.recorded for table in self.mine) > 1,
            "hardware": bool(_other_devices(self.usable, self.device)[0]),
        }
        if tests is None and not possible["shape"]:
            found.warning("calibrate.untested", self.device.name, f"the fits are untested: {_WHY['shape']}")
            return []
        chosen = list(dict.fromkeys(("shape",) if tests is None else tests))
        for by in chosen:
            if by not in TESTS:
                raise UsageError(f"no test {by!r}", hint=f"one of {', '.join(TESTS)}")
            if not possible[by]:
                raise UsageError(f"--test-by {by}: {_WHY[by]}", hint="leave it out, or give more tables")
        return chosen


def _has_several(table: Measurements) -> bool:
    """Whether a kind has several operations."""
    kinds = table.ops.kind.used()
    return any(len(table.ops.op.take(table.ops.kind.where(kind)).used()) > 1 for kind in kinds)


_WHY: Mapping[str, str] = {
    "shape": "too few sizes to leave some out",
    "op": "no kind of operation has several",
    "recording": "there is one recording at most",
    "hardware": "no other device with a hardware file in the tables",
}


def _other_devices(
    tables: Sequence[Measurements], device: Device
) -> tuple[dict[str, list[Measurements]], dict[str, Device]]:
    """Rows and files of the devices beside ``device``; those without a file are left out."""
    rows: dict[str, list[Measurements]] = {}
    devices: dict[str, Device] = {}
    for table in tables:
        mine = set(np.unique(table.hardware.row[rows_on(table, device)]).tolist())
        for number, name in enumerate(table.hardware.names):
            part = table.on(name) if number not in mine and name else None
            if part is None or not len(part):
                continue
            try:
                devices.setdefault(name, load_device(name))
            except UsageError:
                continue
            rows.setdefault(name, []).append(part)
    return rows, devices
