"""ResNet steps: parameters, arguments and collectives as published with the measurements."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not find_spec("jax"):
    pytest.skip("JAX is not installed", allow_module_level=True)

from fixtures.make import resnet
from fixtures.make.untyped import jax

_PUBLISHED = (
    Path(__file__).parents[3] / "shared/data/workloads/resnet_50_train_step_4_devices_1024_batch.mlir.gz"
)


def built(name: str) -> tuple[Any, tuple[Any, ...]]:
    step, arguments = getattr(resnet, name)(jax.sharding.AbstractMesh((4,), ("batch",)))
    return step, arguments


def lowered(name: str) -> str:
    step, arguments = built(name)
    text: str = step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return text


@pytest.mark.parametrize(
    ("name", "parameters", "arguments"),
    [
        ("resnet18", 11_689_512, 170),
        ("resnet34", 21_797_672, 298),
        ("resnet50", 25_557_032, 434),
        ("resnet101", 44_549_160, 842),
        ("resnet200", 64_673_832, 1634),
    ],
)
def test_every_size_has_the_published_parameters(name: str, parameters: int, arguments: int) -> None:
    _, made = built(name)
    assert sum(each.size for each in jax.tree.leaves(made[0].parameters)) == parameters
    assert len(jax.tree.leaves(made)) == arguments


def test_resnet_18_has_the_published_collectives() -> None:
    """144: of 20 norms each way, of their 40 moments, of 62 gradients, and of loss and accuracy."""
    text = lowered("resnet18")
    assert text.count("stablehlo.all_reduce") == 144
    assert text.count("stablehlo.convolution") == 59


@pytest.mark.skipif(not _PUBLISHED.exists(), reason="../shared/data/workloads is not here")
def test_resnet_50_has_the_operations_of_a_published_program() -> None:
    """Products, windows and collectives, shape by shape."""

    def told(text: str) -> Counter[str]:
        found = Counter(re.findall(r"stablehlo\.(?:convolution|dot_general|reduce_window)\b", text))
        found += Counter(re.findall(r"stablehlo\.convolution.* -> (tensor\S+)", text))
        blocks = text.split('"stablehlo.all_reduce"')[1:]
        return found + Counter(block.split("}) : ")[1].splitlines()[0] for block in blocks)

    published = told(gzip.decompress(_PUBLISHED.read_bytes()).decode())
    assert told(lowered("resnet50")) == published
