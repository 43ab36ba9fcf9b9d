"""Measurements of all devices and classes, shelved when first asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from hespas.estimators.database.shelf import SPACES, Shelf
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError, MissingExtraError, UsageError
from hespas.hardware import canonical_name
from hespas.measurements import Columns, Measurements, columns_measured, read_measurements
from hespas.operations import find_scheme, rows_by_label

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "EVERYTHING",
    "EXTRA",
    "Library",
    "Volume",
    "installed_library",
    "installed_version",
    "library_of_file",
    "visible",
]

EVERYTHING = "all"
"""The name of no split but of all of them."""
_MADE_TO_FIT = "calib"
_Class = tuple[str, str, str, str, str]
"""Device, kind, operation, scheme, variant."""


@dataclass(frozen=True, slots=True, eq=False)
class Volume:
    """The rows of one class in one table."""

    table: Measurements
    rows: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """Tables by class. Where two hold one class, the one with more rows counts."""

    tables: tuple[Measurements, ...]
    volumes: dict[_Class, Volume] = field(default_factory=dict[_Class, Volume])
    _shelves: dict[_Class, Shelf] = field(default_factory=dict[_Class, Shelf])

    @classmethod
    def of(cls, tables: Iterable[Measurements]) -> Library:
        """Sort the rows of tables by class. O(rows log rows)."""
        library = cls(tuple(tables))
        for table in library.tables:
            for name, rows in _classes(table):
                known = library.volumes.get(name)
                if name[1] in SPACES and (known is None or len(known.rows) < len(rows)):
                    library.volumes[name] = Volume(table, rows)
        return library

    def devices(self) -> tuple[str, ...]:
        """Devices that something was measured on."""
        return tuple(sorted({name[0] for name in self.volumes}))

    def variants(self, device: str, kind: str, op: str, scheme: str) -> tuple[str, ...]:
        """The variants of a class, the one with the most rows first."""
        wanted = (device, kind, op, scheme)
        found = [(-len(each.rows), name[4]) for name, each in self.volumes.items() if name[:4] == wanted]
        return tuple(variant for _, variant in sorted(found))

    def schemes(self, device: str, kind: str, op: str) -> tuple[str, ...]:
        """The schemes that an operation was measured in, the one with the most rows first."""
        count: dict[str, int] = {}
        for name, each in self.volumes.items():
            if name[:3] == (device, kind, op):
                count[name[3]] = count.get(name[3], 0) + len(each.rows)
        return tuple(sorted(count, key=lambda scheme: (-count[scheme], scheme)))

    def shelf(self, name: _Class) -> Shelf:
        """The measurements of one class, made ready to be asked."""
        if name not in self._shelves:
            volume = self.volumes[name]
            ops, times = volume.table.ops.take(volume.rows), volume.table.duration_ns[volume.rows]
            self._shelves[name] = Shelf.of(SPACES[name[1]], ops, times)
        return self._shelves[name]


def _classes(table: Measurements) -> Iterable[tuple[_Class, IntArray]]:
    ops = table.ops
    columns = (table.hardware, ops.kind, ops.op, ops.scheme, ops.variant)
    for labels, rows in rows_by_label(*columns):
        device, kind, op, scheme, variant = labels
        yield (device, kind, op, scheme, variant), rows


def library_of_file(path: str, split: str) -> Library:
    """The library of one table, kept as long as the file does not change. Raises ``FormatError``."""
    try:
        changed = Path(path).stat().st_mtime_ns
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", path=path, hint="check the path") from error
    return _kept(path, split, changed)


@lru_cache(maxsize=4)
def _kept(path: str, split: str, changed: int) -> Library:
    del changed  # part of the key: another time of change is another table
    if split and split != EVERYTHING:
        return Library.of([read_measurements(path, split=split)])
    return Library.of([visible(read_measurements(path), split)])


def visible(table: Measurements, split: str) -> Measurements:
    """The part of a table that is asked for: without a name, what was not kept apart for testing."""
    if split == EVERYTHING:
        return table
    if split:
        return table.part(split)
    return table.part(_MADE_TO_FIT) if _MADE_TO_FIT in table.split.used() else table


# Tables that come with an installed ``aiconfigurator-core`` (NVIDIA, Apache-2.0), read where they lie.
#
# They stand in ``systems/data/SYSTEM/TOPIC/FRAMEWORK/VERSION/NAME_perf.parquet``: times in ms, sizes of
# messages in elements. Nothing of the package is run, and nothing is copied out of it.

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
"""Tables of single kernels, their kind and the column of their number format; the others hold layers."""

_WITHOUT_OP = frozenset({"matmul", "moe", "attention.context", "attention.generation", "attention.encoder"})
_SAME_NAME: Mapping[str, str] = MappingProxyType(
    {"version": "framework_version", "op_name": "op", "num_gpus": "num_ranks"}
)
_ELEMENT_BYTES: Mapping[str, float] = MappingProxyType({"half": 2.0, "bfloat16": 2.0, "int8": 1.0})
_KEPT = 4


def installed_version() -> str:
    """The version of ``aiconfigurator-core``. Raises ``MissingExtraError`` where there is none."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError as error:
        raise MissingExtraError("the database of aiconfigurator", EXTRA) from error


