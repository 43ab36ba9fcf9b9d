"""Estimators for the kernels of a serving step."""

from __future__ import annotations

import numpy as np
import pytest

from hespas.generators.llm import Layout, ServingStep, load_model, precision_of
from hespas.generators.llm.serving_lattice import LatticeGrids, lattice_kernels
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray
from hespas.hardware import load_device
from hespas.simulator.serving import SHARES
from hespas.simulator.serving.step_estimates import models_of, step_times

_PREFILL = 8192


def _experts_ns(hardware: str, names: frozenset[str], experts: str = "mxfp4") -> FloatArray:
    """Times of all experts of a step by tokens, where some names that tables have for formats count."""
    step = ServingStep(
        model=load_model("GPT-OSS-120B"), layout=Layout(tp=8, zero=0), precision=precision_of("bf16"),
        fused=True, experts=experts,
    )  # fmt: skip
    models = [
        each
        for each in models_of("vllm", "composite")
        if not each.formats or names & set(each.formats.values())
    ]
    grids = LatticeGrids.up_to(tokens=_PREFILL, sequences=8, context=2048)
    found = step_times(
        lattice_kernels(step, grids), load_device(hardware), models, num_ranks=8, diagnostics=Diagnostics()
    )
    times: FloatArray = found.of_tokens[SHARES.index("experts")]
    return times


_ALL = frozenset({"fp8", "fp8_block", "w4a8_mxfp4_mxfp8", "w4a16_mxfp4", "f8E4M3FN", "nvfp4"})


def test_experts_take_what_their_own_device_was_measured_to() -> None:
    """Hopper multiplies 4-bit experts as 16-bit ones: what Blackwell devices reach with 8-bit activations and
    what the peak would allow are shorter, and of no kernel that it has.
    """
    everybody = _experts_ns("H100-SXM", _ALL)
    own = _experts_ns("H100-SXM", frozenset({"w4a16_mxfp4"}))
    assert everybody == pytest.approx(own)
    assert _experts_ns("B200-SXM", _ALL)[-1] < 0.5 * own[-1]


def test_weights_of_four_bits_are_like_others_of_four_bits() -> None:
    assert _experts_ns("H100-SXM", _ALL, "i4") == pytest.approx(_experts_ns("H100-SXM", _ALL), rel=0.1)


def test_the_shortest_of_the_kernels_that_a_device_has_counts() -> None:
    both = _experts_ns("B200-SXM", _ALL)
    each = [_experts_ns("B200-SXM", frozenset({name})) for name in ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4")]
    assert both == pytest.approx(np.minimum(*each))
