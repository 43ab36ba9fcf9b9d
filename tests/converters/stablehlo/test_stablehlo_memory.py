"""Rejected programs do not stay in memory, because services read many programs."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from jaxlib.mlir import ir

from hespas.converters import ReadOptions, load_format
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable


def _live_contexts() -> int:
    gc.collect()
    count = cast("Callable[[], int]", getattr(ir.Context, "_get_live_count"))  # noqa: B009 # no public one
    return count()


def test_refused_programs_leave_no_context_behind(tmp_path: Path) -> None:
    path = tmp_path / "cut.mlir"
    path.write_text("func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {\n  %b = stablehlo.abs %a : ten")
    read = load_format("stablehlo").read
    assert read is not None
    before = _live_contexts()
    for _ in range(3):
        with pytest.raises(FormatError):
            read(path, ReadOptions(), Diagnostics())
    assert _live_contexts() == before
