"""Collectives by fitted lines, and beyond them by NCCL's own model."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from hespas.estimators import load_estimator
from hespas.estimators.collective_lines import CollectiveLine, lines_of, named
from hespas.estimators.collective_links import ALGORITHMS, RankLayout, roof_ns, tuned_times
from hespas.estimators.collectives import MEASURED, RELATIONS, Collectives, reference_devices_of
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
from hespas.graph.columns import FloatArray
from hespas.hardware import (
    Device,
    Fit,
    FitBand,
    FitError,
    FitParameter,
    FitRange,
    Link,
    device_names,
    load_device,
)
from hespas.hardware.device_fits import SEGMENTS, devices_with_fits, fits_to_toml, read_fits, shipped_fits
from hespas.operations import Labels, Operations, build

H100 = load_device("H100-SXM")
LINES = {
    RankLayout(2, 1): CollectiveLine(5000.0, (65536.0,), (0.01, 0.002)),
    RankLayout(8, 1): CollectiveLine(16000.0, (), (0.004,)),
    RankLayout(8, 2): CollectiveLine(60000.0, (), (0.01,)),
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
    line = CollectiveLine(10.0, (100.0, 1000.0), (1.0, 0.5, 0.1))
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
    two, eight = (float(LINES[RankLayout(ranks, 1)].time_ns(np.array([2.0**20]))[0]) for ranks in (2, 8))
    # Half way by ranks, ln 1.5 / ln 1.75 of it by what is sent: the nearer to that the more bytes there are.
    assert (two * eight) ** 0.5 < four < two ** (1 - 0.7246) * eight**0.7246


def test_more_ranks_start_later_and_send_more() -> None:
    (sixteen,) = times(asked([2.0**20], ranks=16, per_node=16), device(fit()))
    line = LINES[RankLayout(8, 1)]
    least, whole = line.time_ns(np.array([1024.0, 2.0**20])).tolist()
    few = float(LINES[RankLayout(2, 1)].time_ns(np.array([1024.0]))[0])
    grown = (least / few - 1) / 2
    moved = (whole - least) * (15 / 16) / (7 / 8)
    # Sixteen do not fit into the node's NVLink: their bytes take the host's link.
    assert sixteen == pytest.approx(least * (1 + 3 * grown) / (1 + 2 * grown) + moved * 450 / 64)
    large = replace(device(fit()), links=tuple(replace_domain(link) for link in H100.links))
    (within,) = times(asked([2.0**20], ranks=16, per_node=16), large)
    assert within == pytest.approx(least * (1 + 3 * grown) / (1 + 2 * grown) + moved)


def replace_domain(link: Link) -> Link:
    return structs.replace(link, devices_per_domain=72) if link.kind == "scale_up" else link


def test_more_ranks_on_as_many_nodes_are_carried_from_fewer() -> None:
    diagnostics = Diagnostics()
    where = device(fit())
    said = Collectives().predict(asked([2.0**24], ranks=16, per_node=8), where, diagnostics)
    assert diagnostics.counts() == {"collectives.carried": 1}
    (eight,) = times(asked([2.0**24], per_node=4), where)
    # The start grows, and twice as many interfaces of a node share the bytes.
    assert 0.5 * eight < said.duration_ns[0] < eight
    own = Collectives().predict(asked([2.0**24], per_node=4), where)
    assert said.high_ns[0] / said.low_ns[0] > own.high_ns[0] / own.low_ns[0]


def test_nodes_are_their_own_class() -> None:
    (spread,) = times(asked([1e6], per_node=4), device(fit()))
    (together,) = times(asked([1e6], per_node=8), device(fit()))
    assert spread == pytest.approx(60000 + 0.01 * 1e6)
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
    slower = tuple(
        replace(each, value=3 * each.value) for each in fit().parameters if "knee" not in each.name
    )
    kept = tuple(each for each in slower if not each.name.startswith("r2_"))
    other = replace(fit(variant="oneccl 7", default=False), parameters=kept)
    where = device(fit(), other)
    model = load_estimator("collectives:library=oneccl")
    assert isinstance(model, Collectives)
    assert times(asked([1e6]), where, model)[0] == pytest.approx(3 * times(asked([1e6]), where)[0])


def test_a_fit_without_bands_has_an_interval_all_the_same() -> None:
    said = Collectives().predict(asked([1e6]), device(replace(fit(), bands=())))
    assert 0 < said.low_ns[0] < said.duration_ns[0] < said.high_ns[0]


def test_what_no_fit_covers_takes_nccls_model_and_says_so() -> None:
    diagnostics = Diagnostics()
    inside = replace(fit(), parameters=tuple(each for each in fit().parameters if "_n1_" in each.name))
    said = Collectives().predict(asked([1e6], ranks=64), device(inside), diagnostics)
    assert said.duration_ns[0] > 0
    assert said.low_ns[0] < said.duration_ns[0] < said.high_ns[0]
    assert diagnostics.counts() == {"collectives.tuned": 1}


def test_what_nobody_covers_is_unknown() -> None:
    diagnostics = Diagnostics()
    said = Collectives().predict(asked([1e6], op="collective_broadcast"), device(), diagnostics)
    assert np.isnan(said.duration_ns).all()
    assert diagnostics.counts() == {"collectives.not-covered": 1}
    assert np.isnan(times(asked([1e6]), replace(device(), links=()))).all()


def test_links_of_a_data_sheet_answer_where_nothing_else_does() -> None:
    diagnostics = Diagnostics()
    said = Collectives().predict(asked([1e6]), load_device("TPU-v4"), diagnostics)
    assert diagnostics.counts() == {"collectives.data-sheet": 1}
    assert said.low_ns[0] < said.duration_ns[0] < said.high_ns[0]


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
        name_id=0, op_id=b.strings.add("all-reduce"), op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE
    )
    b.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=b.group_set(groups), comm_bytes=1e6)
    return b.build()


def test_a_graph_shows_how_groups_lie_over_nodes() -> None:
    inside = Collectives().estimate(graph(StridedGroups.all_ranks(8)), device(fit()))
    across = Collectives().estimate(
        graph(ExplicitGroups((tuple(range(0, 16, 2)), tuple(range(1, 16, 2))))), device(fit())
    )
    assert inside.duration_ns[0] == pytest.approx(16000 + 0.004 * 1e6)
    assert across.duration_ns[0] == pytest.approx(60000 + 0.01 * 1e6)


def message(
    permutation: Permutation | None, kind: NodeKind = NodeKind.PERMUTE, *, host: bool = False
) -> OpGraph:
    b = GraphBuilder("one")
    name = b.strings.add("stablehlo.collective_permute" if kind is NodeKind.PERMUTE else "stablehlo.send")
    node = b.add_node(name_id=0, op_id=name, op_class=OpClass.P2P, kind=kind)
    row = -1 if permutation is None else b.permutation(permutation)
    b.add_p2p(node, permutation=row, comm_bytes=1e6, host=host)
    return b.build()


PERMUTES = device(
    replace(
        fit("permute"),
        parameters=tuple(
            FitParameter(name=name, value=value)
            for layout, line in {
                RankLayout(2, 1): CollectiveLine(9e3, (), (0.003,)),
                RankLayout(2, 2): CollectiveLine(3e4, (), (0.03,)),
            }.items()
            for name, value in named(layout, line)
        ),
    )
)
INSIDE, ACROSS = 9e3 + 0.003 * 1e6, 3e4 + 0.03 * 1e6


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
    other = model.estimate(graph, load_device("TPU-v4"))
    assert other.estimators[other.estimator[0]] == "roofline"


# Devices that were never measured.


def test_the_measured_devices_are_those_with_lines() -> None:
    found = {
        name
        for name in devices_with_fits()
        for fit in shipped_fits(name)
        if (fit.kind, fit.form) == ("collective", SEGMENTS)
    }
    assert found == set(MEASURED)


@pytest.mark.parametrize(
    ("name", "kinship", "nearest"),
    [
        ("B300-SXM", "sibling", "B200-SXM"),
        ("A100-SXM-40GB", "sibling", "A100-SXM-80GB"),
        ("V100-SXM2-16GB", "family", "A100-SXM-80GB"),
        ("MI300X", "link data", "H100-SXM"),
        ("RTX-PRO-6000-Server", "family", "L40S"),
    ],
)
def test_kin_by_vendor_links_and_generation(name: str, kinship: str, nearest: str) -> None:
    assert dict(reference_devices_of(load_device(name), RankLayout(8, 1)))[nearest] == kinship


def test_a_sibling_answers_as_the_measured_device_on_links_alike() -> None:
    ops = asked([2.0**14, 2.0**20, 2.0**28])
    one = Collectives().predict(ops, load_device("B200-SXM"))
    other = Collectives().predict(ops, load_device("B300-SXM"))
    assert other.duration_ns.tolist() == pytest.approx(one.duration_ns.tolist())
    assert (other.low_ns <= one.duration_ns).all()
    assert (one.duration_ns <= other.high_ns).all()


def test_links_of_half_the_bandwidth_move_half_as_much() -> None:
    whole = load_device("B300-SXM")
    slow = tuple(
        structs.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 2) for link in whole.links
    )
    ops = asked([512.0, 2.0**30])
    one, other = (times(ops, where) for where in (whole, replace(whole, links=slow)))
    assert other[1] / one[1] > 1.5  # NCCL's model speaks, too: it is a family now
    assert other[0] / one[0] < 1.5


def test_intervals_are_the_wider_the_further_the_kin() -> None:
    ops, widths = asked([2.0**20]), list[float]()
    for tier in RELATIONS:
        where = replace(load_device("A100-SXM-40GB"), name="mine")
        if tier == "family":
            where = replace(where, family="Other")
        if tier == "link data":
            where = replace(where, vendor="Else")
        diagnostics = Diagnostics()
        said = Collectives(reference_devices=("A100-SXM-80GB",)).predict(ops, where, diagnostics)
        assert [tier in finding.message for finding in diagnostics] == [True]
        widths.append(float(said.high_ns[0] / said.low_ns[0]))
    assert widths == sorted(widths)
    assert len(set(widths)) == len(RELATIONS)


def test_shipped_lines_carry_over_to_sixteen_ranks() -> None:
    """L40S without a switch: NCCL's model and the data sheet were 6 to 10 times too fast."""
    size, l40s = [2.0**26], load_device("L40S")
    (eight,), (sixteen,) = (times(asked(size, ranks=ranks, per_node=ranks), l40s) for ranks in (8, 16))
    assert eight < sixteen < 1.2 * eight


