"""The window of a convolution: kept by every format, and absent in older files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc

import hespas
from hespas.converters.chakra.spelling import parse_contractions
from hespas.graph import Workload
from hespas.graph.errors import FormatError
from hespas.operations import operations_of
from hespas.operations.model import CHANNELS
from hespas.validators.checker import check

PROGRAM = Path(__file__).parents[3] / "fixtures" / "stablehlo" / "cnn_train.mlir"


def read(path: Path) -> Workload:
    workload = hespas.read(path)
    assert isinstance(workload, Workload)
    return workload


def windows(path: Path) -> list[int]:
    table = read(path).classes[0].contractions
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
    now, before = (read(path).classes[0].contractions for path in (new, old))
    np.testing.assert_array_equal(now.k, before.k)


@pytest.mark.parametrize("window", [10**12, 0, -5, 8])
@pytest.mark.parametrize("name", ["graph.json", "graph.arrow"])
def test_a_window_that_does_not_divide_k_is_refused(window: int, name: str, tmp_path: Path) -> None:
    workload = read(PROGRAM)
    graph = workload.classes[0]
    row = int(np.flatnonzero(graph.contractions.window == 49)[0])
    column = graph.contractions.window.copy()
    column[row] = window
    table = replace(graph.contractions, window=column)
    path = tmp_path / name
    hespas.write(replace(workload, classes=(replace(graph, contractions=table),)), path)
    with pytest.raises(FormatError, match=f"window is {window}, and k is {table.k[row]}") as caught:
        hespas.read(path)
    assert caught.value.position == f"node {graph.id[table.node[row]]}"
    assert "divisor of k" in (caught.value.hint or "")
    assert not check([path]).valid


def test_a_window_that_does_not_divide_k_gives_no_channels() -> None:
    graph = read(PROGRAM).classes[0]
    table = graph.contractions
    uneven = replace(table, window=np.where(table.window > 1, 10**12, table.window))
    known, unknown = (
        operations_of(replace(graph, contractions=rows)).dims[CHANNELS] for rows in (table, uneven)
    )
    assert not np.isnan(known).all()
    assert np.isnan(unknown).all()


@pytest.mark.parametrize(("window", "is_read"), [(9, True), (8, False), (0, False), (10**12, False)])
def test_a_window_in_text_of_a_trace_divides_k(window: int, is_read: bool) -> None:
    one = np.zeros(1, np.int64)
    rows, foreign = parse_contractions(one, [f"1x2x3x27 f32*f32>f32 window={window}"], one)
    assert (len(rows) == 1, len(foreign) == 0) == (is_read, is_read)


def test_other_sizes_keep_windows_that_divide_k() -> None:
    table = read(PROGRAM).classes[0].contractions
    sizes = {name: getattr(table, name) for name in ("batch", "m", "n", "flops", "useful_flops")}
    assert table.resized(**sizes, k=2 * table.k).window.tolist() == table.window.tolist()
    assert set(table.resized(**sizes, k=np.ones_like(table.k)).window.tolist()) == {1}
