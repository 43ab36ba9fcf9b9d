"""Estimator by a database of measured times, which are looked up or interpolated.

Other operations get no time. The measured time is divided by a reference time of its FLOPs and bytes. Between
two measurements that differ in one size, the logarithm of this ratio is interpolated linearly. Without such a
pair, a plane through the nearest measurements is used. A query beyond the measured sizes, or more than a step
of their grid away, has no time and a reason.

Tables are files of measurements, or the tables of an installed ``aiconfigurator-core`` (NVIDIA, Apache-2.0),
read in place: ``systems/data/SYSTEM/TOPIC/FRAMEWORK/VERSION/NAME_perf.parquet``, times in ms, sizes of
messages in elements. Nothing of the package is run, and nothing is copied out of it. Lookup tables are built
when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from hespas.estimators.database.lookup import BETWEEN, EXACT, NEARBY, SPACES, LookupTable
from hespas.estimators.interface import Prediction, estimate_by_operation
from hespas.estimators.rates import within_roof
from hespas.graph import MEASURED_BASIS, Diagnostics, Estimate, OpGraph
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import FormatError, MissingExtraError, UsageError
from hespas.hardware import Device, canonical_name
from hespas.measurements import Columns, Measurements, columns_measured, read_measurements
from hespas.operations import Operations, find_scheme, rows_by_label

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "EVERYTHING",
    "EXTRA",
    "INSTALLED",
    "Database",
    "MeasurementLibrary",
    "Volume",
    "installed_library",
    "installed_version",
    "library_of_file",
    "visible",
]

EVERYTHING = "all"
"""Name of all splits together."""
_MADE_TO_FIT = "calib"
_Class = tuple[str, str, str, str, str]
"""Device, kind, operation, scheme, variant."""


@dataclass(frozen=True, slots=True, eq=False)
class Volume:
    """Rows of one measurement table for one device and one combination of operation labels."""

    table: Measurements
    rows: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class MeasurementLibrary:
    """Measurement tables, indexed by device and class (the labels of an operation). If several tables have
    the same class, the table with most rows is used.
    """

    tables: tuple[Measurements, ...]
    volumes: dict[_Class, Volume] = field(default_factory=dict[_Class, Volume])
    _tables: dict[_Class, LookupTable] = field(default_factory=dict[_Class, LookupTable])

    @classmethod
    def of(cls, tables: Iterable[Measurements]) -> MeasurementLibrary:
        """Index the rows of all tables by class. O(rows log rows)."""
        library = cls(tuple(tables))
        for table in library.tables:
            ops = table.ops
            columns = (table.hardware, ops.kind, ops.op, ops.scheme, ops.variant)
            for labels, rows in rows_by_label(*columns):
                device, kind, op, scheme, variant = labels
                name = (device, kind, op, scheme, variant)
                other = library.volumes.get(name)
                if kind in SPACES and (other is None or len(other.rows) < len(rows)):
                    library.volumes[name] = Volume(table, rows)
        return library

    def devices(self) -> tuple[str, ...]:
        """Return the devices with measurements."""
        return tuple(sorted({name[0] for name in self.volumes}))

    def variants(self, device: str, kind: str, op: str, scheme: str) -> tuple[str, ...]:
        """Return the measured variants (libraries or kernels) of a class, the one with most rows first."""
        labels = (device, kind, op, scheme)
        variants = [
            (-len(volume.rows), name[4]) for name, volume in self.volumes.items() if name[:4] == labels
        ]
        return tuple(variant for _, variant in sorted(variants))

    def schemes(self, device: str, kind: str, op: str) -> tuple[str, ...]:
        """Return the measured number formats of an operation, the one with most rows first."""
        count: dict[str, int] = {}
        for name, volume in self.volumes.items():
            if name[:3] == (device, kind, op):
                count[name[3]] = count.get(name[3], 0) + len(volume.rows)
        return tuple(sorted(count, key=lambda scheme: (-count[scheme], scheme)))

    def lookup_table(self, name: _Class) -> LookupTable:
        """Return the lookup table of one class; it is built on first use."""
        if name not in self._tables:
            volume = self.volumes[name]
            ops, times = volume.table.ops.take(volume.rows), volume.table.duration_ns[volume.rows]
            self._tables[name] = LookupTable.of(SPACES[name[1]], ops, times)
        return self._tables[name]


def library_of_file(path: str, split: str) -> MeasurementLibrary:
    """Return the library of the measurement table at ``path``, cached until the file changes. Raises
    ``FormatError``.
    """
    try:
        changed = Path(path).stat().st_mtime_ns
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", path=path, hint="check the path") from error
    return _cached_library(path, split, changed)


@lru_cache(maxsize=4)
def _cached_library(path: str, split: str, changed: int) -> MeasurementLibrary:
    del changed  # part of the key: another time of change is another table
    if split and split != EVERYTHING:
        return MeasurementLibrary.of([read_measurements(path, split=split)])
    return MeasurementLibrary.of([visible(read_measurements(path), split)])


def visible(table: Measurements, split: str) -> Measurements:
    """Return the rows of a table that estimates may use: the rows of ``split`` or, without a split, those
    that are not held out for testing.
    """
    if split == EVERYTHING:
        return table
    if split:
        return table.part(split)
    return table.part(_MADE_TO_FIT) if _MADE_TO_FIT in table.split.used() else table


EXTRA = "aiconfigurator"
_PACKAGE = "aiconfigurator_core"
_DISTRIBUTION = "aiconfigurator-core"

_TABLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "gemm": ("matmul", "gemm_dtype"),
        "context_attention": ("attention.context", "attn_dtype"),
        "generation_attention": ("attention.generation", "attn_dtype"),
        "encoder_attention": ("attention.encoder", "attn_dtype"),
        "moe": ("moe", "moe_dtype"),
        "mla_bmm": ("matmul", "bmm_dtype"),
        "computescale": ("quantize", "quant_dtype"),
        "scale_matrix": ("quantize", "quant_dtype"),
        "nccl": ("collective", "nccl_dtype"),
        "oneccl": ("collective", "nccl_dtype"),
        "custom_allreduce": ("collective", "allreduce_dtype"),
    }
)
"""Tables of single kernels, their kind and the column of their number format; other tables have
whole layers.
"""

_WITHOUT_OP = frozenset({"matmul", "moe", "attention.context", "attention.generation", "attention.encoder"})
_SAME_NAME: Mapping[str, str] = MappingProxyType(
    {"version": "framework_version", "op_name": "op", "num_gpus": "num_ranks"}
)
_ELEMENT_BYTES: Mapping[str, float] = MappingProxyType({"half": 2.0, "bfloat16": 2.0, "int8": 1.0})
_CACHED = 4


def installed_version() -> str:
    """Return the version of ``aiconfigurator-core``. Raises ``MissingExtraError`` if it is not installed."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError as error:
        raise MissingExtraError("the database of aiconfigurator", EXTRA) from error


