"""Each axis of a grid equals a run of the program or system with that value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.api import simulate_grid
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.settings import precision_of
from hespas.graph import Diagnostics, OpGraph, Workload
from hespas.graph.errors import UsageError
from hespas.graph.passes import InPrecision
from hespas.hardware import device_to_toml, load_device
from tests.generators.llm.small_models import DENSE, step

PROGRAM = Path(__file__).parents[2] / "fixtures" / "stablehlo" / "mlp.mlir"
SHORT = replace(DENSE, layers=DENSE.layers[:2])


def in_text(path: Path, name: str) -> Path:
    """The program with its element type written as another one."""
    text = PROGRAM.read_text()
    for other in ("bf16", "f32"):
        text = text.replace(f"x{other}>", f"x{name}>").replace(f"<{other}>", f"<{name}>")
    path.write_text(text, encoding="utf-8")
    return path


def graph_of(path: Path) -> OpGraph:
    program = hespas.read(path)
    assert isinstance(program, Workload)
    return program.classes[0]


def times(grid: Path, source: Path) -> list[float]:
    done = simulate_grid(grid, source)
    assert [row.fault for row in done.rows] == [""] * len(done.rows)
    return [row.step_ns for row in done.rows]


@pytest.mark.parametrize("name", ["f32", "bf16", "f16", "f8E4M3FN"])
def test_products_are_those_of_the_program_in_that_precision(name: str, tmp_path: Path) -> None:
    other = graph_of(in_text(tmp_path / "start.mlir", "bf16" if name == "f32" else "f32"))
    made = InPrecision.of(name)(other, Diagnostics()).contractions
    written = graph_of(in_text(tmp_path / "written.mlir", name)).contractions
    assert len(written)
    for column in ("lhs", "rhs", "accumulator", "products", "flops"):
        np.testing.assert_array_equal(getattr(made, column), getattr(written, column))


@pytest.mark.parametrize("device", ["MI300X", "H100-SXM", "A100-SXM-80GB"])
def test_a_precision_takes_as_long_as_the_program_written_in_it(device: str, tmp_path: Path) -> None:
    grid, names = tmp_path / "grid.toml", ["f32", "bf16", "f8E4M3FN"]
    grid.write_text(f'hardware = "{device}"\nprecision = {names}\n'.replace("'", '"'), encoding="utf-8")
    found = times(grid, in_text(tmp_path / "start.mlir", "bf16"))
    written = [hespas.simulate(in_text(tmp_path / f"{name}.mlir", name), device).step_ns for name in names]
    assert found == pytest.approx(written, rel=1e-9)


def test_f32_of_pytorch_is_not_tf32(tmp_path: Path) -> None:
    source, grid = tmp_path / "job.json", tmp_path / "grid.toml"
    hespas.write(step(SHORT, Layout(), launch="whole"), source)
    grid.write_text(
        'hardware = "H100-SXM"\nestimator = "roofline"\nprecision = ["f32", "f32_full", "tf32"]\n'
    )
    ieee, full, rounded = times(grid, source)
    assert ieee == full > 1.5 * rounded


def test_products_of_f32_stay_as_the_program_states_them() -> None:
    for name, products in (("f32", 6), ("tf32", 1)):
        (graph,) = step(SHORT, Layout(), precision=precision_of(name)).classes
        again = InPrecision.of("f32")(graph, Diagnostics()).contractions
        np.testing.assert_array_equal(again.products, graph.contractions.products)
        assert set(again.products.tolist()) == {products}
        narrow = InPrecision.of("bf16")(graph, Diagnostics()).contractions
        assert set(narrow.products.tolist()) == {1}


def test_links_as_they_are_take_as_long_as_no_axis(tmp_path: Path) -> None:
    source, grid = tmp_path / "job.json", tmp_path / "grid.toml"
    hespas.write(step(SHORT, Layout(tp=4)), source)
    grid.write_text('hardware = "H100-SXM"\nlink_bandwidth = [1, 1.0001]\n')
    assert times(grid, source)[0] == hespas.simulate(source, "H100-SXM").step_ns


def test_links_of_an_own_device_change_no_matmul(tmp_path: Path) -> None:
    source, grid, own = tmp_path / "job.json", tmp_path / "grid.toml", tmp_path / "mine.toml"
    hespas.write(step(SHORT, Layout(tp=4)), source)
    device = replace(load_device("H100-SXM"), name="mine", aliases=(), fits_of="H100-SXM")
    own.write_text(device_to_toml(device), encoding="utf-8")
    grid.write_text('hardware = "./mine.toml"\nlink_bandwidth = [1, 2]\n')
    done = simulate_grid(grid, source)
    assert [row.fault for row in done.rows] == ["", ""]
    measured, scaled = (row.compute_ns for row in done.rows)
    assert measured == scaled


def test_diagnostics_of_rows_are_those_of_the_result(tmp_path: Path) -> None:
    source, grid, folder = tmp_path / "job.json", tmp_path / "grid.toml", tmp_path / "out"
    hespas.write(step(SHORT, Layout(tp=4)), source)
    grid.write_text('hardware = "H100-SXM"\nlink_bandwidth = [1, 2, 4]\n')
    alone = Diagnostics()
    hespas.simulate(source, "H100-SXM", diagnostics=alone)
    first = simulate_grid(grid, source, folder=folder, jobs=2)
    assert {each.code: each.count for each in first.rows[0].diagnostics} == alone.counts()
    text = "collective times of rows with another factor than 1 follow from the links, not from measurements"
    codes = [[each.code for each in row.diagnostics] for row in first.rows]
    assert ["grid.link-estimates" in row for row in codes] == [False, True, True]
    assert text in [each.message for each in first.diagnostics]
    assert first.diagnostics.counts()["grid.link-estimates"] == 2
    resumed = simulate_grid(grid, source, folder=folder, overwrite=True)
    assert (resumed.kept, resumed.to_json()) == (3, first.to_json())
    assert "hespas-grid-" not in first.to_json().decode()


def test_a_precision_that_is_no_number_format_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown precision 'f33'"):
        InPrecision.of("f33")
