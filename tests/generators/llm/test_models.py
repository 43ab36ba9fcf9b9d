"""Models that ship and files of one's own: parameters as published, expressions, faults that name the key."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.generators.llm.expressions import ExpressionError, evaluated
from hespas.generators.llm.model import Attention, Mamba, matrix_parameters, model_parameters
from hespas.generators.llm.model_file import load_model, model_names
from hespas.graph.errors import FormatError, UsageError

TABLE = Path(__file__).parents[4] / "shared" / "data" / "published_e2e" / "models.csv"
PUBLISHED = {  # billions, from the models' own pages and papers
    "Llama-3.1-405B": 405.9, "Llama-3-8B": 8.03, "Llama-3.2-1B": 1.236, "Mistral-7B": 7.24,
    "Mixtral-8x7B": 46.7,
    "DeepSeek-V3-noMTP": 671.0, "Qwen3-235B-A22B": 235.1, "GPT-2-XL": 1.557, "GPT-OSS-20B": 20.9,
    "Gemma-2-9B": 9.24, "Mamba2-2.7B": 2.70, "Nemotron-3-Nano": 31.6, "Nemotron-4-340B": 341.0,
}  # fmt: skip


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameters_are_those_published(name: str, billions: float) -> None:
    assert model_parameters(load_model(name)) / 1e9 == pytest.approx(billions, rel=0.003)


@pytest.mark.skipif(not TABLE.exists(), reason="the shared table of models is not here")
def test_parameters_are_those_of_the_table() -> None:
    with TABLE.open(newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if row["params_total_b"]]
    assert len(rows) > 50
    for row in rows:
        model = load_model(row["model"])
        held = model_parameters(model) - model.max_positions * model.hidden
        assert held / 1e9 == pytest.approx(float(row["params_total_b"]), rel=0.004), row["model"]
        head = model.vocab * model.hidden * (1 + model.mtp_layers) + 2 * model.hidden**2 * model.mtp_layers
        used = head + sum(matrix_parameters(block, model.hidden, active=True) for block in model.blocks())
        assert used / 1e9 == pytest.approx(float(row["params_active_matmul_b"]), rel=0.004), row["model"]


def test_names_are_found_however_they_are_written() -> None:
    assert load_model("llama 3.1 8b") == load_model("Llama-3.1-8B") == load_model("llama3.1-8b")
    with pytest.raises(UsageError) as caught:
        load_model("lama-3-8b")
    assert "Llama-3-8B" in (caught.value.hint or "")


def test_every_model_loads() -> None:
    for name in model_names():
        model = load_model(name)
        assert model.source
        assert model_parameters(model) > 0
    assert any(isinstance(block, Mamba) for block in load_model("Nemotron-3-Nano").blocks())
    windows = [block.window for block in load_model("Gemma-2-9B").blocks() if isinstance(block, Attention)]
    assert windows[:4] == [4096, 0, 4096, 0]


GOOD = 'name = "mine"\nhidden = 256\nlayers = 2\nheads = 4\nvocab = 512\nffn = 512\n'


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("hidden = 256\n", ""), "hidden: missing key"),
        (("ffn", "fnn"), "did you mean 'ffn'"),
        (("ffn = 512", 'ffn = "4 * hiden"'), "no size is called 'hiden'"),
        (("ffn = 512", 'ffn = "hidden / 3"'), "ffn is 85.3333, and must be a whole number"),
        (("ffn = 512", 'ffn = "2 * ffn"'), "need each other"),
        (("ffn = 512", "ffn = true"), "expected a whole number or an expression"),
        (("layers = 2", "layers = 0"), "expected 1 or more, got 0"),
        (("layers = 2", "layers = 10000000000"), "more than 100,000"),
        (("layers = 2", 'layers = 3\nhybrid = "M*"'), "2 letters for 3 layers"),
        (("layers = 2", 'layers = 2\nhybrid = "MX"'), "'X' is no kind of layer"),
        (("layers = 2", 'layers = 2\nwindows = "LLX"'), "other letters than L and G"),
    ],
)
def test_faults_name_the_key(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert load_model(path).hidden == 256
    path.write_text(GOOD.replace(*change))
    with pytest.raises(FormatError) as caught:
        load_model(path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("2 + 3 * 4", 14), ("(2 + 3) * 4", 20), ("10 - 4 - 3", 3), ("7 // 2", 3), ("8 / 4", 2), ("9 % 4", 1),
     ("round_up(8 * 4096 / 3, 256)", 11008), ("max(3, min(a, 9))", 7), ("((((a))))", 7)],
)  # fmt: skip
def test_values_of_expressions(text: str, value: int) -> None:
    assert evaluated({"a": 7, "x": text})["x"] == value


@pytest.mark.parametrize(
    "text",
    ["", "2 +", "* 2", "2 3", "(2", "2)", "round_up(2)", "a.b", "__import__('os')", "1 / 0", "2 - 3",
     "9" * 600,
     "max(1,2,3)", "()", "max", "2 ** 3", "(1, 2)", "min(1 2)"],
)  # fmt: skip
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluated({"a": 7, "x": text})


@given(st.text(alphabet="0123456789ab+-*/%(), ", max_size=40))
def test_any_text_is_a_count_or_an_error(text: str) -> None:
    try:
        value = evaluated({"a": 7, "b": 3, "x": text})["x"]
    except ExpressionError:
        return
    assert value >= 0


def test_depth_costs_no_stack() -> None:
    assert evaluated({"x": "(" * 240 + "1" + ")" * 240})["x"] == 1
