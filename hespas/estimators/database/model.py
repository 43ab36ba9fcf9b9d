"""Database estimator: measured times are looked up and interpolated, all other operations have no time.

Between two measurements that differ in one size, the logarithm of the time over the time of its work is
linear; without such a pair, a plane through the nearest measurements is used. A query beyond the measured
sizes, or more than a step of their grid away, has no time and a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, cast

import numpy as np

from hespas.estimators.database.library import MeasurementLibrary, installed_library, library_of_file, visible
from hespas.estimators.database.lookup import BETWEEN, EXACT, NEARBY
from hespas.estimators.interface import Prediction, estimate_by_operation
from hespas.estimators.rates import within_roof
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device
from hespas.measurements import Measurements
from hespas.operations import Operations

__all__ = ["INSTALLED", "Database"]

INSTALLED = "aiconfigurator"
"""Path that selects the tables of an installed aiconfigurator."""

_BYTES_ALONE = frozenset({"collective"})
"""Kinds whose time depends on their bytes only, in any number format."""
_FRAMEWORKS_OWN = "custom_"
_SOURCES = {EXACT: "measured", BETWEEN: "between two measurements", NEARBY: "from the measurements around"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """Estimator by measured tables. ``path``: a table, or ``aiconfigurator`` for the installed one
    (``framework``: a part of it). ``split``: the part of a table that is used (empty: all rows that are not
    held out for testing; ``all``: all rows). ``measurements``: a table in memory, in place of ``path``.
    ``num_ranks``: size of collectives over all ranks where the graph states none (-1: unknown).
    """

    path: str = ""
    split: str = ""
    framework: str = ""
    num_ranks: int = -1
    measurements: Measurements | None = None

    inert_options: ClassVar[frozenset[str]] = frozenset({"framework", "split"})
    _library: MeasurementLibrary | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the options. Raises ``UsageError``."""
        given = cast("object", self.measurements)
        if given is not None and not isinstance(given, Measurements):
            raise UsageError(
                "measurements can only be given in Python", hint="on a command line write path=FILE"
            )
        if (given is None) == (not self.path):
            raise UsageError(
                "the database needs a table", hint=f"database:path=FILE, or database:path={INSTALLED}"
            )
        if isinstance(given, Measurements):
            object.__setattr__(self, "_library", MeasurementLibrary.of([visible(given, self.split)]))

    @property
    def name(self) -> str:
        """Name of the model in the registry and in reports."""
        return "database"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Return the time of one execution of each node on ``device``; see :class:`Estimator`."""
        return estimate_by_operation(self, graph, device, diagnostics, num_ranks=self.num_ranks)

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Return the time of one execution of each operation; NaN without a measurement near it.

        Raises ``FormatError`` for an invalid table, ``MissingExtraError`` if aiconfigurator is not installed.
        """
        findings = Diagnostics() if diagnostics is None else diagnostics
        library = self._library
        if library is None and self.path == INSTALLED:
            library = installed_library(device.name, self.framework, frozenset(ops.kind.used()))
        elif library is None:
            library = library_of_file(self.path, self.split)
        if device.name not in library.devices():
            listed = ", ".join(library.devices()) or "nothing of these kinds"
            text = f"{self.path or 'the table'}: no measurements of {device.name}; it has {listed}"
            findings.warning("database.other-device", device.name, text, count=len(ops))
            return Prediction.of(self.name, np.full(len(ops), np.nan))
        times = np.full((3, len(ops)), np.nan)
        for labels, rows in ops.classes():
            times[:, rows] = _times_of_class(library, device, labels, ops.take(rows), findings)
        return Prediction.of(self.name, *times)


def _candidates(
    library: MeasurementLibrary, device: str, labels: tuple[str, str, str, str]
) -> list[tuple[str, str]]:
    """Return the number formats and variants that may cover a class, in order. Without a variant the one with
    most rows comes first, for collectives one of a general library before a framework's own.
    """
    kind, op, scheme, variant = labels
    schemes = [scheme]
    if kind in _BYTES_ALONE:
        schemes += [other for other in library.schemes(device, kind, op) if other != scheme]
    pairs = [(other, name) for other in schemes for name in library.variants(device, kind, op, other)]
    if variant:
        return [pair for pair in pairs if pair[1] == variant]
    return sorted(pairs, key=lambda pair: pair[1].startswith(_FRAMEWORKS_OWN))


def _times_of_class(
    library: MeasurementLibrary,
    device: Device,
    labels: tuple[str, str, str, str],
    ops: Operations,
    findings: Diagnostics,
) -> FloatArray:
    """Return the time and interval of the operations of one class, shape (3, ops). Other variants and number
    formats are used in turn for gaps. Measured times are not changed; interpolated times are not below the
    device's roof.
    """
    kind, op, scheme, _ = labels
    location = " ".join(label for label in (device.name, *labels) if label)
    times = np.full((3, len(ops)), np.nan)
    candidates = _candidates(library, device.name, labels)
    for position, (other, variant) in enumerate(candidates):
        missing = np.flatnonzero(np.isnan(times[0]))
        if not len(missing):
            break
        part, name = ops.take(missing), (device.name, kind, op, other, variant)
        result = library.lookup_table(name).look_up(part)
        found_ns = np.stack((result.duration_ns, result.low_ns, result.high_ns))
        times[:, missing] = np.where(result.source == EXACT, found_ns, within_roof(found_ns, part, device))
        table = library.volumes[name].table
        for source, description in _SOURCES.items():
            text = f"{description} in {table.name} ({table.provenance}), {variant or 'no variant named'}"
            text += f", of {other}" if other != scheme else ""
            text += ", for gaps of the others" if position else ""
            findings.info("database.said", location, text, count=int((result.source == source).sum()))
    count = int(np.isnan(times[0]).sum())
    if not candidates:
        findings.warning("database.not-measured", location, "was not measured", count=count)
    else:
        text = "beyond the measured sizes or further than a step from them"
        findings.warning("database.not-near", location, text, count=count)
    return times
