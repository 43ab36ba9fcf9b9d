"""Parameters of serving engines: by engine, and host times that apply to other devices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hespas.api import Server
from hespas.graph import Diagnostics
from hespas.hardware import load_device, peak_for
from hespas.simulator.serving import SHARES, Correction
from hespas.simulator.serving.engine_parameters import (
    EngineParameters,
    Stack,
    engine_parameters,
    parameters_of,
)
from tests.simulator.serving.small_servers import even_steps

HOST = {"prompt_ns", "request_ns", "launch_ns"}


def parameters(name: str, rows: int = 20, **values: float) -> EngineParameters:
    """Return parameters of a stack that change ``values``."""
    all_values = {key: getattr(Correction(), key) for key in Correction.__dataclass_fields__}
    return EngineParameters(name=name, rows=rows, apart=0.2, parameters=all_values | values)


KNOWN = {
    each.name: each
    for each in (
        parameters("A vllm", products=1.3, request_ns=1e6, launch_ns=2e4),
        parameters("B vllm", products=1.5, request_ns=3e6, launch_ns=4e4),
        parameters("B vllm nvfp4 experts", products=2.0, request_ns=8e6, launch_ns=9e4),
        parameters("B vllm disaggregated", request_ns=7e6),
        parameters("F vllm", rows=2, request_ns=5e9),
        parameters("B sglang", request_ns=9e9),
    )
}


def test_a_stack_has_its_own_parameters() -> None:
    assert parameters_of(Stack("B", "vllm"), "composite", KNOWN) is KNOWN["B vllm"]
    experts = parameters_of(Stack("B", "vllm", "nvfp4"), "composite", KNOWN)
    assert experts is KNOWN["B vllm nvfp4 experts"]
    separate = parameters_of(Stack("B", "vllm", "", True), "composite", KNOWN)
    assert separate is KNOWN["B vllm disaggregated"]


@pytest.mark.parametrize(
    "stack",
    [Stack("C", "vllm"), Stack("My device", "vllm"), Stack("A", "vllm", "i4"), Stack("F", "vllm")],
)
def test_host_times_of_the_engine_carry_over(stack: Stack) -> None:
    carried = parameters_of(stack, "composite", KNOWN)
    assert carried is not None
    assert carried.parameters.keys() == HOST
    assert carried.correction == Correction(request_ns=3e6, launch_ns=4e4)
    assert carried.evidence == "host times of 60 runs of vllm on other stacks"


def test_separate_servers_have_host_times_of_separate_servers() -> None:
    carried = parameters_of(Stack("C", "vllm", "", True), "composite", KNOWN)
    assert carried is not None
    assert parameters_of(Stack("A", "vllm", "", True), "composite", KNOWN) is KNOWN["A vllm"]
    assert carried.correction.request_ns == 7e6
    assert carried.evidence == "host times of 20 runs of vllm disaggregated on other stacks"


def test_separate_servers_without_runs_are_servers_that_do_both() -> None:
    known = {name: each for name, each in KNOWN.items() if "disaggregated" not in name}
    stack = Stack("B", "vllm", "", True)
    assert parameters_of(stack, "composite", known) is known["B vllm"]
    assert parameters_of(stack._replace(engine="trtllm"), "composite", known) is None


def test_nothing_is_known_of_other_engines_and_estimators() -> None:
    assert parameters_of(Stack("B", "trtllm"), "composite", KNOWN) is None
    assert parameters_of(Stack("B", "vllm"), "roofline", KNOWN) is None


def test_shipped_stacks_are_found_by_their_names() -> None:
    for name, shipped in engine_parameters().items():
        device, _, rest = name.partition(" ")
        engine, *words = rest.split(" ")
        if engine not in {"vllm", "sglang", "trtllm"}:
            continue  # a name without a device, for fits
        experts = words[-2] if words and words[-1] == "experts" else ""
        stack = Stack(device, engine, experts, "disaggregated" in words)
        assert stack.name == name
        used = parameters_of(stack, "composite")
        assert (used is shipped) == (shipped.rows >= len(shipped.parameters))


def test_no_factor_makes_a_share_faster_than_its_roof() -> None:
    plain = even_steps()
    tables = (plain.of_tokens, plain.of_rows, plain.of_decode, plain.of_prompts)
    bounded = replace(plain, floors=tuple(0.5 * table for table in tables))
    assert bounded.decode_ns(4, np.array([50.0])) == plain.decode_ns(4, np.array([50.0]))
    fast = Correction(products=0.1, attention=0.1)
    half = Correction(products=0.5, attention=0.5)
    found, wanted = (
        steps.corrected(correction).decode_ns(4, np.array([50.0]))
        for steps, correction in ((bounded, fast), (plain, half))
    )
    assert found == pytest.approx(wanted)
    assert plain.corrected(fast).decode_ns(4, np.array([50.0])) < found


def test_corrected_experts_stay_below_the_peak_of_the_device() -> None:
    server = Server(
        model="Qwen3-30B-A3B",
        hardware="B200-SXM",
        precision="nvfp4",
        engine="sglang",
        engine_parameters="none",
    )
    times = server.times(server.step(), 4096, Diagnostics())
    experts, floor = times.of_tokens[SHARES.index("experts")], times.floors[0][SHARES.index("experts")]
    assert np.all(floor > 0)
    assert np.all(floor <= experts)
    flops = 8 * 3 * 2 * 2048 * 768 * 48 * np.array(times.grids.tokens)
    peak = peak_for(load_device("B200-SXM"), "matrix", "f4E2M1FN").flops_per_s
    assert np.all(flops / floor * 1e9 <= peak * (1 + 1e-9))
