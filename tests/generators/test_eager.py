"""Eager transformers: published sizes, closed forms, fusion, checks and simulators."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hespas
from hespas.generators.eager import EagerModel, EagerStep, eager_model, eager_models
from hespas.graph import OpClass, OpGraph
from hespas.graph.errors import UsageError
from hespas.operations import operations_of

SMALL = [replace(model, layers=2) for model in eager_models()]


def graph_of(model: EagerModel, *, training: bool = False, compiled: bool = False) -> OpGraph:
    step = EagerStep(model=model, batch=2, length=128, training=training, compiled=compiled)
    return step.workload().classes[0]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("bert-large", 335_141_888),
        ("gpt2-large", 774_030_080),
        ("opt-1.3b", 1_315_758_080),
    ],
)
def test_parameters_are_those_of_the_published_models(name: str, parameters: int) -> None:
    assert eager_model(name).parameters == parameters


@pytest.mark.parametrize("model", SMALL, ids=lambda model: str(model.name))
@pytest.mark.parametrize("training", [False, True])
def test_products_are_those_of_the_closed_form(model: EagerModel, training: bool) -> None:
    step = EagerStep(model=model, batch=2, length=128, training=training)
    found = step.workload().classes[0].contractions.flops.sum()
    assert found == pytest.approx(step.account().model_flops_per_step, rel=1e-12)


@pytest.mark.parametrize("model", SMALL, ids=lambda model: str(model.name))
@pytest.mark.parametrize("training", [False, True])
def test_steps_are_valid_and_every_operator_gets_a_time(model: EagerModel, training: bool) -> None:
    workload = EagerStep(model=model, batch=2, length=128, training=training).workload()
    assert hespas.check(workload).valid
    times = hespas.estimate(workload, "A100-PCIe-40GB").to_pandas()["duration_ns"].to_numpy()
    assert np.isfinite(times).all()
    assert hespas.simulate(workload, "A100-PCIe-40GB").step_ns == pytest.approx(times.sum(), rel=1e-6)


def test_products_are_of_full_float32() -> None:
    ops = operations_of(graph_of(SMALL[0]))
    assert {ops.scheme[row] for row in ops.kind.where("matmul").tolist()} == {"f32_full"}


def test_gradients_are_as_many_as_parameters() -> None:
    """Backward adds to those of all parameters, and to the shared one of the language head once more."""
    model = eager_model("gpt2-large")
    graph = graph_of(replace(model, layers=2), training=True)
    added = [
        float(graph.types.elements(int(graph.results.row(node)[0])))
        for node in range(len(graph))
        if graph.op_name(node) == "aten::add_"
    ]
    assert sum(added) == replace(model, layers=2).parameters + model.vocab * model.hidden


@pytest.mark.parametrize("name", ["bert-large", "gpt2-large", "opt-1.3b"])
def test_compiling_fuses_between_products_only(name: str) -> None:
    model = replace(eager_model(name), layers=2)
    eager, compiled = graph_of(model), graph_of(model, compiled=True)
    assert compiled.contractions.flops.sum() == eager.contractions.flops.sum()
    moved = [graph.bytes_moved[graph.op_class != OpClass.CONTRACTION].sum() for graph in (compiled, eager)]
    assert moved[0] < moved[1]
    assert len(compiled) < len(eager)


def test_views_force_copies_in_another_order() -> None:
    graph = graph_of(SMALL[0])
    copies = [node for node in range(len(graph)) if graph.op_name(node) == "aten::clone"]
    assert len(copies) == 4 * SMALL[0].layers
    assert (operations_of(graph).dim("strided")[copies] == 1).all()


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (EagerStep(model=SMALL[0], batch=0), "batch is 0, but must be 1 or more"),
        (EagerStep(model=SMALL[0], length=513), "512 positions"),
        (
            EagerStep(model=SMALL[0], length=128, training=True, compiled=True),
            "not available for training steps",
        ),
        (EagerStep(model=replace(SMALL[-1], experts=0)), "experts"),
        (EagerStep(model=replace(SMALL[0], heads=0)), "heads is 0, but must be 1 or more"),
        (EagerStep(model=replace(SMALL[-1], layers=10_001)), "layers"),
    ],
)
def test_settings_that_cannot_be_are_refused(step: EagerStep, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        step.workload()


def test_unknown_models_are_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="gpt5"):
        eager_model("gpt5")
