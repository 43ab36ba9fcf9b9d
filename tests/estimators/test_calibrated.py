"""Calibrated estimator: choice of the fit, errors, intervals, quantised operands, graphs."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from hespas.estimators import load_estimator
from hespas.estimators.calibrated import Calibrated
from hespas.estimators.rates import peak_times
from hespas.graph import Diagnostics, GraphBuilder, OpClass, OpGraph, dtype
from hespas.hardware import ANY, Device, Fit, FitBand, FitError, FitParameter, FitRange, load_device
from hespas.operations import Labels, Operations, build

BARE = replace(load_device("H100-SXM"), fits_of="", own_fits=(), vendor="Nobody")
"""Of a vendor whose kernels nobody recorded."""


def a_fit(kind: str, scheme: str, variant: str = "lib", *, op: str = "", t0_ns: float = 1e6) -> Fit:
    """A fit whose start outweighs all else, so that its time tells who spoke."""
    form = {"matmul": "tiles", ANY: "roofline"}.get(kind, "streams")
    return Fit(
        kind=kind,
        op=op,
        scheme=scheme,
        variant=variant,
        form=form,
        parameters=(
            FitParameter(name="t0_ns", value=t0_ns),
            *(FitParameter(name=name, value=value) for name, value in _rest(form).items()),
        ),
        support=(FitRange(name="m", low=1, high=1024),) if kind == "matmul" else (),
        samples=100,
        error=FitError(n=10, mape=0.1, median_ape=0.1, p90_ape=0.2, bias=0.0),
        bands=(FitBand(up_to_ns=2e6, low=0.5, high=2.0), FitBand(up_to_ns=inf, low=0.9, high=1.1)),
        table="t",
        provenance="p",
        fitted="2026-01-31",
        seed=0,
    )


def _rest(form: str) -> dict[str, float]:
    from hespas.estimators.forms import FORMS

    return {each.name: each.start for each in FORMS[form].parameters if each.name != "t0_ns"}


def on(*fits: Fit) -> Device:
    return replace(BARE, own_fits=fits)


def matmuls(scheme: str, m: float = 8, variant: str = "", count: int = 1) -> Operations:
    one = np.ones(count)
    return build.matmuls(
        Labels.constant(scheme, count),
        batch=one,
        m=one * m,
        n=one * 64,
        k=one * 64,
        variant=Labels.constant(variant, count),
    )


def vectors(kind: str, op: str, scheme: str) -> Operations:
    return build.elementwise(
        kind,
        Labels.constant(scheme, 1),
        op=Labels.constant(op, 1),
        rows=np.array([8.0]),
        columns=np.array([8.0]),
        passes=np.array([2.0]),
        flops_per_element=np.ones(1),
    )


def said(ops: Operations, device: Device, **options: bool) -> tuple[float, dict[str, int]]:
    """Time in ms (the fits' starts are whole ms, the rest far less) and findings."""
    diagnostics = Diagnostics()
    prediction = Calibrated(**options).predict(ops, device, diagnostics)
    return round(float(prediction.duration_ns[0]) / 1e6, 1), diagnostics.counts()


def test_a_variant_is_given_its_own_fit_and_no_other() -> None:
    device = on(a_fit("matmul", "bf16", "one", t0_ns=1e6), a_fit("matmul", "bf16", "two", t0_ns=2e6))
    assert said(matmuls("bf16", variant="one"), device) == (1.0, {})
    assert said(matmuls("bf16", variant="two"), device) == (2.0, {})
    time, findings = said(matmuls("bf16", variant="three"), device)
    assert np.isnan(time)
    assert findings == {"calibrated.not-covered": 1}


def test_without_a_variant_the_default_speaks_then_the_one_with_the_most_samples() -> None:
    one, two = a_fit("matmul", "bf16", "one", t0_ns=1e6), a_fit("matmul", "bf16", "two", t0_ns=2e6)
    assert said(matmuls("bf16"), on(one, replace(two, samples=200)))[0] == 2.0
    assert said(matmuls("bf16"), on(replace(one, default=True), replace(two, samples=200)))[0] == 1.0


def test_without_a_variant_a_fit_of_such_sizes_speaks_before_the_default() -> None:
    large = replace(
        a_fit("matmul", "bf16", "large", t0_ns=2e6), support=(FitRange(name="m", low=4096, high=8192),)
    )
    device = on(replace(a_fit("matmul", "bf16", "small"), default=True), large)
    assert said(matmuls("bf16", m=8), device)[0] == 1.0
    assert said(matmuls("bf16", m=4096), device)[0] == 2.0
    assert said(matmuls("bf16", m=65536), device)[1] == {"calibrated.outside-support": 1}


def test_an_operation_without_a_fit_takes_that_of_its_kind() -> None:
    own = a_fit("vector", "f16", op="add", t0_ns=1e6)
    device = on(own, a_fit("vector", "f16", op=ANY, t0_ns=2e6))
    assert said(vectors("vector", "add", "f16"), device) == (1.0, {})
    assert said(vectors("vector", "exp", "f16"), device) == (2.0, {})


def test_another_operation_or_rank_of_a_kind_stands_in_with_a_wider_interval() -> None:
    device = on(
        a_fit(ANY, ANY, ANY, op=ANY, t0_ns=5e6), a_fit("pooling", "f16", "lib 4-D", op="max_pool", t0_ns=2e6)
    )
    ops = vectors("pooling", "avg_pool", "f16")
    assert said(ops, device) == (2.0, {"calibrated.stand-in": 1})
    widths: list[float] = []
    for variant in ("", "lib 4-D", "lib 2-D"):
        named = replace(ops, variant=Labels.constant(variant, 1))
        prediction = Calibrated().predict(named, device)
        assert round(float(prediction.duration_ns[0]) / 1e6, 1) == 2.0
        widths.append(float(np.log(prediction.high_ns[0] / prediction.low_ns[0])))
    own = Calibrated().predict(vectors("pooling", "max_pool", "f16"), device)
    differences = np.array(widths) - np.log(own.high_ns[0] / own.low_ns[0])
    # A factor of e on both sides for another operation, and again for another rank.
    np.testing.assert_allclose(differences, [2.0, 2.0, 4.0], rtol=1e-6)


def test_windows_that_overlap_are_read_once_per_element_on_tpus() -> None:
    tpu = load_device("TPU-v4")
    ops = replace(
        vectors("pooling", "max_pool", "f16").take(np.zeros(3, np.int64)),
        dims={"rows": np.full(3, 8192.0), "columns": np.full(3, 1024.0)},
        bytes_moved=np.full(3, 4.0 * 8192 * 1024),
    )
    elements = 8192.0 * 1024
    once, twice, eight = (
        Calibrated().predict(replace(ops, flops=elements * np.array([1.0, 2.0, 8.0])), tpu).duration_ns
    )
    assert twice == pytest.approx(2 * once, rel=0.05)
    assert eight == pytest.approx(8 * once, rel=0.05)


def test_formats_that_run_alike_stand_in_and_it_is_said() -> None:
    device = on(a_fit("matmul", "bf16"), a_fit("vector", "f32_full", op="add", t0_ns=3e6))
    assert said(matmuls("f16"), device) == (1.0, {"calibrated.other-scheme": 1})
    assert said(vectors("vector", "add", "bf16"), device) == (3.0, {"calibrated.other-scheme": 1})
    # Arithmetic in another format runs at another rate.
    assert np.isnan(said(matmuls("f32"), device)[0])
    assert np.isnan(said(matmuls("f8E4M3FN"), device)[0])


def test_the_whole_chip_speaks_last_and_only_of_single_kernels() -> None:
    chip = a_fit(ANY, ANY, ANY, op=ANY, t0_ns=5e6)
    device = on(chip, a_fit("matmul", "bf16"), a_fit("vector", "f16", op="add"))
    assert said(matmuls("bf16"), device) == (1.0, {})
    assert said(vectors("move", "transpose", "bf16"), device) == (5.0, {"calibrated.chip-wide": 1})
    assert np.isnan(said(vectors("move", "transpose", "bf16"), device, chip_wide=False)[0])
    assert np.isnan(said(vectors("quantize", "x", "bf16"), device)[0])
    assert np.isnan(said(vectors("move", "transpose", ""), device)[0])


def test_a_chip_fitted_on_products_alone_speaks_of_products_alone() -> None:
    device = on(a_fit(ANY, ANY, ANY, op=ANY, t0_ns=5e6), a_fit("matmul", "bf16"))
    assert said(matmuls("f32"), device)[0] == 5.0
    assert np.isnan(said(vectors("move", "transpose", "bf16"), device)[0])


def test_what_was_recorded_in_any_format_speaks_after_the_operation_in_its_own() -> None:
    recorded = a_fit("vector", ANY, op=ANY, t0_ns=3e6)
    device = on(recorded, a_fit("vector", "f16", op="add"), a_fit("vector", "f16", op=ANY, t0_ns=7e6))
    assert said(vectors("vector", "add", "f16"), device)[0] == 1.0
    assert said(vectors("vector", "mul", "f16"), device)[0] == 7.0
    assert said(vectors("vector", "mul", "f32"), on(recorded)) == (3.0, {})


def test_a_device_without_fits_covers_nothing() -> None:
    prediction = Calibrated().predict(matmuls("bf16", count=3), BARE, found := Diagnostics())
    assert np.isnan(prediction.duration_ns).all()
    assert prediction.estimator.tolist() == [-1, -1, -1]
    assert found.counts() == {"calibrated.not-covered": 3}


def test_an_unknown_size_is_told() -> None:
    time, findings = said(matmuls("bf16", m=np.nan), on(a_fit("matmul", "bf16")))
    assert np.isnan(time)
    assert findings == {"calibrated.unknown-size": 1}


def test_an_unknown_form_covers_nothing() -> None:
    fit = a_fit("matmul", "bf16")
    for other in (replace(fit, form="of another version"), replace(fit, parameters=fit.parameters[:3])):
        time, findings = said(matmuls("bf16"), on(other))
        assert np.isnan(time)
        assert findings == {"calibrated.unknown-size": 1}


def test_the_interval_is_that_of_the_band_and_widens_outside_the_fitted_sizes() -> None:
    ops = matmuls("bf16", m=8)
    within = Calibrated().predict(ops, on(a_fit("matmul", "bf16")))
    assert within.low_ns[0] / within.duration_ns[0] == pytest.approx(0.5)
    assert within.high_ns[0] / within.duration_ns[0] == pytest.approx(2.0)
    upper = Calibrated().predict(ops, on(a_fit("matmul", "bf16", t0_ns=3e6)))
    assert upper.high_ns[0] / upper.duration_ns[0] == pytest.approx(1.1)
    beyond = Calibrated().predict(matmuls("bf16", m=4096), on(a_fit("matmul", "bf16")))
    # Two doublings more than were fitted on: 1 + 2 x 0.25 times as wide in logarithms.
    assert beyond.high_ns[0] / beyond.duration_ns[0] == pytest.approx(2.0**1.5)


def test_operands_that_are_quantised_already_do_not_pay_for_quantising() -> None:
    fits = [a_fit("matmul", "fp8", t0_ns=9e6), a_fit("matmul", "bf16", t0_ns=1e6)]
    time, findings = said(matmuls("f8E4M3FN"), on(*fits))
    assert time == 9.0
    assert findings == {"calibrated.includes-quantizing": 1}
    steps = [a_fit("quantize", "bf16", op="compute_scale", t0_ns=3e6)]
    steps.append(a_fit("quantize", "bf16", op="scale_matrix", t0_ns=2e6))
    time, findings = said(matmuls("f8E4M3FN"), on(*fits, *steps))
    assert time == 4.0
    assert findings == {"calibrated.less-quantizing": 1}
    # Never less than the same product takes with the start of one kernel.
    steps[0] = a_fit("quantize", "bf16", op="compute_scale", t0_ns=30e6)
    assert said(matmuls("f8E4M3FN"), on(*fits, *steps))[0] == 1.0
    # The scheme of a library that quantises is given its fit as it is.
    assert said(matmuls("fp8"), on(*fits, *steps)) == (9.0, {})


def test_less_quantising_is_less_certain() -> None:
    steps = [a_fit("quantize", "bf16", op=op, t0_ns=3e6) for op in ("compute_scale", "scale_matrix")]
    device = on(a_fit("matmul", "fp8", t0_ns=9e6), a_fit("matmul", "bf16"), *steps)
    whole = Calibrated().predict(matmuls("fp8"), device)
    part = Calibrated().predict(matmuls("f8E4M3FN"), device)
    assert part.duration_ns[0] < whole.duration_ns[0]
    assert part.high_ns[0] / part.duration_ns[0] > whole.high_ns[0] / whole.duration_ns[0]


def test_what_is_asked_is_not_changed_and_the_order_is_kept() -> None:
    device = on(a_fit("matmul", "bf16", t0_ns=1e6), a_fit("matmul", "f32", t0_ns=2e6))
    one = np.ones(4)
    scheme = Labels.of(["f32", "bf16", "f32", "bf16"])
    ops = build.matmuls(scheme, batch=one, m=one * 8, n=one * 8, k=one * 8)
    columns = (ops.flops, ops.bytes_moved, ops.dim("m"))
    before = [column.copy() for column in columns]
    prediction = Calibrated().predict(ops, device)
    assert [round(each / 1e6) for each in prediction.duration_ns.tolist()] == [2, 1, 2, 1]
    assert all(np.array_equal(old, new) for old, new in zip(before, columns, strict=True))
    assert ops.scheme.names == ("f32", "bf16")


def test_no_operations_are_no_trouble() -> None:
    empty = matmuls("bf16").take(np.empty(0, np.int64))
    assert len(Calibrated().predict(empty, BARE).duration_ns) == 0


def a_graph() -> OpGraph:
    """A product of two 1024 x 1024 matrices and a node that takes no time."""
    builder = GraphBuilder("g")
    element = dtype("bf16")
    shape = builder.types.add(element, (1024, 1024))
    node = builder.add_node(
        name_id=0,
        op_id=builder.strings.add("stablehlo.dot_general"),
        op_class=OpClass.CONTRACTION,
        operands=[shape, shape],
        results=[shape],
        flops=2.0 * 1024**3,
        transcendentals=0,
        bytes_read=4.0 * 1024**2,
        bytes_written=2.0 * 1024**2,
    )
    builder.add_contraction(
        node, batch=1, m=1024, n=1024, k=1024, flops=2.0 * 1024**3, useful_flops=2.0 * 1024**3,
        lhs=element.code, rhs=element.code, accumulator=element.code,
    )  # fmt: skip
    builder.add_node(
        name_id=0,
        op_id=builder.strings.add("stablehlo.tuple"),
        op_class=OpClass.FREE,
        operands=[shape],
        results=[shape],
        flops=0,
        transcendentals=0,
        bytes_read=0,
        bytes_written=0,
    )
    return builder.build()


def test_nodes_of_a_graph_by_name_of_the_estimator() -> None:
    device = on(a_fit("matmul", "bf16"))
    estimate = load_estimator("calibrated").estimate(a_graph(), device)
    assert estimate.estimators == ("calibrated",)
    assert estimate.duration_ns[0] == pytest.approx(1e6, rel=0.05)
    assert estimate.duration_ns[1] == 0
    assert estimate.low_ns[0] < estimate.duration_ns[0] < estimate.high_ns[0]


def test_shipped_fits_lie_between_the_roofline_and_ten_times_it() -> None:
    graph = a_graph()
    for name in ("H100-SXM", "B200-SXM", "A100-SXM-80GB", "L40S"):
        device = load_device(name)
        fitted = load_estimator("calibrated").estimate(graph, device).duration_ns[0]
        peak = load_estimator("roofline").estimate(graph, device).duration_ns[0] - device.launch_overhead_ns
        assert peak < fitted < 10 * peak


@pytest.mark.parametrize(
    ("variant", "asked", "t0_ns", "warned"),
    [
        ("pytorch events", "", 1e6, 2),
        ("pytorch events", "pytorch events", 1e6, 0),
        ("pytorch events", "", 1e-3, 0),
        ("lib", "", 1e6, 0),
    ],
    ids=["launches", "asked-for", "long-kernels", "kernel-times"],
)
def test_launches_timed_with_events_are_told(variant: str, asked: str, t0_ns: float, warned: int) -> None:
    device = on(a_fit("matmul", "bf16", variant, t0_ns=t0_ns))
    found = Diagnostics()
    Calibrated().predict(matmuls("bf16", variant=asked, count=2), device, found)
    assert found.counts().get("calibrated.event-times", 0) == warned
    assert not [each for each in found if each.location in each.message]


@pytest.mark.parametrize(("other", "warned"), [("pytorch events bmm", 1), ("lib", 0)])
def test_the_chips_fit_holds_launches_where_all_fits_do(other: str, warned: int) -> None:
    fits = (a_fit(ANY, ANY, ANY, op=ANY), a_fit("matmul", "f32_full", "pytorch events"))
    device = on(*fits, a_fit("vector", "f32_full", other, op="add"))
    found = Diagnostics()
    Calibrated().predict(matmuls("bf16"), device, found)
    assert found.counts().get("calibrated.event-times", 0) == warned


def prompts(queries: float, keys: float) -> Operations:
    """Attention of ``queries`` new tokens to ``keys`` in all, each to each."""
    one = np.ones(1)
    ops = build.attention_context(
        Labels.constant("bf16", 1),
        batch=16 * one,
        length=queries * one,
        heads=32 * one,
        kv_heads=32 * one,
        head_dim=128 * one,
        window=0 * one,
        kv_bytes=2 * one,
    )
    pairs = np.array([queries * keys])
    return replace(
        ops,
        dims={**ops.dims, "kv_len": np.array([keys]), "pairs": pairs},
        flops=4 * 16 * 32 * 128 * pairs,
        bytes_moved=np.array([16 * 32 * 128 * 2.0 * 2 * (queries + keys)]),
    )


@pytest.mark.parametrize(("queries", "keys"), [(8.0, 32768.0), (128.0, 8192.0)])
def test_keys_of_earlier_prompts_are_read(queries: float, keys: float) -> None:
    """A few queries against a long cache take no less than reading it does, and no fit has seen them."""
    h100 = load_device("H100-SXM")
    found = Diagnostics()
    ops = prompts(queries, keys)
    said = Calibrated().predict(ops, h100, found)
    assert said.duration_ns[0] >= peak_times(ops, h100).memory_ns[0]
    assert found.counts()["calibrated.outside-support"] == 1
    whole = Calibrated().predict(prompts(keys, keys), h100)
    wider = said.high_ns[0] / said.low_ns[0]
    assert wider > whole.high_ns[0] / whole.low_ns[0]


def test_fewer_keys_than_queries_are_fewer() -> None:
    h100 = load_device("H100-SXM")
    few, many = (Calibrated().predict(prompts(1024, keys), h100).duration_ns[0] for keys in (77, 1024))
    assert few < 0.7 * many