def installed_library(device: str, framework: str, kinds: frozenset[str]) -> Library:
    """The tables of one device (a name of the library) and some kinds of operations, of one framework
    (``trtllm``; empty: all). What was read last is kept.

    Raises ``MissingExtraError`` where the package is not installed, ``UsageError`` where it knows no such
    framework.
    """
    package = find_spec(_PACKAGE)
    places = None if package is None else package.submodule_search_locations
    if not places:
        raise MissingExtraError("the database of aiconfigurator", EXTRA)
    wanted = (framework.lower(), kinds & {kind for kind, _ in _TABLES.values()})
    return _library(Path(next(iter(places))), installed_version(), device, wanted)


@lru_cache(maxsize=_KEPT)
def _library(package: Path, release: str, device: str, wanted: tuple[str, frozenset[str]]) -> Library:
    folder = package / "systems" / "data"
    systems = [each for each in sorted(folder.glob("*")) if _is(each.name, device)]
    frameworks = sorted({each.parent.parent.name for each in folder.rglob("*_perf.parquet")})
    if wanted[0] and wanted[0] not in frameworks:
        raise UsageError(
            f"{_DISTRIBUTION} {release} has no measurements with {wanted[0]!r}",
            hint=f"it has {', '.join(frameworks)}",
        )
    return Library.of(table for system in systems for table in _tables(system, device, release, wanted))


def _is(system: str, device: str) -> bool:
    return canonical_name(system) == device


def _tables(
    system: Path, device: str, release: str, wanted: tuple[str, frozenset[str]]
) -> Iterator[Measurements]:
    import pandas as pd

    framework, kinds = wanted
    for path in sorted(system.rglob("*_perf.parquet")):
        name = path.name.removesuffix("_perf.parquet")
        library = path.parent.parent.name
        if name not in _TABLES or _TABLES[name][0] not in kinds:
            continue
        # Collectives of a vendor's library belong to no framework.
        if framework and library.lower() not in (framework, "nccl", "oneccl"):
            continue
        frame = _known_columns(pd.read_parquet(path), name, path)
        frame["hardware"] = device
        provenance = f"{_DISTRIBUTION} {release}, {library} {path.parent.name}"
        yield columns_measured(Columns(path, frame), name=path.name, provenance=provenance)


def _known_columns(frame: pd.DataFrame, name: str, path: Path) -> pd.DataFrame:
    """The columns of the table as those of the known tables are called, in their units."""
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
        told = frame["kernel_source"].astype(str)
        for column in ("backend", "implementation"):
            if column in frame:
                told = told + ":" + frame[column].astype(str)
        frame["library"] = name if name != "custom_allreduce" else f"{name}-{path.parent.parent.name}:" + told
        frame["library_version"] = frame["framework_version"]
        frame = frame.drop(columns=["framework", "framework_version"], errors="ignore")
    return frame


def _element_bytes(dtype: object) -> float:
    name = str(dtype)
    found = find_scheme(name)
    return _ELEMENT_BYTES.get(name, np.nan if found is None else found.output_bits / 8)
