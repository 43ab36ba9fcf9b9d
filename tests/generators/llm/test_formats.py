"""Number formats: those that a device multiplies, and the fallback without units for a format."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hespas
from hespas.generators.dlrm import DlrmStep
from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model import Attention, Mlp
from hespas.generators.llm.settings import precision_of
from hespas.graph import Diagnostics, Severity, Workload
from hespas.graph.errors import UnsupportedError
from hespas.hardware import load_device, peak_for, type_multiplied
from tests.generators.llm.small_models import DENSE, step

WIDE = replace(DENSE, hidden=4096, layers=((Attention(heads=32, kv_heads=8, head_dim=128), Mlp(ffn=14336)),))


def job(precision: str) -> Workload:
    return step(WIDE, Layout(), seq=1024, global_batch=1, precision=precision_of(precision))


def took_ns(precision: str, device: str, found: Diagnostics | None = None) -> float:
    return hespas.simulate(job(precision), device, estimator="roofline", diagnostics=found).step_ns


@pytest.mark.parametrize("alias", ["fp32", "float32", "f32_full"])
def test_f32_is_ieee_and_tf32_has_a_name_of_its_own(alias: str) -> None:
    assert precision_of(alias) is precision_of("f32")
    ieee, rounded = took_ns("f32", "H100-SXM"), took_ns("tf32", "H100-SXM")
    assert ieee > 4 * rounded
    flops = sum(float(each.contractions.flops.sum()) for each in job("bf16").classes)
    assert ieee * 1e-9 > flops / peak_for(load_device("H100-SXM"), "vector", "f32").flops_per_s
    assert took_ns("tf32", "V100-SXM2-32GB") == pytest.approx(took_ns("f32", "V100-SXM2-32GB"), rel=1e-6)


def test_products_of_f32_on_tf32_units_are_reported() -> None:
    found = Diagnostics()
    took_ns("tf32", "H100-SXM", found)
    assert found.counts()["estimate.tf32"] > 0
    found = Diagnostics()
    took_ns("f32", "H100-SXM", found)
    assert "estimate.tf32" not in found.counts()


def test_recommendation_models_have_both_too() -> None:
    small = DlrmStep(ranks=2, batch=64, tables=2, rows=64)
    products = {
        name: set(replace(small, dtype=name).workload().classes[0].contractions.products.tolist())
        for name in ("f32", "tf32", "bf16")
    }
    assert products == {"f32": {6}, "tf32": {1}, "bf16": {1}}


@pytest.mark.parametrize(
    ("device", "precision", "wider"),
    [
        ("A100-SXM-80GB", "fp8-current", "bf16"),
        ("A100-SXM-80GB", "fp8-attention", "bf16"),
        ("V100-SXM2-32GB", "fp8-current", "f16"),
        ("H20", "nvfp4", "bf16"),
        ("H100-SXM", "mxfp8", "bf16"),
        ("MI300X", "mxfp8", "bf16"),
        ("MI355X", "nvfp4", "bf16"),
    ],
)
def test_a_format_without_units_runs_in_a_wider_one(device: str, precision: str, wider: str) -> None:
    name = precision_of(precision).matmul
    assert type_multiplied(load_device(device), name) == wider
    found = Diagnostics()
    took = took_ns(precision, device, found)
    told = [each for each in found if each.code == "estimate.no-units"]
    assert all(each.severity is Severity.WARNING for each in told)
    assert [each for each in told if name in each.message]
    assert took >= took_ns("bf16" if wider == "bf16" else "fp16", device)
    with pytest.raises(UnsupportedError, match=f"no matrix units for .*{name}"):
        hespas.simulate(job(precision), device, on_unknown="error")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("H100-SXM", "f8E4M3FN"),
        ("MI300X", "f8E4M3FN"),
        ("B200-SXM", "nvfp4"),
        ("B200-SXM", "mxfp8"),
        ("MI355X", "mxfp4"),
        ("L4", "f8E5M2"),
        ("A100-SXM-80GB", "i8"),
        ("TPU-v5p", "f32"),
    ],
)
def test_formats_with_units_stay(device: str, name: str) -> None:
    assert type_multiplied(load_device(device), name) == name


def test_tf32_without_units_warns_and_is_refused_where_asked() -> None:
    found = Diagnostics()
    assert took_ns("tf32", "V100-SXM2-32GB", found) == took_ns("f32", "V100-SXM2-32GB")
    assert [entry.message for entry in found if "no TF32 units" in entry.message]
    with pytest.raises(UnsupportedError, match="no TF32 units"):
        hespas.simulate(job("tf32"), "V100-SXM2-32GB", on_unknown="error")
    hespas.simulate(job("tf32"), "A100-SXM-80GB", on_unknown="error")


def test_bf16_without_units_runs_in_f32() -> None:
    assert type_multiplied(load_device("V100-SXM2-32GB"), "bf16") == "f32"
    assert type_multiplied(load_device("TPU-v3"), "bf16") == "bf16"