def installed_library(device: str, framework: str, kinds: frozenset[str]) -> MeasurementLibrary:
    """Return the tables of the installed aiconfigurator for one device (by its name there) and some kinds of
    operations.

    ``framework`` limits them to one framework (``trtllm``; empty: all). The most recent results are cached.
    Raises ``MissingExtraError`` if the package is not installed, ``UsageError`` for a framework that it does
    not have.
    """
    package = find_spec(_PACKAGE)
    folders = None if package is None else package.submodule_search_locations
    if not folders:
        raise MissingExtraError("the database of aiconfigurator", EXTRA)
    request = (framework.lower(), kinds & {kind for kind, _ in _TABLES.values()})
    return _installed_tables(Path(next(iter(folders))), installed_version(), device, request)


@lru_cache(maxsize=_CACHED)
def _installed_tables(
    package: Path, release: str, device: str, request: tuple[str, frozenset[str]]
) -> MeasurementLibrary:
    folder = package / "systems" / "data"
    systems = [path for path in sorted(folder.glob("*")) if canonical_name(path.name) == device]
    frameworks = sorted({path.parent.parent.name for path in folder.rglob("*_perf.parquet")})
    if request[0] and request[0] not in frameworks:
        raise UsageError(
            f"{_DISTRIBUTION} {release} has no measurements with {request[0]!r}",
            hint=f"use one of {', '.join(frameworks)}",
        )
    return MeasurementLibrary.of(
        table for system in systems for table in _tables(system, device, release, request)
    )


