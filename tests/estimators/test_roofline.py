"""The roofline: rates by operand type, fusions, unknowns, and the traps peers fall into."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import inf, isnan, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hespas import api
from hespas.estimators import Estimator, apply_estimate, load_estimator, registry
from hespas.estimators.interface import Prediction, predict_with
from hespas.estimators.registry import list_estimators
from hespas.estimators.roofline import BOUNDS, Roofline
from hespas.graph import (
    Diagnostics,
    Estimate,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    Resource,
    Workload,
    dtype,
    find_dtype,
    plugins,
)
from hespas.graph.errors import InvariantError, UnsupportedError, UsageError
from hespas.hardware import Device, Efficiency, load_device
from hespas.operations import Operations, operations_of

A100 = load_device("A100-SXM-40GB")
BF16_PEAK = 312e12
F32_VECTOR = 19.5e12
BANDWIDTH = A100.main_memory.bandwidth_bytes_per_s
LAUNCH = A100.launch_overhead_ns


def contraction(
    size: int, element: str = "bf16", result: str = "bf16", *, products: int = 1, batch: int = 1
) -> OpGraph:
    """``batch`` square products of one element type."""
    b = GraphBuilder("gemm")
    flops = 2.0 * batch * size**3
    left = b.types.add(dtype(element), (batch, size, size))
    out = b.types.add(dtype(result), (batch, size, size))
    node = b.add_node(
        name_id=0,
        op_id=b.strings.add("dot_general"),
        op_class=OpClass.CONTRACTION,
        operands=[left, left],
        results=[out],
        flops=flops,
        transcendentals=0,
        bytes_read=2 * b.types.bytes_of(left),
        bytes_written=b.types.bytes_of(out),
    )
    b.add_contraction(
        node, batch=batch, m=size, n=size, k=size, flops=flops, useful_flops=flops,
        lhs=dtype(element).code, rhs=dtype(element).code, accumulator=dtype(result).code, products=products,
    )  # fmt: skip
    return b.build()


def single(
    op_class: OpClass = OpClass.ELEMENTWISE,
    *,
    flops: float = 0,
    read: float = 0,
    transcendentals: float = 0,
    element: str = "f32",
    kind: NodeKind = NodeKind.COMPUTE,
    name: str = "",
) -> OpGraph:
    """A graph of one node."""
    b = GraphBuilder("one")
    name_id = b.strings.add(name) if name else 0
    node = b.add_node(
        name_id=name_id, op_id=b.strings.add("some_op"), op_class=op_class, kind=kind, flops=flops,
        transcendentals=transcendentals, bytes_read=read, bytes_written=0,
    )  # fmt: skip
    if element:
        b.set(node, rate_dtype=dtype(element).code)
    return b.build()


def time_of(
    graph: OpGraph, model: Roofline | None = None, device: Device = A100, found: Diagnostics | None = None
) -> float:
    return float((model or Roofline()).estimate(graph, device, found).duration_ns[0])


def bound_of(graph: OpGraph) -> str:
    return BOUNDS[int(Roofline().estimate(graph, A100).bound[0])]


def test_large_bf16_product_takes_its_time_at_the_matrix_rate() -> None:
    assert time_of(contraction(8192)) == pytest.approx(3_524e3 + LAUNCH, rel=1e-3)
    assert bound_of(contraction(8192)) == "compute"


def test_operand_type_sets_the_rate_not_the_accumulator() -> None:
    narrow, wide = time_of(contraction(8192)), time_of(contraction(8192, result="f32"))
    assert wide == pytest.approx(narrow)


def test_batch_is_not_lost() -> None:
    assert time_of(contraction(4096, batch=32)) - LAUNCH == pytest.approx(
        32 * (time_of(contraction(4096)) - LAUNCH)
    )


def test_emulated_products_multiply_the_time() -> None:
    tpu = load_device("TPU-v4")
    one = time_of(contraction(8192, "f32", "f32"), device=tpu) - tpu.launch_overhead_ns
    six = time_of(contraction(8192, "f32", "f32", products=6), device=tpu) - tpu.launch_overhead_ns
    assert six == pytest.approx(6 * one)


def test_slower_operand_decides_a_mixed_product() -> None:
    graph = contraction(8192)
    mixed = replace(graph.contractions, rhs=np.array([dtype("f32").code], np.int16))
    assert time_of(replace(graph, contractions=mixed)) > 1.9 * time_of(graph)


@pytest.mark.parametrize("rest", [1e9, 2.5 * 2.0 * 4096**3])
def test_fusion_splits_between_matrix_and_vector_units(rest: float) -> None:
    b = GraphBuilder("fusion")
    product = 2.0 * 4096**3
    node = b.add_node(
        name_id=0, op_id=0, op_class=OpClass.FUSION, flops=product + rest, transcendentals=1e8,
        bytes_read=0.0, bytes_written=8.0,
    )  # fmt: skip
    code = dtype("bf16").code
    b.set(node, rate_dtype=dtype("f32").code)
    b.add_contraction(
        node, batch=1, m=4096, n=4096, k=4096, flops=product, useful_flops=product, lhs=code, rhs=code,
        accumulator=dtype("f32").code,
    )  # fmt: skip
    expected = product / BF16_PEAK + (rest + 8 * 1e8) / F32_VECTOR
    assert time_of(b.build()) == pytest.approx(expected * 1e9 + LAUNCH)


def test_useful_flops_leave_out_padding_unless_told_otherwise() -> None:
    graph = contraction(8192)
    half = replace(graph.contractions, useful_flops=graph.contractions.flops / 2)
    graph = replace(graph, contractions=half, useful_flops=graph.flops / 2)
    spec = time_of(graph, Roofline(use_useful_flops=False)) - LAUNCH
    assert spec == pytest.approx(2 * (time_of(graph) - LAUNCH))


def test_contraction_without_a_row_uses_the_matrix_unit() -> None:
    flops = 2.0 * 8192**3
    graph = single(OpClass.CONTRACTION, flops=flops, read=1, element="bf16")
    assert time_of(graph) == pytest.approx(flops / BF16_PEAK * 1e9 + LAUNCH)


def test_memory_bound_elementwise() -> None:
    graph = single(flops=1e6, read=4e9)
    assert time_of(graph) == pytest.approx(4e9 / BANDWIDTH * 1e9 + LAUNCH)
    assert bound_of(graph) == "memory"


def test_tiny_kernel_is_bound_by_its_launch() -> None:
    assert time_of(single(flops=1, read=8)) == pytest.approx(LAUNCH, rel=1e-3)
    assert bound_of(single(flops=1, read=8)) == "overhead"


def test_element_type_falls_back_to_operands_then_to_the_option() -> None:
    b = GraphBuilder("typed")
    row = b.types.add(dtype("f32"), (1 << 20,))
    b.add_node(
        name_id=0, op_id=0, op_class=OpClass.ELEMENTWISE, operands=[row], flops=1e12, transcendentals=0,
        bytes_read=0, bytes_written=0,
    )  # fmt: skip
    expected = 1e12 / F32_VECTOR * 1e9 + LAUNCH
    assert time_of(b.build()) == pytest.approx(expected)
    bare = single(flops=1e12, element="")
    assert isnan(time_of(bare))
    assert time_of(bare, Roofline(default_dtype="f32")) == pytest.approx(expected)


@pytest.mark.parametrize("op_class", [OpClass.FREE, OpClass.CONTROL])
def test_structure_is_free_even_with_unknown_cost(op_class: OpClass) -> None:
    assert time_of(single(op_class, flops=nan, read=nan)) == 0
    assert bound_of(single(op_class)) == "free"


def test_structural_class_with_a_cost_is_not_free() -> None:
    assert time_of(single(OpClass.CONTROL, read=1e6)) > 0


def test_metadata_is_free() -> None:
    assert time_of(single(OpClass.UNKNOWN, kind=NodeKind.METADATA, flops=nan)) == 0


@pytest.mark.parametrize(
    ("flops", "read", "element", "code"),
    [
        (nan, nan, "f32", "roofline.unknown-cost"),
        (nan, 1e9, "f32", "roofline.unknown-flops"),
        (1e9, nan, "f32", "roofline.unknown-bytes"),
        (1e9, 1e9, "", "roofline.unknown-dtype"),
        (1e9, 1e9, "token", "roofline.no-rate"),
    ],
)
def test_unknown_is_nan_and_told(flops: float, read: float, element: str, code: str) -> None:
    found = Diagnostics()
    graph = single(OpClass.CUSTOM, flops=flops, read=read, element=element)
    estimate = Roofline().estimate(graph, A100, found)
    assert isnan(estimate.duration_ns[0])
    assert found.counts() == {code: 1}
    assert "some_op" in next(iter(found)).message
    assert (estimate.estimator[0], estimate.bound[0], estimate.coverage) == (-1, -1, 0.0)


def test_known_bytes_of_an_unknown_call_are_a_lower_bound() -> None:
    estimate = Roofline().estimate(single(OpClass.CUSTOM, flops=nan, read=1e9), A100)
    assert estimate.low_ns[0] == pytest.approx(1e9 / BANDWIDTH * 1e9 + LAUNCH)


def test_transcendentals_a_format_does_not_count_are_assumed_none_and_told() -> None:
    found = Diagnostics()
    graph = single(flops=1e12, transcendentals=nan)
    assert time_of(graph, found=found) == pytest.approx(1e12 / F32_VECTOR * 1e9 + LAUNCH)
    assert found.counts() == {"roofline.transcendentals-unknown": 1}


def test_host_work_is_not_the_devices() -> None:
    graph = single(flops=1e9, read=1e9)
    graph = replace(graph, resource=np.array([int(Resource.HOST)], np.uint8))
    found = Diagnostics()
    assert isnan(time_of(graph, found=found))
    assert found.counts() == {"roofline.host-node": 1}
    assert not isnan(time_of(graph, device=replace(A100, kind="cpu")))


def test_host_transfer_uses_the_host_link() -> None:
    link = A100.link("pcie")
    assert link is not None
    # Packets of the link have headers.
    expected = LAUNCH + link.latency_ns + 1e9 / (0.86 * link.bandwidth_bytes_per_s) * 1e9
    assert time_of(single(OpClass.HOST, read=1e9)) == pytest.approx(expected)


def test_host_transfer_over_nvlink_has_no_packets_of_pcie() -> None:
    device = load_device("GH200-96GB")
    link = device.link("pcie")
    assert link is not None
    times = [time_of(single(OpClass.HOST, read=size), device=device) for size in (1e9, 2e9)]
    assert times[1] - times[0] == pytest.approx(1e9 / link.bandwidth_bytes_per_s * 1e9, rel=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "Memcpy HtoD (Pageable -> Device)",
        "Memcpy DtoH (Device -> Pageable)",
        "CopyDeviceToHost (Device -> Host)",  # recorded with HIP
    ],
)
def test_a_copy_of_pageable_memory_is_limited_by_the_host(name: str) -> None:
    graph, pageable = single(OpClass.HOST, read=1e9), single(OpClass.HOST, read=1e9, name=name)
    assert time_of(pageable) == pytest.approx(LAUNCH + 1e9 / 11e9 * 1e9)
    slow = replace(A100, links=tuple(structs.replace(link, bandwidth_bytes_per_s=1e9) for link in A100.links))
    assert time_of(pageable, device=slow) == pytest.approx(time_of(graph, device=slow))


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("Memcpy HtoD (Host -> Device)", 35e9),
        ("Memcpy DtoH (Device -> Pageable)", 35e9),  # recorded with CUDA
        ("copy to host", 0.86 * 64e9),
        ("Pinned", 0.86 * 64e9),
    ],
)
def test_hip_copies_host_memory_that_it_pins(name: str, limit: float) -> None:
    mi300x = load_device("MI300X")
    times = [time_of(single(OpClass.HOST, read=size, name=name), device=mi300x) for size in (1e9, 2e9)]
    assert times[1] - times[0] == pytest.approx(1e9 / limit * 1e9, rel=1e-3)


def test_fitted_efficiency_and_overhead_replace_the_defaults() -> None:
    fit = Efficiency(
        op_class="contraction", dtype="bf16", compute=0.5, memory=0.8, t0_ns=5_000, provenance="test"
    )
    device = replace(A100, efficiencies=(fit,))
    ideal = time_of(contraction(8192)) - LAUNCH
    assert time_of(contraction(8192), device=device) == pytest.approx(2 * ideal + 5_000)
    other = single(flops=0, read=1e9)
    assert time_of(other, device=device) == pytest.approx(time_of(other))


def test_efficiency_options_apply_where_no_fit_does() -> None:
    ideal = time_of(single(read=1e9)) - LAUNCH
    assert time_of(single(read=1e9), Roofline(memory_efficiency=0.5)) - LAUNCH == pytest.approx(2 * ideal)


def test_sorts_may_pass_more_than_once_over_their_data() -> None:
    graph = single(OpClass.SORT, read=1e9)
    assert time_of(graph, Roofline(sort_passes=4)) - LAUNCH == pytest.approx(4 * (time_of(graph) - LAUNCH))


def test_infinite_costs_do_not_crash() -> None:
    assert time_of(single(flops=float("inf"), read=1)) == float("inf")


def test_inputs_are_not_changed() -> None:
    graph = contraction(64)
    before = (graph.flops.copy(), graph.bytes_read.copy(), graph.duration_ns.copy())
    Roofline().estimate(graph, A100)
    for old, new in zip(before, (graph.flops, graph.bytes_read, graph.duration_ns), strict=True):
        np.testing.assert_array_equal(old, new)


@given(
    flops=st.floats(0, 1e18) | st.just(nan),
    read=st.floats(0, 1e15) | st.just(nan),
    transcendentals=st.floats(0, 1e15),
    op_class=st.sampled_from(OpClass),
)
def test_only_costless_nodes_take_no_time(
    flops: float, read: float, transcendentals: float, op_class: OpClass
) -> None:
    time = time_of(single(op_class, flops=flops, read=read, transcendentals=transcendentals))
    costly = flops > 0 or read > 0 or transcendentals > 0
    assert not (costly and time == 0)
    assert isnan(time) or time >= 0


@given(st.sampled_from(["f32", "bf16", "f16", "f64", "i32", "i8"]), st.floats(1, 1e15), st.floats(1, 1e12))
def test_time_never_falls_when_work_grows(element: str, flops: float, read: float) -> None:
    time = time_of(single(flops=flops, read=read, element=element))
    assert time_of(single(flops=2 * flops, read=read, element=element)) >= time
    assert time_of(single(flops=flops, read=2 * read, element=element)) >= time


def test_many_nodes_agree_with_one_by_one() -> None:
    b = GraphBuilder("many")
    rng = np.random.default_rng(1)
    alone: list[float] = []
    for flops, read in rng.uniform(0, 1e10, (50, 2)).tolist():
        node = b.add_node(
            name_id=0, op_id=0, op_class=OpClass.ELEMENTWISE, flops=flops, transcendentals=0,
            bytes_read=read, bytes_written=0,
        )  # fmt: skip
        b.set(node, rate_dtype=dtype("f32").code)
        alone.append(time_of(single(flops=flops, read=read)))
    np.testing.assert_allclose(Roofline().estimate(b.build(), A100).duration_ns, alone)


@pytest.mark.parametrize(
    "options",
    [
        {"default_dtype": "nonsense"},
        {"algorithm": "star"},
        {"compute_efficiency": 0.0},
        {"memory_efficiency": -0.5},
        {"sort_passes": -1.0},
        {"transcendental_weight": -1.0},
    ],
)
def test_wrong_options_are_refused(options: dict[str, str | float]) -> None:
    with pytest.raises(UsageError):
        Roofline(**options)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_registry_loads_with_options() -> None:
    model = load_estimator("roofline:use_useful_flops=false,sort_passes=4,default_dtype=bf16,num_ranks=8")
    assert model == Roofline(use_useful_flops=False, sort_passes=4.0, default_dtype="bf16", num_ranks=8)
    assert isinstance(model, Estimator)


@pytest.mark.parametrize(
    "spelling",
    [
        "rooftop",
        "roofline:nope=1",
        "roofline:sort_passes",
        "roofline:sort_passes=x",
        "roofline:use_useful_flops=2",
    ],
)
def test_registry_refuses_what_it_does_not_know(spelling: str) -> None:
    with pytest.raises(UsageError):
        load_estimator(spelling)


def test_a_taken_name_leaves_the_estimator_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def registered(group: str) -> list[tuple[str, str]]:
        return [("roofline", "somebody.else:Model")] if group == registry.ENTRY_POINT_GROUP else []

    monkeypatch.setattr(plugins, "registered", registered)
    with plugins.collect_plugin_errors() as told:
        assert registry.estimator_names() == tuple(registry.BUILTIN)
    [sentence] = told.values()
    assert "hespas.estimators.roofline:Roofline, which is used, and by somebody.else:Model" in sentence


def needs_more(answer: int) -> int:
    return answer


@pytest.mark.parametrize("attribute", ["ABSENT", "__doc__", "needs_more", "half_known"])
def test_a_broken_plug_in_is_listed_and_fails_alone(attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def registered(group: str) -> list[tuple[str, str]]:
        return [("broken", f"{__name__}:{attribute}")] if group == registry.ENTRY_POINT_GROUP else []

    monkeypatch.setattr(plugins, "registered", registered)
    with plugins.collect_plugin_errors() as told:
        assert load_estimator("roofline") == Roofline()
        rows = {row.name: row for row in list_estimators()}
        assert set(rows) == {*registry.BUILTIN, "broken"}
        with pytest.raises(UnsupportedError, match=r"estimator 'broken' of another package .* does not work"):
            load_estimator("broken")
    assert len(told) == 1


class Nameless:
    """An estimator without a name."""

    estimate = Roofline.estimate


@pytest.mark.parametrize(
    ("attribute", "why"),
    [("Nameless", ": no 'name'$"), ("object", ": no 'name' and no 'estimate'$")],
)
def test_a_plug_in_is_told_what_it_lacks(attribute: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{'builtins' if attribute == 'object' else __name__}:{attribute}"

    def registered(group: str) -> list[tuple[str, str]]:
        return [("broken", target)] if group == registry.ENTRY_POINT_GROUP else []

    monkeypatch.setattr(plugins, "registered", registered)
    with pytest.raises(UnsupportedError) as caught:
        load_estimator("broken")
    assert re.search(why, caught.value.message)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("hespas.estimators.gone:Roofline", "ModuleNotFoundError: .*gone"),
        ("hespas.estimators.roofline:Gone", "AttributeError: .*Gone"),
        (f"{__name__}:__doc__", "cannot be called"),
        (f"{__name__}:Nameless", ": no 'name'"),
    ],
)
def test_a_broken_row_of_ours_is_our_bug(target: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN, "systolic", target)
    with pytest.raises(InvariantError, match=rf"estimator 'systolic' \({target}\) does not work: .*{why}"):
        load_estimator("systolic")


@dataclass(frozen=True)
class Elsewhere:
    """A plug-in whose times are the value of its option."""

    time_ns: float = 1.0

    @property
    def name(self) -> str:
        return "elsewhere"

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        said = Roofline().estimate(graph, device, diagnostics)
        return replace(said, duration_ns=np.full(len(graph), self.time_ns))


@pytest.mark.parametrize("time_ns", [-80.0, inf, -inf])
@pytest.mark.parametrize("spelling", ["elsewhere:time_ns={}", "composite:order=elsewhere:time_ns={}"])
def test_times_that_cannot_be_are_refused_from_a_plug_in(
    time_ns: float, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def registered(group: str) -> list[tuple[str, str]]:
        return [("elsewhere", f"{__name__}:Elsewhere")] if group == registry.ENTRY_POINT_GROUP else []

    monkeypatch.setattr(plugins, "registered", registered)
    job = Workload.spmd(contraction(64), 1)
    with pytest.raises(UnsupportedError, match=rf"'elsewhere' .*returns {time_ns:g} ns for node 0 \(dot_gen"):
        api.estimate(job, "L4", estimator=spelling.format(time_ns))
    for allowed in (0.0, 5.0, nan):
        api.estimate(job, "L4", estimator=spelling.format(allowed))


def test_operations_of_a_plug_in_are_looked_at_too() -> None:
    @dataclass(frozen=True)
    class Asked:
        name: str = "asked"

        def predict(
            self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None
        ) -> Prediction:
            return Prediction.of("asked", np.array([1.0, nan, -2.0])[: len(ops)])

    ops = operations_of(contraction(64)).take(np.zeros(3, np.int64))
    with pytest.raises(UnsupportedError, match=r"'asked' .*returns -2 ns for an operation of kind matmul"):
        predict_with(Asked(), ops, A100)
    assert len(predict_with(Asked(), ops.take(np.arange(2)), A100).duration_ns) == 2


def test_registry_loads_other_packages_estimators(monkeypatch: pytest.MonkeyPatch) -> None:
    def registered(group: str) -> list[tuple[str, str]]:
        return (
            [("mine", "hespas.estimators.roofline:Roofline")] if group == registry.ENTRY_POINT_GROUP else []
        )

    monkeypatch.setattr(plugins, "registered", registered)
    assert registry.estimator_names()[-1] == "mine"
    assert load_estimator("mine") == Roofline()


def half_known() -> tuple[OpGraph, Estimate]:
    b = GraphBuilder("half")
    for flops in (1e9, nan, nan):
        node = b.add_node(
            name_id=0, op_id=b.strings.add("known" if flops == flops else "mystery"), flops=flops,  # noqa: PLR0124
            op_class=OpClass.CUSTOM, transcendentals=0, bytes_read=8, bytes_written=8,
        )  # fmt: skip
        b.set(node, rate_dtype=dtype("f32").code)
    graph = b.build()
    return graph, Roofline().estimate(graph, A100)


def test_missing_error_lists_the_operations() -> None:
    graph, estimate = half_known()
    with pytest.raises(UnsupportedError, match=r"2 of 3 nodes.*mystery \(2"):
        apply_estimate(graph, estimate, "error")


def test_missing_warn_and_zero() -> None:
    graph, estimate = half_known()
    found = Diagnostics()
    warned = apply_estimate(graph, estimate, "warn", found)
    zeroed = apply_estimate(graph, estimate, "zero", found)
    assert np.isnan(warned.duration_ns).tolist() == [False, True, True]
    assert zeroed.duration_ns[1:].tolist() == [0, 0]
    assert found.counts() == {"estimate.missing": 2, "estimate.missing-as-zero": 2}
    assert np.isnan(graph.duration_ns).all()


def test_durations_a_graph_came_with_are_kept_where_nobody_knows_better() -> None:
    graph, estimate = half_known()
    graph = replace(graph, duration_ns=np.array([7.0, 8.0, 9.0]))
    done = apply_estimate(graph, estimate, "error")
    assert done.duration_ns[1:].tolist() == [8.0, 9.0]
    assert done.duration_ns[0] == estimate.duration_ns[0]


def test_nodes_that_never_run_are_not_missing() -> None:
    graph, estimate = half_known()
    graph = replace(graph, executions=np.array([1.0, 0.0, 0.0]))
    assert np.isnan(apply_estimate(graph, estimate, "error").duration_ns[1])


def test_unknown_policy_is_refused() -> None:
    graph, estimate = half_known()
    with pytest.raises(UsageError):
        apply_estimate(graph, estimate, "ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_every_shipped_device_estimates_a_bf16_product() -> None:
    from hespas.hardware import device_names

    assert find_dtype("bf16") is not None
    for name in device_names():
        assert time_of(contraction(1024), device=load_device(name)) > 0
