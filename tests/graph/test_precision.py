"""What if it were run in another number format."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import hespas
from hespas.graph import Diagnostics, Workload
from hespas.graph.columns import find_dtype
from hespas.graph.passes import InPrecision

PROGRAM = Path(__file__).parents[2] / "fixtures" / "stablehlo" / "mlp.mlir"


def test_bytes_are_those_of_the_program_in_that_precision(tmp_path: Path) -> None:
    """As if its text said so; integers and booleans stay."""
    text = PROGRAM.read_text()
    assert "bf16" in text or "f32" in text
    wide = tmp_path / "wide.mlir"
    wide.write_text(text.replace("xbf16>", "xf32>").replace("<bf16>", "<f32>"), encoding="utf-8")
    narrow = tmp_path / "narrow.mlir"
    narrow.write_text(
        wide.read_text().replace("xf32>", "xbf16>").replace("<f32>", "<bf16>"), encoding="utf-8"
    )
    read = [hespas.read(path) for path in (wide, narrow)]
    assert all(isinstance(each, Workload) for each in read)
    one, other = (each.classes[0] for each in read if isinstance(each, Workload))
    dtype = find_dtype("bf16")
    assert dtype is not None
    made = InPrecision(dtype)(one, Diagnostics())
    np.testing.assert_array_equal(made.bytes_read, other.bytes_read)
    np.testing.assert_array_equal(made.bytes_written, other.bytes_written)
    np.testing.assert_array_equal(made.rate_dtype, other.rate_dtype)
    np.testing.assert_array_equal(made.types.dtype, other.types.dtype)
    np.testing.assert_array_equal(made.flops, one.flops)
    assert not made.attachments
