"""Forms of time: hand-computed cases, monotone parameters, and independence of chunks."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.estimators.collective_links import TUNED
from hespas.estimators.forms import (
    DECODE,
    FORMS,
    FORMS_OF_KIND,
    Form,
    MachineRates,
    Values,
    carried_values,
    form_time_ns,
    hit_share,
    machine_of,
    soft_max,
)
from hespas.estimators.kernels import EVERY_FORM, PRODUCTS
from hespas.hardware import load_device, named_device
from hespas.hardware.device_fits import FORM_PARAMETERS, LATER_PARAMETERS
from hespas.operations import KINDS, Labels, Operations, build

MACHINE = MachineRates(
    flops_per_ns=1e6,
    bytes_per_ns=1e3,
    units=100.0,
    cache_bytes=5e7,
    cache_rate=3.0,
    activation_bytes=2.0,
    weight_bytes=2.0,
    output_bytes=2.0,
    vector_elements=8.0,
    quantizes=False,
)


def starts(form: Form) -> dict[str, float]:
    return {each.name: each.start for each in form.parameters}


def matmuls(batch: float, m: float, n: float, k: float, count: int = 1) -> Operations:
    sizes = (np.full(count, size, np.float64) for size in (batch, m, n, k))
    batches, ms, ns, ks = sizes
    return build.matmuls(Labels.constant("bf16", count), batch=batches, m=ms, n=ns, k=ks)


def vectors(rows: float, columns: float) -> Operations:
    return build.elementwise(
        "vector",
        Labels.constant("bf16", 1),
        op=Labels.constant("add", 1),
        rows=np.array([rows]),
        columns=np.array([columns]),
        passes=np.array([3.0]),
        flops_per_element=np.ones(1),
    )


def decodes(batch: float, kv_len: float, heads: float, kv_heads: float) -> Operations:
    return build.attention_generation(
        Labels.constant("bf16", 1),
        batch=np.array([batch]),
        kv_len=np.array([kv_len]),
        heads=np.array([heads]),
        kv_heads=np.array([kv_heads]),
        head_dim=np.array([128.0]),
        kv_bytes=np.array([2.0]),
    )


def prefills(batch: float, length: float, heads: float) -> Operations:
    return build.attention_context(
        Labels.constant("bf16", 1),
        batch=np.array([batch]),
        length=np.array([length]),
        heads=np.array([heads]),
        kv_heads=np.array([heads]),
        head_dim=np.array([128.0]),
        window=np.zeros(1),
        kv_bytes=np.array([2.0]),
    )


def experts(tokens: float, hidden: float) -> Operations:
    one = np.ones(1)
    return build.mixtures_of_experts(
        Labels.constant("bf16", 1),
        op=Labels.constant("balanced", 1),
        tokens=one * tokens,
        hidden=one * hidden,
        inter=one * 2048,
        topk=one * 8,
        experts=one * 64,
        tensor_parallel=one,
        expert_parallel=one,
        matrices=one * 3,
    )


@given(st.lists(st.floats(0, 1e9, allow_subnormal=False), min_size=2, max_size=4), st.floats(0.01, 20))
def test_a_soft_maximum_lies_between_the_longest_and_the_sum(times: list[float], sharpness: float) -> None:
    value = float(soft_max(sharpness, *(np.array([time]) for time in times))[0])
    assert max(times) * (1 - 1e-9) <= value <= sum(times) * (1 + 1e-9)


def test_a_soft_maximum_of_sharpness_zero_adds_up_and_of_much_takes_the_longest() -> None:
    one, two = np.array([3.0]), np.array([4.0])
    assert soft_max(0.0, one, two)[0] == pytest.approx(7.0)
    assert soft_max(1.0, one, two)[0] == pytest.approx(5.0)
    assert soft_max(200.0, one, two)[0] == pytest.approx(4.0)


def test_a_cache_holds_half_of_what_is_as_large_as_it() -> None:
    share = hit_share(np.array([1e3, 1e6, 1e9]), 1e6, 2.0)
    assert share == pytest.approx([1.0, 0.5, 0.0], abs=1e-5)
    assert hit_share(np.array([1.0]), 0.0, 2.0).tolist() == [0.0]


def test_the_time_of_a_product_by_hand() -> None:
    # One 128 x 128 tile on one of 100 units: 4096 steps of k at 2 x 128 x 128 / (1e6 / 100) ns each.
    values = starts(FORMS["tiles"]) | {
        "t0_ns": 1000.0,
        "compute": 1.0,
        "memory": 1e6,
        "overlap": 20.0,
        "step_ns": 0.25,
        "unit_load": 1e9,
        "tile_edge": 1e-9,
        "fill": 1e-9,
        "split_ns": 1e12,
        "wave_tail": 1.0,
        "ragged_k": 1.0,
        "ragged_n": 1.0,
        "cache_share": 1e9,
    }
    time = form_time_ns(FORMS["tiles"], values, matmuls(1, 128, 128, 4096), MACHINE)
    # Smaller tiles share the work between more units: 64 tiles of 16 x 128 ... the fastest is taken.
    fastest = 4096 * 2 * 8 * 64 / 1e4
    assert time[0] == pytest.approx(1000 + 0.25 * 4096 + fastest, rel=1e-6)
    ragged = form_time_ns(FORMS["tiles"], values, matmuls(1, 128, 128, 4095), MACHINE)
    assert ragged[0] == pytest.approx(1000 + 0.25 * 4095 + 2 * fastest, rel=1e-6)


def test_a_wave_more_costs_a_wave_more() -> None:
    values = starts(FORMS["tiles"]) | {"t0_ns": 50.0, "wave_tail": 1.0, "memory": 4.0}
    full = form_time_ns(FORMS["tiles"], values, matmuls(100, 4096, 4096, 4096), MACHINE)[0]
    half = form_time_ns(FORMS["tiles"], values, matmuls(50, 4096, 4096, 4096), MACHINE)[0]
    assert full / half == pytest.approx(2, rel=0.05)


def test_weights_within_the_cache_are_read_from_it() -> None:
    values = starts(FORMS["tiles"]) | {"cache_reach": 1.0, "cache_edge": 20.0, "memory": 0.5}
    form, small, large = FORMS["tiles"], matmuls(1, 1, 2048, 2048), matmuls(1, 1, 16384, 16384)
    turned, kept = values | {"weight_copies": 5.0}, values | {"weight_copies": 1.0}
    assert form_time_ns(form, turned, large, MACHINE) == pytest.approx(
        form_time_ns(form, kept, large, MACHINE)
    )
    # 8 MB fit a cache of 50 MB five times over: turning through five copies changes nothing.
    assert form_time_ns(form, turned, small, MACHINE) == pytest.approx(
        form_time_ns(form, kept, small, MACHINE), rel=2e-2
    )
    # Of 32 MB, two copies do not.
    middle = matmuls(1, 1, 4096, 4096)
    assert form_time_ns(form, turned, middle, MACHINE) > 1.5 * form_time_ns(form, kept, middle, MACHINE)


def test_a_slower_cache_and_quantising_take_longer() -> None:
    form, ops = FORMS["tiles"], matmuls(1, 64, 2048, 2048)
    values = starts(form) | {
        "cache_reach": 1.0,
        "unit_load": 50.0,
        "overlap": 0.05,
        "activations_cached": 1.0,
    }
    rates = [replace(MACHINE, cache_rate=rate) for rate in (4.0, 2.0, 1.0)]
    fast, slow, slowest = (form_time_ns(form, values, ops, machine)[0] for machine in rates)
    # Nearly everything is held, and nearly added up: what it takes doubles twice.
    assert (slowest - slow) / (slow - fast) == pytest.approx(2, rel=0.05)
    quantised = form_time_ns(form, values, ops, replace(rates[0], quantizes=True))[0]
    assert quantised - fast == pytest.approx(values["quantizing_passes"] * 64 * 2048 * 2 / 1e3, rel=1e-6)


@settings(max_examples=60)
@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 3))
def test_twice_the_work_never_takes_less(size: int, other: int, times: int) -> None:
    more = 2**times
    for form, small, large in (
        ("streams", vectors(size, other), vectors(size * more, other)),
        ("decode", decodes(size, other, 8, 1), decodes(size * more, other, 8, 1)),
        ("decode", decodes(size, other, 8, 1), decodes(size, other * more, 8, 1)),
        ("prefill", prefills(size, other, 8), prefills(size * more, other, 8)),
        ("experts", experts(size, 2048), experts(size * more, 2048)),
    ):
        values = starts(FORMS[form])
        short, long = (form_time_ns(FORMS[form], values, each, MACHINE)[0] for each in (small, large))
        assert long >= short * (1 - 1e-9), form


def test_heads_with_keys_of_their_own_and_very_many_that_share_run_alike() -> None:
    values = starts(FORMS["decode"]) | {"group_t0_ns": 1.0, "group_start_ns": 1.0, "group_key_ns": 0.001}
    shared = form_time_ns(FORMS["decode"], values, decodes(64, 512, 32, 4), MACHINE)[0]
    single = form_time_ns(FORMS["decode"], values, decodes(64, 512, 32, 32), MACHINE)[0]
    crowd = form_time_ns(FORMS["decode"], values, decodes(64, 512, 64, 1), MACHINE)[0]
    assert shared < single
    assert shared < crowd


def test_chunks_do_not_show() -> None:
    generator = np.random.default_rng(5)
    sizes = np.exp(generator.uniform(0, 9, (4, 20_000))).round()
    ops = build.matmuls(Labels.constant("bf16", 20_000), batch=sizes[0], m=sizes[1], n=sizes[2], k=sizes[3])
    form = FORMS["tiles"]
    whole = form.time_ns(starts(form), form.columns(ops, MACHINE))
    assert np.array_equal(form_time_ns(form, starts(form), ops, MACHINE), whole)


def test_an_unknown_size_or_rate_is_an_unknown_time() -> None:
    form = FORMS["tiles"]
    assert np.isnan(form_time_ns(form, starts(form), matmuls(1, np.nan, 8, 8), MACHINE)).all()
    unknown = machine_of(load_device("A100-SXM-80GB"), "matmul", "no such format")
    assert np.isnan(unknown.flops_per_ns)
    assert np.isnan(form_time_ns(form, starts(form), matmuls(1, 8, 8, 8), unknown)).all()


def test_forms_are_listed_by_name_and_kinds_are_known() -> None:
    assert all(form.name == name for name, form in FORMS.items())
    assert set(FORMS_OF_KIND) <= set(KINDS)
    for kind, forms in FORMS_OF_KIND.items():
        for form in forms:
            assert FORMS[form.name] is form
            assert set(form.dims) <= {name for dims in KINDS.values() for name in dims}, kind
            assert all(0 < each.low <= each.start <= each.high for each in form.parameters)


def test_shares_of_a_peak_are_at_most_all_of_it() -> None:
    shares = {"compute", "memory", "store", "wave_tail"}
    for form in FORMS.values():
        assert all(each.high == 1 for each in form.parameters if each.name in shares), form.name


def test_the_reader_of_device_files_knows_the_parameters_of_every_form() -> None:
    for later, known in ((False, FORM_PARAMETERS), (True, LATER_PARAMETERS)):
        own = {
            name: {each.name for each in form.parameters if isnan(each.absent) is not later}
            for name, form in EVERY_FORM.items()
        }
        assert {name: set(known.get(name, ())) for name in own} == own
    assert set(FORM_PARAMETERS) - set(EVERY_FORM) == {PRODUCTS, TUNED}


def _carried(form: Form, fitted: str, device: str) -> tuple[Values, Values]:
    values = {parameter.name: parameter.start for parameter in form.parameters}
    one, other = (machine_of(named_device(name), "matmul", "bf16") for name in (fitted, device))
    return values, carried_values(form, values, one, other)


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
def test_parameters_stay_on_a_device_with_equal_rates(form: Form) -> None:
    values, carried = _carried(form, "A100-SXM-80GB", "A100-SXM-80GB")
    assert carried == pytest.approx(values)


def test_parameters_carry_over_by_the_clock_and_the_bandwidth_of_the_cache() -> None:
    """A100: 1.41 GHz, cache of 7,220 GB/s by memory of 2,039; L40S: 2.52 GHz, 5,779 by 90 % of 864."""
    clock, faster = 1.41 / 2.52, (5779 / (0.9 * 864)) / (7220 / 2039)
    values, carried = _carried(DECODE, "A100-SXM-80GB", "L40S")
    changed = {name for name, value in carried.items() if value != values[name]}
    starts = {"t0_ns", "group_t0_ns", "piece_start_ns", "group_start_ns", "split_ns"}
    cached = {"memory", "cache_gain", "cache_reach"}
    assert changed == starts | cached | {"key_ns", "group_key_ns", "limit_key_ns"}
    assert carried["t0_ns"] == pytest.approx(values["t0_ns"] * clock**0.7)
    assert carried["piece_start_ns"] == pytest.approx(values["piece_start_ns"] * clock)
    assert 1 + carried["cache_gain"] == pytest.approx((1 + values["cache_gain"]) * faster)
    values, carried = _carried(FORMS["tiles"], "A100-SXM-80GB", "L40S")
    assert carried["unit_load"] == pytest.approx(values["unit_load"] * faster**0.5)


@pytest.mark.parametrize("form", [DECODE, FORMS["tiles"], FORMS["experts"], FORMS["streams"]])
def test_error_correction_in_the_memory_takes_bandwidth(form: Form) -> None:
    for fitted, device, ratio in (
        ("A100-SXM-80GB", "L40S", 0.9),
        ("L40S", "RTX-4090", 1 / 0.9),
        ("L40S", "T4", 1.0),
        ("A100-SXM-80GB", "RTX-4090", 1.0),
    ):
        values, carried = _carried(form, fitted, device)
        assert carried["memory"] == pytest.approx(values["memory"] * ratio), (fitted, device)


def test_rates_of_units_carry_over_by_the_bytes_per_unit_and_clock() -> None:
    one, other = (machine_of(named_device(name), "matmul", "bf16") for name in ("H100-SXM", "L40S"))
    slower = one.clock_hz / other.clock_hz
    paced = slower * (0.9 * other.bytes_per_ns / other.units) / (one.bytes_per_ns / one.units)
    assert 0.1 < paced < 0.2
    for form, name in (("tiles", "quantizing_passes"), ("experts", "token_passes")):
        values, carried = _carried(FORMS[form], "H100-SXM", "L40S")
        assert carried[name] == pytest.approx(values[name] * paced**0.75)
        values, carried = _carried(FORMS[form], "L40S", "H100-SXM")
        assert carried[name] == values[name], "libraries for a faster memory make no more passes"
    values, carried = _carried(DECODE, "H100-SXM", "L40S")
    assert carried["key_ns"] == pytest.approx(values["key_ns"] * slower)
    values, carried = _carried(DECODE, "L40S", "H100-SXM")
    assert carried["key_ns"] == pytest.approx(values["key_ns"] / slower * paced), "it keeps pace"


def test_streams_from_a_cache_run_at_a_rate_of_the_units() -> None:
    rates = [machine_of(named_device(name), "vector", "f16") for name in ("H100-SXM", "A100-SXM-80GB")]
    bytes_per_clock = [rate.bytes_per_ns * rate.cache_rate / rate.units / rate.clock_hz for rate in rates]
    values, carried = _carried(FORMS["streams"], "H100-SXM", "A100-SXM-80GB")
    assert carried["cache_share"] * bytes_per_clock[1] == pytest.approx(
        values["cache_share"] * bytes_per_clock[0]
    )
    shares = np.linspace(0.85, 1.0, 151)  # at 1, the cache is the limit, not the units
    found = [
        carried_values(FORMS["streams"], {**values, "cache_share": share}, *rates)["cache_share"]
        for share in shares
    ]
    assert found[-1] == 1
    assert 0 < np.diff(found).min() <= np.diff(found).max() < 0.01, "no jump"


def test_parts_that_an_older_fit_lacks_stay_absent() -> None:
    for form in FORMS.values():
        absent = {entry.name: 0.0 for entry in form.parameters if entry.absent == 0}
        values = {entry.name: entry.start for entry in form.parameters} | absent
        one, other = (machine_of(named_device(name), "matmul", "bf16") for name in ("H100-SXM", "L40S"))
        carried = carried_values(form, values, one, other)
        assert {name: carried[name] for name in absent} == absent


def test_weights_of_experts_that_fit_the_cache_are_read_from_it() -> None:
    """Weights of 25 MB, read at 5.8 TB/s from the cache of an L40S, or at 0.86 TB/s from its memory."""
    form, machine = FORMS["experts"], machine_of(named_device("L40S"), "moe", "bf16")
    one = np.ones(1)
    ops = build.mixtures_of_experts(
        Labels.constant("bf16", 1),
        tokens=one,
        hidden=2048 * one,
        inter=256 * one,
        topk=8 * one,
        experts=8 * one,
        op=Labels.constant("balanced", 1),
        tensor_parallel=one,
        expert_parallel=one,
        matrices=3 * one,
    )
    values = {entry.name: entry.start for entry in form.parameters}
    values |= {"memory": 1.0, "cache_share": 1.0, "overlap": 20.0, "unit_load": 50.0, "compute": 1.0}
    cached, direct = (
        float(form_time_ns(form, {**values, "cache_reach": reach}, ops, machine)[0]) for reach in (3.0, 0.0)
    )
    moved = 8 * 3 * 2048 * 256 * 2
    assert cached < direct - 0.5 * moved / 864


def test_the_share_of_a_cache_doubles_where_one_copy_of_shared_data_is_in_it() -> None:
    values, carried = _carried(DECODE, "H100-SXM", "L40S")
    assert carried["cache_reach"] == values["cache_reach"] * 2
    values, carried = _carried(FORMS["tiles"], "L40S", "H100-SXM")
    assert carried["activations_cached"] == values["activations_cached"] / 2
    values, carried = _carried(FORMS["tiles"], "H100-SXM", "A100-SXM-80GB")
    assert carried["cache_reach"] == values["cache_reach"]


@pytest.mark.parametrize(
    ("fitted", "device", "blocks", "stores"),
    [
        ("A100-SXM-80GB", "L40S", 1.0, True),
        ("H100-SXM", "L40S", 0.5, True),  # two blocks of warps run where one group of warps did
        ("L40S", "H100-SXM", 2.0, True),
        ("H100-SXM", "B200-SXM", 1.0, False),  # which stores a tile during the next
        ("MI300X", "H100-SXM", 1.0, True),
    ],
)
def test_starts_of_blocks_and_tiles_carry_over_by_instructions_and_units(
    fitted: str, device: str, blocks: float, stores: bool
) -> None:
    one, other = (machine_of(named_device(name), "matmul", "bf16") for name in (fitted, device))
    slower = one.clock_hz / other.clock_hz
    flops = slower * (other.flops_per_ns / other.units) / (one.flops_per_ns / one.units)
    values, carried = _carried(FORMS["prefill"], fitted, device)
    assert carried["block_start_ns"] == pytest.approx(values["block_start_ns"] * slower * blocks)
    assert carried["score"] == pytest.approx(values["score"] * flops ** (1 / 3))
    values, carried = _carried(FORMS["tiles"], fitted, device)
    assert carried["fill"] == pytest.approx(values["fill"] * (flops**0.7 if stores else 1.0))


def test_starts_stay_in_one_architecture() -> None:
    for form in (DECODE, FORMS["tiles"]):
        values, carried = _carried(form, "B200-SXM", "GB200")
        assert carried["t0_ns"] == values["t0_ns"]


def test_an_unknown_clock_leaves_the_parameters() -> None:
    values = {parameter.name: parameter.start for parameter in DECODE.parameters}
    machine = machine_of(named_device("A100-SXM-80GB"), "matmul", "bf16")
    unknown = replace(machine, clock_hz=nan)
    for one, other in ((machine, unknown), (unknown, machine)):
        assert carried_values(DECODE, values, one, other) == pytest.approx(values)
        of_tiles = {parameter.name: parameter.start for parameter in FORMS["tiles"].parameters}
        assert carried_values(FORMS["tiles"], of_tiles, one, other) == pytest.approx(of_tiles)


@pytest.mark.parametrize(
    ("fitted", "device", "scheme", "ratio"),
    [
        ("A100-PCIe-40GB", "B200-SXM", "bf16", (1000 / (2250 * 0.55)) / (250 / 312)),  # both are limited
        # In one architecture the watts per FLOP rise with the square of the clock: 2.06 and 1.98 GHz.
        ("B200-SXM", "GB200", "bf16", ((1200 / 2500) / (1000 / 2250) * (1.98 / 2.06) ** 2) ** (1 / 3)),
        ("L40S", "L4", "bf16", 1.0),  # its clock is so much lower that 72 W suffice
        ("H100-SXM", "B200-SXM", "fp8", 1000 / (4500 * 0.55 * 0.5)),  # 0.5 pJ for 8 bits, at 0.55 of N7
        ("P4", "T4", "f32_full", 70 / (8.1 * 1.9 * 5.0)),  # on vector units
        ("A100-SXM-80GB", "H100-SXM", "bf16", 1.0),  # the limits suffice
        ("MI308X", "MI300X", "bf16", 1.0),  # unknown
    ],
)
def test_shares_of_the_peak_carry_over_by_the_power_limit(
    fitted: str, device: str, scheme: str, ratio: float
) -> None:
    one, other = (machine_of(named_device(name), "matmul", scheme) for name in (fitted, device))
    for form in (FORMS["tiles"], FORMS["experts"], FORMS["prefill"]):
        values = {parameter.name: parameter.start for parameter in form.parameters}
        assert carried_values(form, values, one, other)["compute"] == pytest.approx(values["compute"] * ratio)


def test_the_share_of_a_sibling_has_no_jump_where_the_limit_just_suffices() -> None:
    values = {parameter.name: parameter.start for parameter in FORMS["tiles"].parameters}
    fitted = replace(machine_of(named_device("H100-SXM"), "matmul", "bf16"), powered_share=1.0)
    found = [
        carried_values(
            FORMS["tiles"],
            values,
            fitted,
            replace(fitted, clock_hz=1.2 * fitted.clock_hz, powered_share=share),
        )["compute"]
        for share in (0.999, 1.0, 1.001)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[1] == pytest.approx(found[2], rel=1e-3)
    assert found[1] == pytest.approx(values["compute"] * 1.2 ** (-2 / 3))  # a higher clock at equal watts


def test_no_share_of_the_peak_is_carried_above_one() -> None:
    values = {parameter.name: parameter.high for parameter in FORMS["tiles"].parameters}
    one, other = (machine_of(named_device(name), "matmul", "bf16") for name in ("MI300X", "MI325X"))
    assert one.powered_share < 1 < other.powered_share
    assert carried_values(FORMS["tiles"], values, one, other)["compute"] == 1
