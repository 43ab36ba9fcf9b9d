"""Alpha-beta times of collectives and messages against sums written by hand."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, isnan, log2, nan

import pytest
from msgspec import structs

from hespas.estimators.roofline import BOUNDS, Roofline
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
from hespas.hardware import Device, Link, host_payload, load_device

H100 = load_device("H100-SXM")
PAYLOAD = 64e6


def link_of(device: Device, kind: str) -> Link:
    return next(link for link in device.links if link.kind == kind)


def collective(kind: CollectiveKind, groups: GroupSet | None, payload: float = PAYLOAD) -> OpGraph:
    b = GraphBuilder("collective")
    node = b.add_node(
        name_id=0, op_id=b.strings.add("all_reduce"), op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE
    )
    row = -1 if groups is None else b.group_set(groups)
    b.add_collective(node, kind, group_set=row, comm_bytes=payload)
    return b.build()


def message(
    permutation: Permutation | None,
    payload: float = PAYLOAD,
    *,
    host: bool = False,
    kind: NodeKind = NodeKind.SEND,
) -> OpGraph:
    b = GraphBuilder("message")
    node = b.add_node(name_id=0, op_id=b.strings.add("send"), op_class=OpClass.P2P, kind=kind)
    row = -1 if permutation is None else b.permutation(permutation)
    b.add_p2p(node, permutation=row, comm_bytes=payload, host=host)
    return b.build()


def net(graph: OpGraph, device: Device = H100, model: Roofline | None = None) -> float:
    """Time without launch."""
    return float((model or Roofline()).estimate(graph, device).duration_ns[0]) - device.launch_overhead_ns


SENT = {
    CollectiveKind.ALL_REDUCE: 2 * 7 / 8,
    CollectiveKind.ALL_GATHER: 7,
    CollectiveKind.REDUCE_SCATTER: 7 / 8,
    CollectiveKind.REDUCE_SCATTER_BLOCK: 7 / 8,
    CollectiveKind.ALL_TO_ALL: 7 / 8,
    CollectiveKind.RAGGED_ALL_TO_ALL: 7 / 8,
    CollectiveKind.BROADCAST: 1,
    CollectiveKind.REDUCE: 1,
    CollectiveKind.GATHER: 7,
    CollectiveKind.SCATTER: 7 / 8,
    CollectiveKind.BARRIER: 0,
}


@pytest.mark.parametrize("kind", list(SENT))
def test_sent_bytes_of_each_kind_inside_the_domain(kind: CollectiveKind) -> None:
    link = link_of(H100, "scale_up")
    time = net(collective(kind, StridedGroups.all_ranks(8)))
    no_latency = time - net(collective(kind, StridedGroups.all_ranks(8), payload=0))
    assert no_latency == pytest.approx(SENT[kind] * PAYLOAD / link.bandwidth_bytes_per_s * 1e9)


@pytest.mark.parametrize(
    ("kind", "tree", "ring"),
    [
        (CollectiveKind.ALL_REDUCE, 6, 14),
        (CollectiveKind.ALL_GATHER, 3, 7),
        (CollectiveKind.ALL_TO_ALL, 1, 7),
        (CollectiveKind.BARRIER, 3, 7),
    ],
)
def test_latencies_of_the_two_algorithms(kind: CollectiveKind, tree: int, ring: int) -> None:
    link = link_of(H100, "scale_up")
    graph = collective(kind, StridedGroups.all_ranks(8), payload=0)
    assert net(graph) == pytest.approx(tree * link.latency_ns)
    assert net(graph, model=Roofline(algorithm="ring")) == pytest.approx(ring * link.latency_ns)


def test_torus_counts_hops() -> None:
    tpu = load_device("TPU-v4")
    graph = collective(CollectiveKind.ALL_GATHER, StridedGroups.all_ranks(16), payload=0)
    assert net(graph, tpu) == pytest.approx(15 * link_of(tpu, "scale_up").latency_ns)


@pytest.mark.parametrize(
    ("groups", "kind"),
    [
        (StridedGroups.all_ranks(8), "scale_up"),
        (StridedGroups.all_ranks(16), "scale_out"),
        (StridedGroups.from_mesh((2, 8), (1,)), "scale_up"),
        (StridedGroups.from_mesh((2, 8), (0,)), "scale_out"),
        (StridedGroups.from_mesh((4, 2, 4), (2,)), "scale_up"),
        (StridedGroups(((2, 4),), ((4, 1),), base=6), "scale_out"),
        (ExplicitGroups.from_rows([[0, 3, 7], [8, 9, 10]]), "scale_up"),
        (ExplicitGroups.from_rows([[0, 3, 7], [7, 8, 10]]), "scale_out"),
    ],
)
def test_link_is_scale_up_only_where_every_group_fits_the_domain(groups: GroupSet, kind: str) -> None:
    link = link_of(H100, kind)
    members = groups.max_group_size
    expected = (
        ceil(log2(members)) * link.latency_ns + (members - 1) * PAYLOAD / link.bandwidth_bytes_per_s * 1e9
    )
    assert net(collective(CollectiveKind.ALL_GATHER, groups)) == pytest.approx(expected)


def test_group_of_one_is_a_copy_and_never_free() -> None:
    graph = collective(CollectiveKind.ALL_REDUCE, ExplicitGroups.from_rows([[0], [1]]))
    estimate = Roofline().estimate(graph, H100)
    expected = 2 * PAYLOAD / H100.main_memory.bandwidth_bytes_per_s * 1e9 + H100.launch_overhead_ns
    assert estimate.duration_ns[0] == pytest.approx(expected)
    assert BOUNDS[int(estimate.bound[0])] == "memory"
    half = Roofline(memory_efficiency=0.5)
    assert net(graph, model=half) == pytest.approx(2 * net(graph))


@pytest.mark.parametrize(
    ("graph", "code"),
    [
        (collective(CollectiveKind.ALL_REDUCE, None), "roofline.unknown-group"),
        (collective(CollectiveKind.UNKNOWN, StridedGroups.all_ranks(4)), "roofline.unknown-message"),
        (collective(CollectiveKind.ALL_REDUCE, StridedGroups.all_ranks(4), nan), "roofline.unknown-message"),
        (message(Permutation.from_pairs([(0, 1)], 2), nan), "roofline.unknown-message"),
    ],
)
def test_unknowns_stay_unknown_and_are_told(graph: OpGraph, code: str) -> None:
    found = Diagnostics()
    estimate = Roofline().estimate(graph, H100, found)
    assert isnan(estimate.duration_ns[0])
    assert found.counts() == {code: 1}


def test_collective_node_without_a_row_is_unknown() -> None:
    b = GraphBuilder("bare")
    b.add_node(
        name_id=0, op_id=0, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE, flops=0, bytes_read=8
    )
    found = Diagnostics()
    assert isnan(Roofline().estimate(b.build(), H100, found).duration_ns[0])
    assert found.counts() == {"roofline.unknown-message": 1}


def test_number_of_ranks_may_be_stated() -> None:
    stated = net(collective(CollectiveKind.ALL_REDUCE, StridedGroups.all_ranks(8)))
    assert net(collective(CollectiveKind.ALL_REDUCE, None), model=Roofline(num_ranks=8)) == pytest.approx(
        stated
    )


def test_device_without_a_way_out_of_its_domain() -> None:
    alone = replace(H100, links=tuple(link for link in H100.links if link.kind == "scale_up"))
    found = Diagnostics()
    graph = collective(CollectiveKind.ALL_REDUCE, StridedGroups.all_ranks(16))
    assert isnan(Roofline().estimate(graph, alone, found).duration_ns[0])
    assert found.counts() == {"roofline.no-link": 1}


def test_card_without_links_talks_over_the_host_link() -> None:
    card = load_device("L4")
    link = link_of(card, "pcie")
    graph = collective(CollectiveKind.BROADCAST, StridedGroups.all_ranks(2))
    expected = link.latency_ns + PAYLOAD / link.bandwidth_bytes_per_s * 1e9
    assert net(graph, card) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("permutation", "kind"),
    [
        (Permutation(8, (8, 1), 1), "scale_up"),
        (Permutation(16, (16, 1), 1), "scale_out"),
        (Permutation(16, (8, 1), 1), "scale_up"),
        (Permutation.from_pairs([(0, 9)], 16), "scale_out"),
        (None, "scale_out"),
    ],
)
@pytest.mark.parametrize("kind_of_node", [NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE])
def test_message_is_one_latency_and_its_bytes(
    permutation: Permutation | None, kind: str, kind_of_node: NodeKind
) -> None:
    link = link_of(H100, kind)
    expected = link.latency_ns + PAYLOAD / link.bandwidth_bytes_per_s * 1e9
    assert net(message(permutation, kind=kind_of_node)) == pytest.approx(expected)


def test_message_on_a_torus_uses_one_link() -> None:
    tpu = load_device("TPU-v4")
    link = link_of(tpu, "scale_up")
    expected = link.latency_ns + PAYLOAD / link.link_bandwidth_bytes_per_s * 1e9
    assert net(message(Permutation(8, (8, 1), 1)), tpu) == pytest.approx(expected)


def test_host_message_uses_the_host_link() -> None:
    link = link_of(H100, "pcie")
    expected = link.latency_ns + PAYLOAD / (0.86 * link.bandwidth_bytes_per_s) * 1e9  # packets have headers
    assert net(message(None, host=True)) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["NVLink-C2C", "PCIe 6 x16", "PCIe 6 x4", "link"])
def test_headers_of_packets_are_those_of_pcie_3_to_5(name: str) -> None:
    assert host_payload(structs.replace(link_of(H100, "pcie"), name=name)) == 1.0
    links = tuple(structs.replace(link, name=name) if link.kind == "pcie" else link for link in H100.links)
    device = replace(H100, links=links)
    link = link_of(device, "pcie")
    expected = link.latency_ns + PAYLOAD / link.bandwidth_bytes_per_s * 1e9
    assert net(message(None, host=True), device) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["PCIe 3 x16", "PCIe 4 x16", "PCIe 5 x8", "PCIe Gen5 x16", "PCIe 4.0"])
def test_pcie_has_headers_in_any_spelling(name: str) -> None:
    assert host_payload(structs.replace(link_of(H100, "pcie"), name=name)) == 0.86


def test_permutation_that_moves_nothing_is_a_copy() -> None:
    graph = message(Permutation.from_pairs([(0, 0), (1, 1)], 2), kind=NodeKind.PERMUTE)
    expected = 2 * PAYLOAD / H100.main_memory.bandwidth_bytes_per_s * 1e9
    assert net(graph) == pytest.approx(expected)
