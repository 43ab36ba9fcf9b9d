"""Workloads converted to another number format."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import hespas
from hespas.graph import SOURCE_DTYPE, Diagnostics, GraphBuilder, OpClass, Workload, dtype
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
    made = InPrecision(dtype("bf16"))(one, Diagnostics())
    np.testing.assert_array_equal(made.bytes_read, other.bytes_read)
    np.testing.assert_array_equal(made.bytes_written, other.bytes_written)
    np.testing.assert_array_equal(made.rate_dtype, other.rate_dtype)
    np.testing.assert_array_equal(made.types.dtype, other.types.dtype)
    np.testing.assert_array_equal(made.flops, one.flops)
    assert not made.attachments


def test_a_precision_replaces_the_types_before_compilation() -> None:
    builder = GraphBuilder("compiled")
    row, f32 = builder.strings.add("dot"), dtype("f32")
    kind = builder.types.add(f32, (8, 8))
    node = builder.add_node(
        name_id=row, op_id=row, op_class=OpClass.CONTRACTION, operands=[kind, kind], results=[kind]
    )
    builder.add_contraction(
        node, batch=1, m=8, n=8, k=8, flops=1024.0, useful_flops=1024.0,
        lhs=f32.code, rhs=f32.code, accumulator=f32.code,
    )  # fmt: skip
    builder.add_extra(node, "other", 0, b"kept")
    builder.add_extra(node, SOURCE_DTYPE, 0, b"bf16")
    made = InPrecision(dtype("f16"))(builder.build(), Diagnostics())
    assert [made.strings[key] for key in made.extra.key.tolist()] == ["other"]
    assert made.extra.value(0) == b"kept"
    assert made.contractions.lhs.tolist() == [dtype("f16").code]
