"""Database: exact lookup, interpolation of known functions, and no estimates outside the tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas.estimators import load_estimator
from hespas.estimators.database import Database
from hespas.estimators.rates import roof_ns
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray
from hespas.graph.errors import FormatError, UsageError
from hespas.hardware import load_device
from hespas.measurements import Measurements, read_measurements
from hespas.operations import Labels, Operations, build

DATA = Path(__file__).parents[3].parent / "shared" / "data" / "groundtruth"
H100 = load_device("H100-SXM")


def measured(ops: Operations, duration_ns: FloatArray, hardware: str = "H100-SXM") -> Measurements:
    count = len(ops)
    return Measurements(
        name="made up",
        provenance="this test",
        ops=ops,
        duration_ns=duration_ns,
        spread_ns=np.full(count, np.nan),
        hardware=Labels.constant(hardware, count),
        split=Labels.constant("", count),
    )


def collectives(
    sizes: FloatArray, ranks: FloatArray, *, op: str = "all_reduce", scheme: str = "bf16", variant: str = ""
) -> Operations:
    count = len(sizes)
    return build.collectives(
        Labels.constant(scheme, count),
        op=Labels.constant(op, count),
        ranks=ranks,
        message_bytes=sizes,
        ranks_per_node=ranks,
        variant=Labels.constant(variant, count),
    )


def products(m: FloatArray, n: FloatArray, k: FloatArray) -> Operations:
    return build.matmuls(Labels.constant("bf16", len(m)), batch=np.ones(len(m)), m=m, n=n, k=k)


def products_ns(ops: Operations) -> FloatArray:
    return 3000.0 + ops.flops / 500e3 + ops.bytes_moved / 2e3


def powers(first: int, end: int) -> FloatArray:
    """Powers of two."""
    return np.exp2(np.arange(first, end, dtype=np.float64))


SIZES = powers(10, 27)


def alpha_beta(sizes: FloatArray, ranks: FloatArray) -> FloatArray:
    return 4000.0 * ranks + sizes / 200.0 * (ranks - 1) / ranks


def known_collectives(left_out: FloatArray) -> Measurements:
    sizes = np.array([size for size in SIZES if size not in left_out])

    both = collectives(np.tile(sizes, 2), np.repeat([2.0, 8.0], len(sizes)))
    return measured(both, alpha_beta(both.dim("message_bytes"), both.dim("ranks")))


def ask(
    database: Database, ops: Operations, diagnostics: Diagnostics | None = None
) -> tuple[FloatArray, FloatArray, FloatArray]:
    said = database.predict(ops, H100, diagnostics)
    return said.duration_ns, said.low_ns, said.high_ns


def test_a_measured_size_has_the_median_of_its_times() -> None:
    size = np.array([1024.0, 1024.0, 1024.0, 4096.0])
    table = measured(collectives(size, np.full(4, 8.0)), np.array([5.0, 9.0, 6.0, 20.0]))
    time, low, high = ask(Database(measurements=table), collectives(size[2:], np.full(2, 8.0)))
    assert time.tolist() == [6.0, 20.0]
    assert (low < time).all()
    assert (high > time).all()


def test_between_two_sizes_a_start_and_a_rate_are_found_again() -> None:
    gaps = np.array([2.0**14, 2.0**20])
    database = Database(measurements=known_collectives(gaps))
    sizes = np.array([*gaps, 3000.0, 6291456.0])
    time, low, high = ask(database, collectives(sizes, np.full(4, 8.0)))
    truth = alpha_beta(sizes, np.full(4, 8.0))
    np.testing.assert_allclose(time, truth, rtol=0.01)
    assert ((low <= truth) & (truth <= high)).all()


def test_between_two_numbers_of_ranks_is_interpolated_too() -> None:
    database = Database(measurements=known_collectives(np.empty(0)))
    sizes, ranks = np.array([2.0**12, 2.0**24]), np.full(2, 4.0)
    time, _, _ = ask(database, collectives(sizes, ranks))
    np.testing.assert_allclose(time, alpha_beta(sizes, ranks), rtol=0.25)


def test_what_was_measured_stays_and_what_lies_between_is_within_the_roof() -> None:
    sizes = np.array([1024.0, 2048.0, 4096.0, 8192.0])
    ops = products(sizes, sizes, sizes)
    roof = roof_ns(ops, H100)
    said, _, _ = ask(
        Database(measurements=measured(ops.take(np.array([0, 1, 3])), 0.5 * roof[[0, 1, 3]])), ops
    )
    np.testing.assert_allclose(said[[0, 1, 3]], 0.5 * roof[[0, 1, 3]])
    between = products(np.array([3072.0]), np.array([4096.0]), np.array([4096.0]))
    around = products(np.array([2048.0, 4096.0]), np.full(2, 4096.0), np.full(2, 4096.0))
    time, _, _ = ask(Database(measurements=measured(around, 0.5 * roof_ns(around, H100))), between)
    assert time[0] == roof_ns(between, H100)[0]


def test_nothing_is_said_beyond_the_measured_or_far_from_it() -> None:
    gap = powers(13, 19)
    table = known_collectives(np.empty(0))
    of_two = np.flatnonzero((table.ops.dim("ranks") == 2) & np.isin(table.ops.dim("message_bytes"), gap))
    table = table.take(np.setdiff1d(np.arange(len(table)), of_two))
    sizes = np.array([512.0, 2.0**27, 2.0**15, 2.0**13, 2.0**18])
    diagnostics = Diagnostics()
    time, _, _ = ask(Database(measurements=table), collectives(sizes, np.full(5, 2.0)), diagnostics)
    assert np.isnan(time).tolist() == [True, True, True, False, False]
    assert diagnostics.counts()["database.not-near"] == 3


def test_a_spike_on_a_coarse_grid_is_looked_up_but_not_believed() -> None:
    table = known_collectives(np.array([2.0**15]))
    spike = np.flatnonzero(table.ops.dim("message_bytes") == 2.0**14)
    times = table.duration_ns.copy()
    times[spike] *= 3
    sizes = np.array([2.0**14, 2.0**15])
    time, _, _ = ask(Database(measurements=measured(table.ops, times)), collectives(sizes, np.full(2, 8.0)))
    truth = alpha_beta(sizes, np.full(2, 8.0))
    np.testing.assert_allclose(time, [3 * truth[0], truth[1]], rtol=0.02)


def test_products_between_grid_points_take_a_plane_through_those_around() -> None:
    axis = powers(6, 13)
    m, n, k = (each.reshape(-1) for each in np.meshgrid(axis, axis, axis))
    grid = products(m, n, k)
    database = Database(measurements=measured(grid, products_ns(grid)))
    asked = products(np.array([100.0, 3000.0]), np.array([300.0, 3000.0]), np.array([700.0, 1500.0]))
    time, _, _ = ask(database, asked)
    np.testing.assert_allclose(time, products_ns(asked), rtol=0.05)
    outside = products(np.array([9000.0]), np.array([300.0]), np.array([700.0]))
    assert np.isnan(ask(database, outside)[0]).all()


def test_who_names_no_variant_gets_the_one_measured_most() -> None:
    few = collectives(SIZES[:5], np.full(5, 8.0), variant="nccl 1")
    many = collectives(np.tile(SIZES[:5], 2), np.full(10, 8.0), variant="custom_mine")
    tables = [measured(few, np.full(5, 100.0)), measured(many, np.full(10, 7.0))]
    joined = Measurements(
        name="both",
        provenance="this test",
        ops=build.collectives(
            Labels.constant("bf16", 15),
            op=Labels.constant("all_reduce", 15),
            ranks=np.full(15, 8.0),
            message_bytes=np.tile(SIZES[:5], 3),
            ranks_per_node=np.full(15, 8.0),
            variant=Labels.of(["nccl 1"] * 5 + ["custom_mine"] * 10),
        ),
        duration_ns=np.concatenate([table.duration_ns for table in tables]),
        spread_ns=np.full(15, np.nan),
        hardware=Labels.constant("H100-SXM", 15),
        split=Labels.constant("", 15),
    )
    database = Database(measurements=joined)
    asked = collectives(SIZES[:1], np.full(1, 8.0))
    # A serving framework's own kernels are nobody's default, however often they were measured.
    assert ask(database, asked)[0].tolist() == [100.0]
    named = collectives(SIZES[:1], np.full(1, 8.0), variant="custom_mine")
    assert ask(database, named)[0].tolist() == [7.0]
    other = collectives(SIZES[:1], np.full(1, 8.0), variant="oneccl 9")
    assert np.isnan(ask(database, other)[0]).all()


def test_a_collective_moves_bytes_whatever_they_hold_but_a_product_does_not() -> None:
    database = Database(measurements=known_collectives(np.empty(0)))
    asked = collectives(SIZES[:1], np.full(1, 8.0), scheme="i8")
    assert ask(database, asked)[0] == alpha_beta(SIZES[:1], np.full(1, 8.0))
    grid = products(powers(5, 9), np.full(4, 64.0), np.full(4, 64.0))
    other = build.matmuls(
        Labels.constant("f16", 1),
        batch=np.ones(1),
        m=np.full(1, 64.0),
        n=np.full(1, 64.0),
        k=np.full(1, 64.0),
    )
    diagnostics = Diagnostics()
    assert np.isnan(
        ask(Database(measurements=measured(grid, products_ns(grid))), other, diagnostics)[0]
    ).all()
    assert diagnostics.counts() == {"database.not-measured": 1}


def test_another_device_has_no_times_and_a_reason() -> None:
    table = known_collectives(np.empty(0))
    diagnostics = Diagnostics()
    said = Database(measurements=table).predict(table.ops, load_device("A100-SXM-80GB"), diagnostics)
    assert np.isnan(said.duration_ns).all()
    assert "H100-SXM" in next(iter(diagnostics)).message


def test_a_file_is_read_and_its_split_respected(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    head = "hardware,kind,op,dtype,ranks,ranks_per_node,message_bytes,latency_us,split"
    rows = [f"h100_sxm,collective,all_reduce,bfloat16,8,8,{2**p},{p},calib" for p in range(10, 20)]
    rows.append("h100_sxm,collective,all_reduce,bfloat16,8,8,4194304,99,devval")
    path.write_text("\n".join([head, *rows, ""]))
    asked = collectives(np.array([2.0**12, 2.0**22]), np.full(2, 8.0))
    seen = load_estimator(f"database:path={path},split=calib")
    assert isinstance(seen, Database)
    time, _, _ = ask(seen, asked)
    assert time[0] == 12000.0
    assert np.isnan(time[1])
    # What a table keeps for testing is not seen unless it is asked for.
    assert np.isnan(ask(Database(path=str(path)), asked)[0]).tolist() == [False, True]
    assert ask(Database(path=str(path), split="all"), asked)[0].tolist() == [12000.0, 99000.0]


@pytest.mark.parametrize("spelling", ["database", "database:measurements=x", "database:colour=red"])
def test_options_that_make_no_sense_are_usage_errors(spelling: str) -> None:
    with pytest.raises(UsageError):
        load_estimator(spelling)


def test_a_missing_file_is_a_format_error(tmp_path: Path) -> None:
    database = Database(path=str(tmp_path / "none.csv"))
    with pytest.raises(FormatError, match="cannot be read"):
        database.predict(collectives(SIZES[:1], np.full(1, 8.0)), H100)


@pytest.mark.parametrize(
    ("table", "most", "least_coverage"),
    [
        ("aiconfigurator_collectives.parquet", 0.055, 0.7),
        ("vidur_network.parquet", 0.035, 0.99),
        ("aiconfigurator_quantize.parquet", 0.04, 0.98),
        ("tpuv4_matmul.csv.gz", 0.06, 0.97),
    ],
)
def test_held_out_shapes_of_real_tables(table: str, most: float, least_coverage: float) -> None:
    if not (DATA / table).exists():
        pytest.skip("the measured tables are not here")
    everything = read_measurements(DATA / table)
    database = Database(measurements=everything, split="calib")
    errors: list[FloatArray] = []
    inside: list[FloatArray] = []
    for name in everything.hardware.used():
        held_out = everything.on(name).part("devval")
        said = database.predict(held_out.ops, load_device(name))
        known = ~np.isnan(said.duration_ns)
        errors.append(said.duration_ns / held_out.duration_ns - 1)
        within = (said.low_ns <= held_out.duration_ns) & (held_out.duration_ns <= said.high_ns)
        inside.append(within[known].astype(np.float64))
    error = np.concatenate(errors)
    assert np.nanmean(np.abs(error)) <= most
    assert np.isfinite(error).mean() >= least_coverage
    assert 0.83 <= np.concatenate(inside).mean() <= 0.97
