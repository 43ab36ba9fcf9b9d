"""Reading files of old schemas in tests, and comparing what was read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hespas.converters.chakra import FORMAT
from hespas.converters.format import ReadOptions
from hespas.graph import Diagnostics, Workload
from hespas.graph.equality import workloads_equal
from tests.converters.chakra.historic_protos import OLD_VERSIONS

__all__ = ["ALL", "OLD", "differences", "names_of", "read", "without_label"]

OLD = list(OLD_VERSIONS)
ALL = [*OLD, "0.0.4-2023-10-10", "0.0.4"]


def names_of(version: str) -> set[str]:
    """Return the names of a version in files."""
    return {version, version.split("-", maxsplit=1)[0]} | ({"1.0.0"} if version == "0.0.4" else set())


def read(folder: Path, data: bytes, **options: Any) -> tuple[Workload, Diagnostics]:
    assert FORMAT.read is not None
    diagnostics = Diagnostics()
    (folder / "a.et").write_bytes(data)
    value = FORMAT.read(folder / "a.et", ReadOptions(**options), diagnostics)
    assert isinstance(value, Workload)
    return value, diagnostics


def differences(a: Workload, b: Workload) -> list[str]:
    """Return the differences without the metadata of the source."""
    return [str(entry) for entry in workloads_equal(replace(a, metadata={}), replace(b, metadata={}))]


def without_label(found: Workload, today: Workload) -> list[str]:
    """Return the differences without the version label, which only some of the encoded files have."""
    return [
        entry
        for entry in differences(found, today)
        if "extra.value: 1 rows differ, the first is row 0" not in entry
    ]
