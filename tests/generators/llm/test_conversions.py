"""Costs of conversions next to products in narrow formats, and unfused biases of experts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model import Model
from hespas.generators.llm.model_file import load_model
from hespas.generators.llm.settings import Style, Training, precision_of
from hespas.generators.llm.step import stage_passes
from hespas.graph import OpGraph


def short(name: str) -> Model:
    whole = load_model(name)
    return replace(whole, layers=whole.layers[:1])


def step(precision: str, style: Style, name: str = "Llama-3-8B", lora_rank: int = 0) -> OpGraph:
    training = Training(
        seq=1024, global_batch=2, precision=precision_of(precision), style=style, lora_rank=lora_rank
    )
    return stage_passes(short(name), Layout(dp=2, zero=3), training, 0).graph


def names(graph: OpGraph, suffix: str) -> list[str]:
    return [name for node in range(len(graph)) if (name := graph.node_name(node)).endswith(suffix)]


@pytest.mark.parametrize(
    ("precision", "looks", "layouts"),
    [("mxfp8", 0, 1), ("fp8-delayed", 0, 1), ("fp8-current", 1, 1), ("fp8-rowwise", 1, 2), ("int8", 1, 2)],
)
def test_scales_of_what_is_converted_are_looked_for_first(precision: str, looks: int, layouts: int) -> None:
    graph = step(precision, "megatron")
    converted = names(graph, ".quantize")
    assert len(converted) == 8 * layouts, "the inputs of four layers, and the gradients of their outputs"
    assert len(names(graph, ".absmax")) == looks * len(converted)


def test_matrices_are_converted_at_each_use_but_in_megatron() -> None:
    assert names(step("fp8-current", "megatron"), ".matrix.quantize") == []
    styles: list[Style] = ["torchtitan", "maxtext"]
    for style in styles:
        graph = step("fp8-current", style)
        uses = Counter(name.rpartition(".")[0] for name in names(graph, ".matrix.quantize"))
        assert len(uses) == 8, "four layers, forward and backward"
        assert names(step("bf16", style), ".quantize") == []
        assert names(step("fp8-current", style, lora_rank=8), ".matrix.quantize") == []


def test_a_matrix_is_read_and_written_once_in_its_format() -> None:
    graph = step("mxfp8", "torchtitan")
    node = next(node for node in range(len(graph)) if graph.node_name(node).endswith("fc2.matrix.quantize"))
    elements = 14336 * 4096
    assert graph.bytes_read[node] == 2 * elements
    assert elements <= graph.bytes_written[node] < 1.1 * elements


def test_biases_of_experts_are_added_in_32_bits_where_nothing_fuses_them() -> None:
    graph = step("bf16", "megatron", "GPT-OSS-120B")
    found = names(graph, "fc2.bias_add") + names(graph, "fc2.bias_add.backward")
    assert len(found) == 2
    node = next(node for node in range(len(graph)) if graph.node_name(node).endswith("fc2.bias_add"))
    rows = 1024 * 4
    assert graph.bytes_written[node] == 4 * rows * 2880
    others: list[tuple[Style, str]] = [("maxtext", "GPT-OSS-120B"), ("megatron", "Qwen3-30B-A3B")]
    for style, name in others:
        assert names(step("bf16", style, name), "bias_add") == []
