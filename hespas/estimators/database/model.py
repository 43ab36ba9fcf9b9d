"""The database: what was measured is looked up, what lies between is interpolated, nothing else is said.

Between two measurements that differ in one size the logarithm of the time over that of its work is linear;
where no such pair is near, a plane goes through the nearest measurements around. A query beyond the measured
sizes, or more than a step of their grid away, has no time and a reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, cast

import numpy as np

from hespas.estimators.database.library import Library, installed_library, library_of_file, visible
from hespas.estimators.database.shelf import BETWEEN, EXACT, NEARBY
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
"""Stands for the tables of an installed aiconfigurator in place of a path."""

_BYTES_ALONE = frozenset({"collective"})
"""Kinds whose time hangs on their bytes, whatever these hold."""
_FRAMEWORKS_OWN = "custom_"
_SOURCES = {EXACT: "measured", BETWEEN: "between two measurements", NEARBY: "from the measurements around"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """The estimator. ``path`` is a table, or ``aiconfigurator`` for an installed one (of which ``framework``
    names a part). ``split`` is the part of a table that may be seen (empty: all but what a table with splits
    keeps for testing; ``all``: everything). ``measurements`` stands in for a table where Python has one.
    ``num_ranks``: size of collectives over all ranks where the graph does not say (-1: unknown).
    """

    path: str = ""
    split: str = ""
    framework: str = ""
    num_ranks: int = -1
    measurements: Measurements | None = None

    inert_options: ClassVar[frozenset[str]] = frozenset({"framework", "split"})
    _library: Library | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the options. Raises ``UsageError``."""
        given = cast("object", self.measurements)
        if given is not None and not isinstance(given, Measurements):
            raise UsageError("measurements are given in Python", hint="on a command line write path=FILE")
        if (given is None) == (not self.path):
            raise UsageError(
                "the database needs a table", hint=f"database:path=FILE, or database:path={INSTALLED}"
            )
        if isinstance(given, Measurements):
            object.__setattr__(self, "_library", Library.of([visible(given, self.split)]))

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        return "database"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each node on ``device``; see :class:`Estimator`."""
        return estimate_by_operation(self, graph, device, diagnostics, num_ranks=self.num_ranks)

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """The time of one execution of each operation; NaN where nothing near was measured.

        Raises ``FormatError`` for a table that is none, ``MissingExtraError`` where aiconfigurator is not
        installed.
        """
        found = Diagnostics() if diagnostics is None else diagnostics
        library = self._opened(device, frozenset(ops.kind.used()))
        if device.name not in library.devices():
            listed = ", ".join(library.devices()) or "nothing of these kinds"
            text = f"{self.path or 'the table'}: no measurement is of {device.name}; it has {listed}"
            found.warning("database.other-device", device.name, text, count=len(ops))
            return Prediction.of(self.name, np.full(len(ops), np.nan))
        said = np.full((3, len(ops)), np.nan)
        for labels, rows in ops.classes():
            said[:, rows] = _of_class(library, device, labels, ops.take(rows), found)
        return Prediction.of(self.name, *said)

    def _opened(self, device: Device, kinds: frozenset[str]) -> Library:
        if self._library is not None:
            return self._library
        if self.path == INSTALLED:
            return installed_library(device.name, self.framework, kinds)
        return library_of_file(self.path, self.split)


def _candidates(library: Library, device: str, labels: tuple[str, str, str, str]) -> list[tuple[str, str]]:
    """Number formats and variants that may cover a class, in order. A program names no variant: then the
    one with the most rows does, for collectives one of a general library before a framework's own.
    """
    kind, op, scheme, variant = labels
    schemes = [scheme]
    if kind in _BYTES_ALONE:
        schemes += [each for each in library.schemes(device, kind, op) if each != scheme]
    pairs = [(each, name) for each in schemes for name in library.variants(device, kind, op, each)]
    if variant:
        return [(each, name) for each, name in pairs if name == variant]
    return sorted(pairs, key=lambda pair: pair[1].startswith(_FRAMEWORKS_OWN))


def _of_class(
    library: Library,
    device: Device,
    labels: tuple[str, str, str, str],
    ops: Operations,
    found: Diagnostics,
) -> FloatArray:
    """Time and interval of the operations of one class, shape (3, ops). Variants and number formats that may
    stand in are asked in turn for what those before do not cover. What was measured stays as it was; what is
    interpolated is never below the device's roof.
    """
    kind, op, scheme, _ = labels
    where = " ".join(label for label in (device.name, *labels) if label)
    said = np.full((3, len(ops)), np.nan)
    asked = list(_candidates(library, device.name, labels))
    for place, (other, name) in enumerate(asked):
        missing = np.flatnonzero(np.isnan(said[0]))
        if not len(missing):
            break
        part, shelf = ops.take(missing), (device.name, kind, op, other, name)
        answer = library.shelf(shelf).look_up(part)
        times = np.stack((answer.duration_ns, answer.low_ns, answer.high_ns))
        said[:, missing] = np.where(answer.source == EXACT, times, within_roof(times, part, device))
        table = library.volumes[shelf].table
        for source, how in _SOURCES.items():
            text = f"{how} in {table.name} ({table.provenance}), {name or 'no variant named'}"
            stands_in = f", of {other}" if other != scheme else ""
            also = ", where the others say nothing" if place else ""
            found.info(
                "database.said", where, text + stands_in + also, count=int((answer.source == source).sum())
            )
    count = int(np.isnan(said[0]).sum())
    if not asked:
        found.warning("database.not-measured", where, "was not measured", count=count)
    else:
        text = "beyond the measured sizes or further than a step from them"
        found.warning("database.not-near", where, text, count=count)
    return said
