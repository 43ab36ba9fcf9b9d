"""The window of a convolution: kept by every format, and absent in older files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import ipc

import hespas
from hespas.graph import Workload
from hespas.graph.opgraph import ContractionTable

PROGRAM = Path(__file__).parents[3] / "fixtures" / "stablehlo" / "cnn_train.mlir"


def products(path: Path) -> ContractionTable:
    workload = hespas.read(path)
    assert isinstance(workload, Workload)
    return workload.classes[0].contractions


def windows(path: Path) -> list[int]:
    table = products(path)
    return sorted(table.window[table.window > 1].tolist())


def test_every_format_keeps_windows(tmp_path: Path) -> None:
    original = windows(PROGRAM)
    assert original.count(49) >= 1  # the 7 x 7 stem
    for name in ("graph.json", "graph.arrow", "trace.0.et"):
        written = tmp_path / name
        hespas.convert(PROGRAM, written)
        assert windows(written) == original, name


def test_a_file_without_the_column_has_no_windows(tmp_path: Path) -> None:
    new, old = tmp_path / "new.arrow", tmp_path / "old.arrow"
    hespas.convert(PROGRAM, new)
    with pa.OSFile(str(new), "rb") as source:
        table = ipc.open_file(source).read_all()
    table = table.drop_columns(["contractions.window"])
    with pa.OSFile(str(old), "wb") as sink, ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert windows(old) == []
    now, before = products(new), products(old)
    np.testing.assert_array_equal(now.k, before.k)