def _tables(
    system: Path, device: str, release: str, request: tuple[str, frozenset[str]]
) -> Iterator[Measurements]:
    import pandas as pd

    framework, kinds = request
    for path in sorted(system.rglob("*_perf.parquet")):
        name = path.name.removesuffix("_perf.parquet")
        library = path.parent.parent.name
        if name not in _TABLES or _TABLES[name][0] not in kinds:
            continue
        # Collectives of a vendor's library are used with every framework.
        if framework and library.lower() not in (framework, "nccl", "oneccl"):
            continue
        frame = _known_columns(pd.read_parquet(path), name, path)
        frame["hardware"] = device
        provenance = f"{_DISTRIBUTION} {release}, {library} {path.parent.name}"
        yield columns_measured(Columns(path, frame), name=path.name, provenance=provenance)


def _known_columns(frame: pd.DataFrame, name: str, path: Path) -> pd.DataFrame:
    """Return a table of aiconfigurator with the column names and units of this package's measurement
    tables.
    """
    kind, dtype = _TABLES[name]
    frame = frame.rename(columns={**_SAME_NAME, dtype: "dtype"})
    if kind in _WITHOUT_OP and name != "mla_bmm":
        frame = frame.drop(columns="op")
    frame["latency_us"] = frame["latency"].astype("float64") * 1e3
    if "framework_version" not in frame:
        frame["framework_version"] = path.parent.name
    if kind in ("attention.context", "attention.generation") and "window_size" not in frame:
        frame["window_size"] = 0
    if kind == "collective":
        sizes = frame["dtype"].map(_element_bytes).astype("float64")
        frame["message_bytes"] = frame["message_size"].astype("float64") * sizes
        source = frame["kernel_source"].astype(str)
        for column in ("backend", "implementation"):
            if column in frame:
                source = source + ":" + frame[column].astype(str)
        frame["library"] = (
            name if name != "custom_allreduce" else f"{name}-{path.parent.parent.name}:" + source
        )
        frame["library_version"] = frame["framework_version"]
        frame = frame.drop(columns=["framework", "framework_version"], errors="ignore")
    return frame


def _element_bytes(dtype: object) -> float:
    name = str(dtype)
    scheme = find_scheme(name)
    return _ELEMENT_BYTES.get(name, np.nan if scheme is None else scheme.output_bits / 8)


INSTALLED = "aiconfigurator"
"""Path that selects the tables of an installed aiconfigurator."""

_BYTES_ALONE = frozenset({"collective"})
"""Kinds whose time depends on their bytes only, in any number format."""
_FRAMEWORKS_OWN = "custom_"
_SOURCES = {EXACT: "measured", BETWEEN: "between two measurements", NEARBY: "from the measurements around"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """Estimator that looks up times in measured tables.

    ``path``: a table, or ``aiconfigurator`` for the installed tables (``framework`` limits them to one
    framework). ``split``: rows of a table that are used (empty: all rows that are not held out for testing;
    ``all``: all rows). ``measurements``: a table in memory, in place of ``path``. ``num_ranks``: number of
    ranks in collectives over all ranks, for graphs that do not state it (-1: unknown).
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
                "measurements can only be given in Python", hint="write path=FILE on a command line"
            )
        if (given is None) == (not self.path):
            raise UsageError(
                "database: no table is given", hint=f"write database:path=FILE, or database:path={INSTALLED}"
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
        # Tables are not extrapolated: times are measured ones, or between measured ones.
        times = np.full((3, len(ops)), np.nan)
        for labels, rows in ops.classes():
            times[:, rows] = _times_of_class(library, device, labels, ops.take(rows), findings)
        return Prediction.of(self.name, *times, basis=MEASURED_BASIS)


def _candidates(
    library: MeasurementLibrary, device: str, labels: tuple[str, str, str, str]
) -> list[tuple[str, str]]:
    """Return pairs of number format and variant whose measurements may be used for a class of operations, the
    best first.

    If no variant is requested, the variant with most rows comes first. For collectives, the general library
    comes before the kernels of a framework.
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
    """Return the time and interval of the operations of one class, shape ``(3, ops)``.

    Candidates (pairs of variant and number format) are tried in order until all operations have a time.
    Measured times are not changed; interpolated times are raised to the device's roofline bound.
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
            text += ", where the other measurements have gaps" if position else ""
            findings.info("database.said", location, text, count=int((result.source == source).sum()))
    count = int(np.isnan(times[0]).sum())
    if not candidates:
        findings.warning(
            "database.not-measured", location, "the table has no measurement of these operations", count=count
        )
    else:
        text = "beyond the measured sizes or further than a step from them"
        findings.warning("database.not-near", location, text, count=count)
    return times
