"""Learned models that the device file of a user names: they have priority, in the composite too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as with_fields

from hespas.estimators import load_estimator
from hespas.estimators.composite import Composite
from hespas.estimators.interface import OperationModel
from hespas.estimators.learned import Learned
from hespas.estimators.learned.serialization import (
    LearnedModel,
    forget_models,
    load_model,
    save_model,
    shipped_folder,
)
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, UsageError
from hespas.hardware import Device, load_device, write_device
from hespas.operations import Labels, Operations, build

V4 = load_device("TPU-v4")


def products(*sizes: float) -> Operations:
    size = np.array(sizes, np.float64)
    scheme = Labels.constant("f16", len(size))
    return build.matmuls(scheme, batch=np.ones(len(size)), m=size, n=size, k=size)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    """A TPU whose own models say twice what the shipped ones do, up to sizes of 2^12."""
    for name in ("gemm-tpu", "vector-tpu"):
        shipped = load_model(shipped_folder() / f"{name}.json")
        main = shipped.forests["main"]
        twice = {**shipped.forests, "main": replace(main, baseline=main.baseline + np.log(2))}
        card = with_fields(shipped.card, name=f"my-{name}")
        save_model(LearnedModel(card, twice, shipped.octaves[(shipped.octaves <= 12).all(axis=1)]), tmp_path)
    cards = tuple(str(tmp_path / f"my-{name}.json") for name in ("gemm-tpu", "vector-tpu"))
    forget_models()
    yield load_device(write_device(replace(V4, learned_models=cards), tmp_path / "mine.toml"))
    forget_models()


def test_own_models_are_asked_first(device: Device) -> None:
    ops = products(64, 512, 2048)
    own, shipped = (Learned().predict(ops, each).duration_ns for each in (device, V4))
    assert own == pytest.approx(2 * shipped)
    named = Learned(models=str(shipped_folder())).predict(ops, device).duration_ns
    assert np.array_equal(named, shipped), "a folder that is named is asked alone"


def test_what_they_do_not_cover_the_shipped_ones_do() -> None:
    gpu = load_device("H100-SXM")
    mine = replace(gpu, learned_models=(str(shipped_folder() / "quantize.json"),))
    told = Diagnostics()
    said, shipped = (Learned().predict(products(512), each, told).duration_ns for each in (mine, gpu))
    assert np.array_equal(said, shipped)
    assert np.isfinite(said).all()
    assert "learned.refused" not in {each.code for each in told}
    alone = Learned(shipped=False).predict(products(512), mine, told)
    assert np.isnan(alone.duration_ns).all()
    assert "learned.refused" in {each.code for each in told}


def test_without_any_model_there_is_nobody_to_ask() -> None:
    with pytest.raises(UsageError, match="no learned model named by the file of TPU-v4"):
        Learned(shipped=False).predict(products(64), V4)


def test_the_composite_asks_them_first(device: Device) -> None:
    scheme = Labels.constant("f16", 2)
    sizes = np.array([256.0, 1024.0])
    vectors = build.elementwise(
        "vector",
        scheme,
        op=Labels.constant("relu", 2),
        rows=sizes,
        columns=sizes,
        passes=np.full(2, 2.0),
        flops_per_element=np.ones(2),
    )
    model: OperationModel = Composite()
    for ops in (products(256, 1024), vectors):
        said = model.predict(ops, device)
        assert said.duration_ns == pytest.approx(Learned().predict(ops, device).duration_ns)
        who: list[int] = said.estimator.tolist()
        assert {said.models[each].partition(":")[0] for each in who} == {"learned"}
    stated = load_estimator("composite:order=roofline")
    assert isinstance(stated, OperationModel)
    names = stated.predict(vectors, device).models
    assert names == ("roofline",), "who states an order is not overruled"
    shipped = model.predict(vectors, V4)
    assert shipped.models == Composite().predict(products(64), V4).models
    assert "learned:shipped=false" not in shipped.models


def test_models_that_are_gone_or_damaged_are_errors_with_a_remedy(device: Device, tmp_path: Path) -> None:
    card = tmp_path / "my-gemm-tpu.json"
    card.with_suffix(".npz").write_bytes(b"PK")
    with pytest.raises(FormatError, match="the trees are damaged"):
        Learned().predict(products(64), device)
    card.unlink()
    forget_models()
    for model in (Learned(), Composite()):
        with pytest.raises(FormatError, match="no such learned model") as caught:
            model.predict(products(64), device)
        assert caught.value.path == str(card)
        assert "hespas-validate calibrate" in (caught.value.hint or "")


def test_of_alike_models_the_first_named_speaks_and_stand_ins_come_last(
    device: Device, tmp_path: Path
) -> None:
    ops = products(64, 512)
    later = load_model(Path(device.learned_models[0]))
    main = later.forests["main"]
    wrong = {**later.forests, "main": replace(main, baseline=main.baseline + 3)}
    many = [with_fields(cell, rows=dict.fromkeys(cell.rows, 10**6)) for cell in later.card.cells]
    card = with_fields(later.card, name="older", cells=tuple(many))
    save_model(LearnedModel(card, wrong, later.octaves), tmp_path)
    first, older = device.learned_models[0], str(tmp_path / "older.json")
    newest, oldest = (replace(V4, learned_models=names) for names in ((first, older), (older, first)))
    said = [Learned().predict(ops, each).duration_ns for each in (device, newest, oldest)]
    assert np.array_equal(said[0], said[1])
    assert said[2] == pytest.approx(said[0] * np.exp(3)), "more rows do not make a model newer"


def test_a_format_the_package_knows_is_not_stood_in_for() -> None:
    gpu = load_device("H100-SXM")
    mine = replace(gpu, learned_models=(str(shipped_folder() / "gemm-f16.json"),))
    bf16 = replace(products(512, 1024), scheme=Labels.constant("bf16", 2))
    said, shipped = (Learned().predict(bf16, each).duration_ns for each in (mine, gpu))
    assert np.array_equal(said, shipped)
    alone = Learned(shipped=False).predict(bf16, mine)
    assert np.isfinite(alone.duration_ns).all(), "alone it stands in"
    assert not np.array_equal(alone.duration_ns, shipped)
