"""Collectives by fitted lines and, where none reach, by NCCL's own model."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from hespas.estimators import load_estimator
from hespas.estimators.collectives import (
    ALGORITHMS,
    SEGMENTS,
    Collectives,
    Layout,
    Line,
    lines_of,
    named,
    tuned_times,
)
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    ExplicitGroups,
    GraphBuilder,
    GroupSet,
    NodeKind,
    OpClass,
    OpGraph,
    Permutation,
    StridedGroups,
)
from hespas.hardware import Device, Fit, FitBand, FitError, FitParameter, FitRange, load_device
from hespas.hardware.device_file import fits_to_toml, read_fits
from hespas.operations import Labels, Operations, build

H100 = load_device("H100-SXM")
LINES = {
    Layout(2, 1): Line(5000.0, (65536.0,), (0.01, 0.002)),
    Layout(8, 1): Line(16000.0, (), (0.004,)),
    Layout(8, 2): Line(60000.0, (), (0.05,)),
}


def fit(
    op: str = "all_reduce", scheme: str = "f16", variant: str = "nccl 2.29.2", *, default: bool = True
) -> Fit:
    return Fit(
        kind="collective",
        op=op,
        scheme=scheme,
        variant=variant,
        form=SEGMENTS,
        parameters=tuple(
            FitParameter(name=name, value=value, std_error=0.1)
            for layout, line in LINES.items()
            for name, value in named(layout, line)
        ),
        support=(FitRange(name="message_bytes", low=1024.0, high=2.0**28),),
        samples=100,
        error=FitError(n=10, mape=0.05, median_ape=0.04, p90_ape=0.1, bias=0.0),
        bands=(FitBand(up_to_ns=inf, low=0.9, high=1.2),),
        table="made up",
        provenance="this test",
        fitted="2026-01-01",
        seed=0,
        default=default,
    )


def device(*fits: Fit) -> Device:
    return replace(H100, own_fits=fits, fits_of="")


def asked(
    sizes: list[float],
    ranks: float = 8,
    *,
    op: str = "all_reduce",
    scheme: str = "bf16",
    variant: str = "",
    per_node: float = np.nan,
) -> Operations:
    count = len(sizes)
    return build.collectives(
        Labels.constant(scheme, count),
        op=Labels.constant(op, count),
        ranks=np.full(count, float(ranks)),
        message_bytes=np.array(sizes),
        ranks_per_node=np.full(count, per_node),
        variant=Labels.constant(variant, count),
    )


def times(ops: Operations, where: Device, model: Collectives | None = None) -> list[float]:
    found: list[float] = (model or Collectives()).predict(ops, where).duration_ns.tolist()
    return found


def test_lines_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "fits.toml"
    path.write_text(fits_to_toml("mine", [fit()]))
    (again,) = read_fits(path)
    assert again == fit()
    assert lines_of(again) == LINES


def test_a_line_adds_up_its_segments() -> None:
    line = Line(10.0, (100.0, 1000.0), (1.0, 0.5, 0.1))
    assert line.time_ns(np.array([0.0, 50.0, 100.0, 300.0, 2000.0])).tolist() == [10, 60, 110, 210, 660]


def test_a_fitted_layout_takes_its_line_and_its_band() -> None:
    said = Collectives().predict(asked([2.0**20]), device(fit()))
    truth = 16000 + 0.004 * 2**20
    assert said.duration_ns[0] == pytest.approx(truth)
    assert said.low_ns[0] == pytest.approx(0.9 * truth)
    assert said.high_ns[0] == pytest.approx(1.2 * truth)


def test_beyond_the_fitted_sizes_the_interval_widens() -> None:
    said = Collectives().predict(asked([2.0**28, 2.0**32]), device(fit()))
    width = said.high_ns / said.duration_ns
    assert width[1] > width[0]


def test_ranks_between_two_fitted_numbers_lie_between_them() -> None:
    (four,) = times(asked([2.0**20], ranks=4), device(fit()))
    two, eight = (float(LINES[Layout(ranks, 1)].time_ns(np.array([2.0**20]))[0]) for ranks in (2, 8))
    assert four == pytest.approx((two * eight) ** 0.5)


def test_nodes_are_their_own_class() -> None:
    (spread,) = times(asked([1e6], per_node=4), device(fit()))
    (together,) = times(asked([1e6], per_node=8), device(fit()))
    assert spread == pytest.approx(60000 + 0.05 * 1e6)
    assert together == pytest.approx(16000 + 0.004 * 1e6)


def test_one_rank_sends_nothing() -> None:
    assert times(asked([1e6], ranks=1), device(fit())) == [0.0]


def test_a_program_gets_the_default_library_before_a_frameworks_own() -> None:
    own = replace(fit(scheme="bf16", variant="custom_allreduce-x 1", default=False), samples=10_000)
    old = replace(fit(variant="nccl 2.20", default=False), parameters=fit().parameters[:0])
    where = device(own, old, fit())
    diagnostics = Diagnostics()
    Collectives().predict(asked([1e6]), where, diagnostics)
    assert [finding.message for finding in diagnostics] == ["fitted for nccl 2.29.2 in f16"]


def test_a_named_variant_is_never_replaced_by_another_fit() -> None:
    where = device(fit())
    refusing = Collectives(tuned=False)
    assert np.isnan(times(asked([1e6], variant="nccl 2.20"), where, refusing)).all()
    assert not np.isnan(times(asked([1e6], variant="nccl 2.29.2"), where, refusing)).any()


def test_the_library_option_names_a_part() -> None:
    other = replace(fit(variant="oneccl 7", default=False), bands=())
    where = device(fit(), other)
    model = load_estimator("collectives:library=oneccl")
    assert isinstance(model, Collectives)
    assert np.isnan(model.predict(asked([1e6]), where).low_ns).all()


def test_what_no_fit_covers_takes_nccls_model_and_says_so() -> None:
    diagnostics = Diagnostics()
    said = Collectives().predict(asked([1e6], ranks=64), device(fit()), diagnostics)
    assert said.duration_ns[0] > 0
    assert said.low_ns[0] < said.duration_ns[0] < said.high_ns[0]
    assert diagnostics.counts() == {"collectives.tuned": 1}


def test_what_nobody_covers_is_unknown() -> None:
    diagnostics = Diagnostics()
    said = Collectives().predict(asked([1e6], op="collective_broadcast"), device(), diagnostics)
    assert np.isnan(said.duration_ns).all()
    assert diagnostics.counts() == {"collectives.not-covered": 1}
    assert np.isnan(times(asked([1e6]), load_device("TPU-v4"))).all()


def test_unknown_sizes_stay_unknown() -> None:
    assert np.isnan(times(asked([np.nan]), device(fit()))).all()
    assert np.isnan(times(asked([1e6], ranks=np.nan), device(fit()))).all()


def test_other_operations_are_left_to_others() -> None:
    ones = np.ones(1)
    product = build.matmuls(Labels.constant("bf16", 1), batch=ones, m=ones, n=ones, k=ones)
    assert np.isnan(times(product, device(fit()))).all()


def graph(groups: GroupSet) -> OpGraph:
    b = GraphBuilder("one")
    node = b.add_node(
        name_row=0, op_row=b.strings.add("all-reduce"), op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE
    )
    b.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=b.group_set(groups), comm_bytes=1e6)
    return b.build()


def test_a_graph_shows_how_groups_lie_over_nodes() -> None:
    inside = Collectives().estimate(graph(StridedGroups.all_ranks(8)), device(fit()))
    across = Collectives().estimate(
        graph(ExplicitGroups((tuple(range(0, 16, 2)), tuple(range(1, 16, 2))))), device(fit())
    )
    assert inside.duration_ns[0] == pytest.approx(16000 + 0.004 * 1e6)
    assert across.duration_ns[0] == pytest.approx(60000 + 0.05 * 1e6)


def message(
    permutation: Permutation | None, kind: NodeKind = NodeKind.PERMUTE, *, host: bool = False
) -> OpGraph:
    b = GraphBuilder("one")
    name = b.strings.add("stablehlo.collective_permute" if kind is NodeKind.PERMUTE else "stablehlo.send")
    node = b.add_node(name_row=0, op_row=name, op_class=OpClass.P2P, kind=kind)
    row = -1 if permutation is None else b.permutation(permutation)
    b.add_p2p(node, permutation=row, comm_bytes=1e6, host=host)
    return b.build()


PERMUTES = device(
    replace(
        fit("permute"),
        parameters=tuple(
            FitParameter(name=name, value=value)
            for layout, line in {
                Layout(2, 1): Line(9e3, (), (0.003,)),
                Layout(2, 2): Line(3e4, (), (0.1,)),
            }.items()
            for name, value in named(layout, line)
        ),
    )
)
INSIDE, ACROSS = 9e3 + 0.003 * 1e6, 3e4 + 0.1 * 1e6


@pytest.mark.parametrize("kind", [NodeKind.PERMUTE, NodeKind.SEND, NodeKind.RECV])
@pytest.mark.parametrize(
    ("permutation", "expected"),
    [
        (Permutation(8, (8, 1), 1), INSIDE),
        (Permutation(16, (16, 1), 1), ACROSS),
        (Permutation(16, (8, 1), 1), INSIDE),
        (Permutation.from_pairs([(0, 9)], 16), ACROSS),
        (None, ACROSS),
    ],
)
def test_messages_take_the_fitted_time_of_two_ranks(
    permutation: Permutation | None, kind: NodeKind, expected: float
) -> None:
    said = Collectives().estimate(message(permutation, kind), PERMUTES)
    assert said.duration_ns[0] == pytest.approx(expected)
    assert said.low_ns[0] == pytest.approx(0.9 * expected)


def test_transfers_to_the_host_and_what_stays_where_it_is_are_no_messages_between_ranks() -> None:
    for graph in (message(None, host=True), message(Permutation.from_pairs([(0, 0), (1, 1)], 2))):
        assert np.isnan(Collectives().estimate(graph, PERMUTES).duration_ns[0])


def test_a_shipped_fit_of_messages_speaks_in_the_composite_and_the_roofline_elsewhere() -> None:
    graph = message(Permutation(8, (8, 1), 1))
    model = load_estimator("composite")
    fitted = model.estimate(graph, load_device("A100-SXM-80GB"))
    assert fitted.estimators[fitted.estimator[0]] == "collectives"
    # 15.5 us of start and 1 MB at 2.4 ps a byte: vidur's send_recv within a node.
    assert fitted.duration_ns[0] == pytest.approx(15_465 + 1e6 * 0.00243376, rel=1e-3)
    other = model.estimate(graph, load_device("MI300X"))
    assert other.estimators[other.estimator[0]] == "roofline"


def tuned(op: str, ranks: float, size: float, where: Device = H100, nodes: float = 1) -> tuple[float, str]:
    found = tuned_times(op, np.array([ranks]), np.array([nodes]), np.array([size]), where)
    number = int(found.algorithm[0])
    return float(found.duration_ns[0]), ALGORITHMS[number] if number >= 0 else ""


def test_small_messages_take_low_latency_and_large_ones_bandwidth() -> None:
    assert tuned("all_reduce", 8, 1024)[1].endswith(" LL")
    assert tuned("all_reduce", 8, 2.0**30)[1] == "NVLS"
    assert tuned("all_reduce", 8, 2.0**30, load_device("A100-SXM-80GB"))[1] == "ring Simple"
    assert tuned("all_gather", 8, 2.0**24)[1].startswith("ring")
    assert tuned("all_to_all", 8, 1024)[1] == "direct"


def test_a_small_all_reduce_is_the_sum_of_its_steps() -> None:
    # Ring LL: 6.6 us and 2 x 7 steps of 0.6 us; 512 bytes at 141 GB/s x 8 / 14 are nothing.
    assert tuned("all_reduce", 8, 512)[0] == pytest.approx(6600 + 14 * 600, rel=1e-3)


def test_larger_messages_never_take_less() -> None:
    sizes = np.exp2(np.arange(8, 32, 0.25, dtype=np.float64))
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for nodes in (1.0, 2.0, 4.0):
            count = np.full(len(sizes), 8.0)
            found = tuned_times(op, count * nodes, np.full(len(sizes), nodes), sizes, H100)
            assert (np.diff(found.duration_ns) >= 0).all()


def test_more_nodes_take_longer_and_pcie_has_no_ll128() -> None:
    assert tuned("all_reduce", 16, 2.0**24, nodes=2)[0] > tuned("all_reduce", 16, 2.0**24)[0]
    sizes = np.exp2(np.arange(8, 32, dtype=np.float64))
    ranks = np.full(len(sizes), 8.0)
    found = tuned_times("all_gather", ranks, np.ones(len(sizes)), sizes, load_device("L40S"))
    assert not (found.algorithm == ALGORITHMS.index("ring LL128")).any()


def test_nccl_runs_on_nothing_but_its_devices() -> None:
    assert tuned("all_reduce", 8, 1e6, load_device("MI300X"))[1] == ""
    assert tuned("barrier", 8, 1e6)[1] == ""


@pytest.mark.parametrize(
    ("name", "as_before"), [("B300-SXM", "B200-SXM"), ("T4", "V100-PCIe-16GB")], ids=["blackwell", "volta"]
)
def test_nccl_tunes_by_compute_capability(name: str, as_before: str) -> None:
    """A generation between two of NCCL's table runs as the one before it."""
    other = load_device(as_before)
    moved = replace(load_device(name), links=other.links)
    sizes = np.array([8192.0, 1e8])
    asked = (np.full(2, 8.0), np.ones(2), sizes)
    one, two = tuned_times("all_reduce", *asked, moved), tuned_times("all_reduce", *asked, other)
    assert np.isfinite(one.duration_ns).all()
    assert one.duration_ns.tolist() == two.duration_ns.tolist()
