"""Estimators that accept a table of operations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from hespas.api import estimate_table
from hespas.estimators import registry
from hespas.estimators.registry import list_estimators
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.errors import UnsupportedError
from hespas.hardware import Device


@dataclass(frozen=True, slots=True)
class ProgramsOnly:
    """An estimator that accepts only whole programs."""

    name: str = "programs-only"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        raise NotImplementedError


def test_who_takes_programs_only_is_told_who_takes_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.BUILTIN, "programs-only", f"{__name__}:ProgramsOnly")
    table = tmp_path / "sizes.csv"
    table.write_text("m,n,k\n8,8,8\n")
    with pytest.raises(UnsupportedError, match="programs, not tables") as caught:
        estimate_table(table, "H100-SXM", estimator="programs-only")
    listed = (caught.value.hint or "").removeprefix("use one of: ").split(", ")
    usable = [each.name for each in list_estimators() if each.available]
    assert listed == [name for name in usable if name not in {"programs-only", "compiler", "training"}]
    assert {"roofline", "learned", "composite", "collectives"} <= set(listed)