@pytest.mark.parametrize(("op", "ranks"), [("all_reduce", 8), ("permute", 2)])
def test_a_table_of_a_slower_network_answers_only_where_it_is_named(op: str, ranks: int) -> None:
    """Nodes of A100 on a cluster with a sixth of the network that the device states."""
    ops = asked([2.0**26], ranks=ranks, op=op, scheme="f16", per_node=ranks // 2)
    named = asked([2.0**26], ranks=ranks, op=op, scheme="f16", per_node=ranks // 2, variant="a100_dgx")
    where, diagnostics = load_device("A100-SXM-80GB"), Diagnostics()
    (usual,) = Collectives().predict(ops, where, diagnostics).duration_ns.tolist()
    (recorded,) = times(named, where)
    assert usual < 0.5 * recorded
    assert "collectives.fitted" not in diagnostics.counts()


def test_a_table_that_agrees_with_the_links_answers() -> None:
    diagnostics = Diagnostics()
    Collectives().predict(asked([2.0**24], per_node=4), device(fit()), diagnostics)
    assert diagnostics.counts() == {"collectives.fitted": 1}


def test_parts_of_an_all_reduce_that_disagree_meet_half_way() -> None:
    """An all-reduce of 4 ns a byte, where its parts take 1 ns each, was beyond 1.1 times both."""
    where = device(
        *(
            replace(
                fit(op),
                parameters=tuple(
                    FitParameter(name=name, value=value)
                    for name, value in named(RankLayout(8, 1), CollectiveLine(1.0, (), (rate * share,)))
                ),
            )
            for op, rate, share in (
                ("all_reduce", 4.0, 1.0),
                ("reduce_scatter", 1.0, 1.0),
                ("all_gather", 1.0, 8.0),
            )
        )
    )
    size = 2.0**26
    reduced, scatter, gather = (
        times(asked([size / (8 if op == "all_gather" else 1)], op=op), where)[0]
        for op in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert reduced == pytest.approx(1.1 * (scatter + gather))
    assert reduced / scatter == pytest.approx(2.2)
    assert reduced * scatter == pytest.approx(4.0 * size * size)


# What holds whatever was fitted.


@pytest.mark.parametrize(
    ("name", "op", "layout", "expected"),
    [
        ("H100-SXM", "all_reduce", RankLayout(8, 1), 1 / 450),
        ("A100-SXM-80GB", "all_reduce", RankLayout(8, 1), 2 * 7 / 8 / 300),
        ("H100-SXM", "all_gather", RankLayout(8, 1), 7 / 450),
        # Of a node of 8 each interface brings an eighth.
        ("H100-SXM", "all_reduce", RankLayout(16, 2), 1 / 8 / 50),
        ("H100-SXM", "all_to_all", RankLayout(16, 2), 1 / 2 / 50),
        ("L40S", "reduce_scatter", RankLayout(4, 1), 3 / 4 / 32),
        ("H100-SXM", "permute", RankLayout(2, 2), 1 / 50),
    ],
)
def test_roofs_are_of_what_must_be_sent(name: str, op: str, layout: RankLayout, expected: float) -> None:
    (found,) = roof_ns(op, layout, np.array([1e9]), load_device(name)).tolist()
    assert found == pytest.approx(expected * 1e9)


OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def at_random(where: Device, count: int) -> tuple[Operations, FloatArray]:
    generator = np.random.default_rng(len(where.name))
    link = where.link("scale_up")
    most = 8 if link is None else min(max(link.devices_per_domain, 2), 16)
    per_node = generator.integers(1, most + 1, count).astype(np.float64)
    nodes = np.where(generator.random(count) < 0.6, 1.0, 2.0 ** generator.integers(1, 4, count))
    nodes = np.where(per_node == 1, np.maximum(nodes, 2.0), nodes)
    ops = build.collectives(
        Labels.constant("bf16", count),
        op=Labels.choice(OPS, generator.integers(0, len(OPS), count)),
        ranks=per_node * nodes,
        message_bytes=2.0 ** generator.uniform(8, 34, count),
        ranks_per_node=per_node,
    )
    return ops, nodes


def changed(ops: Operations, **factors: float) -> Operations:
    dims = {name: column * factors.get(name, 1.0) for name, column in ops.dims.items()}
    return replace(ops, dims=dims)


NEVER_MEASURED = ("B300-SXM", "GB200", "MI300X", "T4", "TPU-v5p", "V100-SXM2-16GB")


@pytest.mark.parametrize("name", [*MEASURED, *NEVER_MEASURED])
def test_no_time_beats_its_roof_or_falls_with_bytes_and_nodes_or_jumps(name: str) -> None:
    holds_at_random(load_device(name), 100)


@pytest.mark.parametrize("name", device_names())
def test_nor_do_a_hundred_thousand_on_all_devices(name: str) -> None:
    holds_at_random(load_device(name), 2000)


def holds_at_random(where: Device, count: int) -> None:
    ops, nodes = at_random(where, count)
    said = Collectives().predict(ops, where)
    known = np.isfinite(said.duration_ns)
    assert known[nodes == 1].all()
    size, ranks = ops.dim("message_bytes"), ops.dim("ranks")
    layouts = [RankLayout(int(number), int(several)) for number, several in zip(ranks, nodes, strict=True)]
    roofs = [roof_ns(ops.op[row], layouts[row], size[row : row + 1], where)[0] for row in range(len(ops))]
    assert (said.duration_ns[known] >= np.array(roofs)[known] * (1 - 1e-9)).all()
    assert (said.low_ns[known] <= said.duration_ns[known]).all()
    assert (said.duration_ns[known] <= said.high_ns[known]).all()
    for factor, most in ((2.0, np.inf), (1.001, 1.005)):
        other = Collectives().predict(changed(ops, message_bytes=factor), where).duration_ns
        # Between two fits of 10 us a time may fall by a few thousandths of a nanosecond.
        assert (other[known] >= said.duration_ns[known] * (1 - 1e-6)).all()
        assert (other[known] <= said.duration_ns[known] * most).all()
    several = known & (nodes > 1)
    other = Collectives().predict(changed(ops, ranks=2.0), where).duration_ns
    # Four ranks on two nodes of A100 were slower than eight: what is carried from between is not monotone.
    assert (other[several] < 0.95 * said.duration_ns[several]).sum() <= 0.002 * count
    one = known & (nodes == 1)
    other = Collectives().predict(changed(ops, ranks=2.0, ranks_per_node=2.0), where).duration_ns
    assert (other[one] < 0.95 * said.duration_ns[one]).sum() <= 0.002 * count


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


def test_a_large_all_to_all_reaches_four_fifths_of_each_interface() -> None:
    # Of 32 ranks on 4 nodes, 24 are on other nodes. Each rank has an interface of 50 GB/s.
    size = 2.0**30
    expected_ns = size * 24 / 32 / (0.8 * 50)
    assert tuned("all_to_all", 32, size, nodes=4)[0] == pytest.approx(expected_ns, rel=0.01)


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
