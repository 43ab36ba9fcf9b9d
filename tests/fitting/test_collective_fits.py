"""Fits of collectives: known lines are recovered, test rows are never used, errors on held-out real sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hespas.estimators.collective_lines import CollectiveLine, lines_of
from hespas.estimators.collective_links import RankLayout
from hespas.estimators.collectives import Collectives
from hespas.fitting.collectives import fit_collectives
from hespas.graph.columns import FloatArray
from hespas.hardware import load_device
from hespas.hardware.device_fits import fits_to_toml
from hespas.measurements import Measurements, read_measurements
from hespas.operations import Labels, build

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "groundtruth"
H100 = load_device("H100-SXM")
SIZES = np.exp2(np.arange(9, 30, dtype=np.float64))
TRUTH = {
    RankLayout(2, 1): CollectiveLine(6000.0, (2.0**18,), (0.02, 0.004)),
    RankLayout(8, 1): CollectiveLine(15000.0, (2.0**14, 2.0**21), (0.3, 0.02, 0.005)),
}


def table(noise: float = 0.0, *, variant: str = "nccl 2.29.2") -> Measurements:
    generator = np.random.default_rng(7)
    count = len(SIZES) * len(TRUTH)
    ranks = np.repeat([float(layout.ranks) for layout in TRUTH], len(SIZES))
    times = np.concatenate([line.time_ns(SIZES) for line in TRUTH.values()])
    split = ["calib" if place % 6 else "devval" for place in range(count)]
    return Measurements(
        name="made up",
        provenance="this test",
        ops=build.collectives(
            Labels.constant("f16", count),
            op=Labels.constant("all_reduce", count),
            ranks=ranks,
            message_bytes=np.tile(SIZES, len(TRUTH)),
            ranks_per_node=ranks,
            variant=Labels.constant(variant, count),
        ),
        duration_ns=times * np.exp(generator.normal(0, noise, count)),
        spread_ns=np.full(count, np.nan),
        hardware=Labels.constant("H100-SXM", count),
        split=Labels.of(split),
    )


def test_known_lines_are_found_again() -> None:
    fits = {fit.form: fit for fit in fit_collectives(table(), H100, fitted="2026-01-01")}
    lines = lines_of(fits["segments"])
    assert set(lines) == set(TRUTH)
    for layout, line in lines.items():
        assert (np.abs(line.time_ns(SIZES) / TRUTH[layout].time_ns(SIZES) - 1) < 0.02).all()
    assert fits["segments"].default
    assert fits["segments"].error.mape < 0.05
    assert fits["nccl"].value("ratio") > 0


def test_noise_shows_in_the_errors_and_bands() -> None:
    (noisy,) = [fit for fit in fit_collectives(table(0.05), H100) if fit.form == "segments"]
    assert 0.02 < noisy.error.mape < 0.15
    assert noisy.bands[0].low < 1 < noisy.bands[0].high


def test_rows_kept_for_testing_never_reach_a_fit() -> None:
    clean = table(0.03)
    poisoned = clean.duration_ns.copy()
    poisoned[clean.split.where("devval")] *= 1e4
    spoilt = replace(clean, duration_ns=poisoned)
    date = "2026-01-01"
    texts = [fits_to_toml("any", fit_collectives(each, H100, fitted=date)) for each in (clean, spoilt)]
    assert texts[0] == texts[1]


def test_the_newest_release_is_the_default_and_never_a_frameworks_own() -> None:
    tables = [
        table(variant=name) for name in ("nccl 2.9.1", "nccl 2.29.2", "custom_allreduce-x 99", "cluster")
    ]
    defaults = {fit.variant for fit in fit_collectives(tables, H100) if fit.default}
    assert defaults == {"nccl 2.29.2"}


@pytest.mark.parametrize(
    ("name", "most"), [("aiconfigurator_collectives.parquet", 0.085), ("vidur_network.parquet", 0.06)]
)
def test_shipped_fits_on_sizes_left_out(name: str, most: float) -> None:
    """Mean over systems and collectives; a fixed knee at 64 KiB gives 10.1 % of the first table."""
    if not (DATA / name).exists():
        pytest.skip("the measured tables are not here")
    held_out = read_measurements(DATA / name).part("devval")
    means: list[float] = []
    inside: list[FloatArray] = []
    for hardware in held_out.hardware.used():
        mine = held_out.on(hardware)
        said = Collectives(tuned=False).predict(mine.ops, load_device(hardware))
        error = np.abs(said.duration_ns / mine.duration_ns - 1)
        assert not np.isnan(error).any()
        means += [float(error[mine.ops.op.where(op)].mean()) for op in mine.ops.op.used()]
        within = (said.low_ns <= mine.duration_ns) & (mine.duration_ns <= said.high_ns)
        inside.append(within.astype(np.float64))
    assert np.mean(means) <= most
    assert 0.85 <= np.concatenate(inside).mean() <= 0.975
