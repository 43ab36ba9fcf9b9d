"""Settings of generators are checked on input, so that no value overflows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hespas.cli.main import app
from hespas.generators.collectives import CollectiveBenchmark
from hespas.generators.dlrm import DlrmStep
from hespas.generators.llm import Layout, LlmStep, Training, load_model
from hespas.generators.random_dag import RandomJob
from hespas.generators.spec import MOST_COUNT
from hespas.generators.vision import vit_b_16
from hespas.graph.errors import UsageError

FAR = (MOST_COUNT + 1, 2**61, 2**64, 10**400)
SIZES = (
    *("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "window", "chunk", "experts"),
    *("topk", "moe_ffn", "shared_ffn", "latent", "dense_layers", "moe_every", "mtp_layers", "mamba_heads"),
    *("mamba_head_dim", "mamba_state", "mamba_groups", "mamba_conv", "mamba_chunk", "q_lora", "kv_lora"),
    *("nope_dim", "rope_dim", "v_dim", "max_positions"),
)


@pytest.mark.parametrize("key", SIZES)
def test_a_size_of_a_model_is_bounded(tmp_path: Path, key: str) -> None:
    path = tmp_path / "m.toml"
    sizes = {"name": '"m"', "hidden": "64", "layers": "2", "heads": "2", "ffn": "128", "vocab": "100"}
    sizes["head_dim"] = "32"
    for value in (str(MOST_COUNT + 1), str(2**61), '"2 * 4611686018427387904 / 2"'):
        path.write_text("".join(f"{name} = {text}\n" for name, text in (sizes | {key: value}).items()))
        done = CliRunner().invoke(app, ["generate", "llm", str(path), "--dry-run"])
        assert done.exit_code == 3, done.output
        assert f"{key}: " in done.output
        assert "is beyond" in done.output


_MODEL = load_model("gpt-2")
_ONE = Training(seq=64, global_batch=1)


def _step(layout: Layout, training: Training = _ONE) -> LlmStep:
    return LlmStep(model=_MODEL, layout=layout, training=training)


def _makers(number: int) -> dict[str, Callable[[], object]]:
    """Ways to give a setting, each by its name."""
    adapted = partial(Training, seq=64, global_batch=1, lora_rank=number)
    return {
        "expert_node": lambda: _step(Layout(expert_node=number)).workload(),
        "dp": lambda: _step(Layout(dp=number)).account(),
        "lora": lambda: _step(Layout(), adapted()).account(),
        "rows": lambda: DlrmStep(rows=number).account(),
        "bottom": lambda: DlrmStep(bottom=(13, number)).account(),
        "nodes": lambda: RandomJob(ranks=2, nodes=number).workload(),
        "ranks": lambda: CollectiveBenchmark(kinds=("all_reduce",), sizes=(8,), ranks=number).workload(),
        "vision": lambda: replace(vit_b_16(), hidden=number),
    }


@pytest.mark.parametrize("number", FAR)
@pytest.mark.parametrize("name", _makers(1))
def test_a_setting_is_bounded(name: str, number: int) -> None:
    with pytest.raises(UsageError):
        _makers(number)[name]()
