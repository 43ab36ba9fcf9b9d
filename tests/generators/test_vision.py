"""Vision and diffusion transformers: published parameter counts, closed forms, checks and simulators."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hespas
from hespas.generators.vision import VisionModel, VisionStep, dit_xl_2, vit_b_16
from hespas.graph import OpClass
from hespas.graph.errors import UsageError

VIT = replace(vit_b_16(), layers=2)
DIT = replace(dit_xl_2(), layers=2)


def test_parameters_are_those_of_the_published_models() -> None:
    assert vit_b_16().parameters == 86_567_656
    assert dit_xl_2().parameters == 675_129_632


@pytest.mark.parametrize("model", [VIT, DIT], ids=lambda model: str(model.name))
@pytest.mark.parametrize("dp", [1, 4])
def test_products_are_those_of_the_closed_form(model: VisionModel, dp: int) -> None:
    """A fused kernel computes the scores again: 14 for each 12 of attention."""
    step = VisionStep(model=model, dp=dp, batch=2, fsdp=True)
    graph = step.workload().classes[0]
    attended = graph.flops[graph.op_class == OpClass.ATTENTION].sum()
    found = graph.contractions.flops.sum() + attended * 12 / 14
    assert found * dp == pytest.approx(step.account().model_flops_per_step)


@pytest.mark.parametrize("model", [VIT, DIT], ids=lambda model: str(model.name))
@pytest.mark.parametrize(("dp", "fsdp"), [(1, False), (4, False), (4, True)])
def test_steps_are_valid_and_run(model: VisionModel, dp: int, fsdp: bool) -> None:
    workload = VisionStep(model=model, dp=dp, batch=4, fsdp=fsdp).workload()
    assert hespas.check(workload, profile="astra-sim").valid
    done = hespas.estimate(workload, "H100-SXM")
    assert np.isfinite(done.to_pandas()["duration_ns"]).all()
    assert hespas.simulate(workload, "H100-SXM", system="dgx-h100").step_ns > 0
    if dp > 1:
        assert hespas.simulate(workload, "H100-SXM", system="dgx-h100", mode="astra").step_ns > 0


def test_collectives_are_those_of_the_layout() -> None:
    """FSDP gathers every unit twice (bf16) and reduces its gradients once (f32)."""
    plain, sharded = (
        VisionStep(model=VIT, dp=4, fsdp=fsdp).workload().classes[0].collectives for fsdp in (False, True)
    )
    units = VIT.layers + 2
    assert len(plain) == units
    assert plain.comm_bytes.sum() == pytest.approx(4 * VIT.parameters, rel=1e-6)
    assert len(sharded) == 3 * units
    assert sharded.comm_bytes.sum() == pytest.approx((4 + 2 * 2 / 4) * VIT.parameters, rel=1e-6)


@pytest.mark.parametrize(
    "model",
    [replace(VIT, patch=15), replace(VIT, heads=7), replace(DIT, layers=0)],
    ids=["patch", "heads", "layers"],
)
def test_sizes_that_do_not_divide_are_refused(model: VisionModel) -> None:
    with pytest.raises(UsageError):
        VisionStep(model=model).workload()
