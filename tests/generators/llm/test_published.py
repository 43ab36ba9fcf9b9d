"""Settings from rows of tables of published runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hespas.generators.llm.flops import Convention, model_flops
from hespas.generators.llm.layout import Layout, check_layout, layers_of_stages
from hespas.generators.llm.published import (
    PublishedRun,
    convention_of,
    published_flops,
    publisher_flops,
    row_of,
    rows_of,
    run_of,
)
from hespas.generators.llm.settings import Overlap, Recompute
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import FormatError, HespasError, UnsupportedError, UsageError
from tools.published_settings import with_settings

DATA = Path(__file__).parents[4] / "shared" / "data" / "published_e2e"
TABLE = DATA / "published_training.csv"
absent = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data/published_e2e is not here")

BASE = {
    "source": "Megatron-Bridge", "model": "Llama-3-8B", "num_accelerators": "64", "seq_len": "8192",
    "global_batch": "128", "micro_batch": "1", "dp": "64", "tp": "1", "pp": "1", "vp": "1", "cp": "1",
    "fsdp": "distributed optimizer (zero1)", "recompute": "none", "precision": "bf16",
}  # fmt: skip


def made(**cells: str) -> PublishedRun:
    return run_of(BASE | cells, "runs.csv:3", Diagnostics())


def told(**cells: str) -> set[str]:
    """Codes of what is assumed about a row."""
    diagnostics = Diagnostics()
    run_of(BASE | cells, "runs.csv:3", diagnostics)
    return {each.code for each in diagnostics}


# --- the published table


@absent
def test_every_published_row_gives_a_valid_layout_or_says_why_not() -> None:
    refused: Counter[str] = Counter()
    taken = 0
    for number, row in enumerate(map(with_settings, rows_of(TABLE))):
        try:
            run = run_of(row, f"{TABLE}:{number}", Diagnostics(), DATA / "models.csv")
            check_layout(run.model, run.layout, run.training)
        except HespasError as error:
            refused[f"{type(error).__name__} {error.code or row['model']}"] += 1
            continue
        assert run.layout.ranks == int(row["num_accelerators"])
        assert sum(len(chunk) for stage in layers_of_stages(run.model, run.layout) for chunk in stage) == len(
            run.model.all_layers
        )
        if row["micro_batch"]:
            assert run.training.micro_batch == float(row["micro_batch"])
        taken += 1
    assert taken == 521
    assert refused == {
        "UnsupportedError Nemotron-3-Super": 14,
        "UnsupportedError Nemotron-3-Ultra": 1,
        "UnsupportedError Nemotron-3.5-Lightning": 1,
        "UnsupportedError DeepSeek-V4-Flash": 1,  # compressed attention
        "UsageError ep-divides-stage": 1,  # 64 expert ranks where a stage has 32: a slip of the table
    }


@absent
def test_what_a_published_row_does_not_say_is_told() -> None:
    for number, row in enumerate(map(with_settings, rows_of(TABLE))):
        missing = row["missing"]
        if "model configuration" in missing or row["model"] == "DeepSeek-V4-Flash":
            continue
        diagnostics = Diagnostics()
        run_of(row, f"{TABLE}:{number}", diagnostics)
        codes = {each.code for each in diagnostics}
        assert all(each.location == f"{TABLE}:{number}" for each in diagnostics)
        for column, code in (("recompute", "recompute"), ("micro_batch", "micro-batch"), ("vp", "vp")):
            assert (column in missing.split(", ")) <= (f"row.{code}" in codes), number


@absent
def test_flops_of_every_fully_specified_row_are_reproduced() -> None:
    compared = 0
    for number, row in enumerate(map(with_settings, rows_of(TABLE))):
        try:
            run = run_of(row, f"{TABLE}:{number}", Diagnostics())
        except UnsupportedError:
            continue
        stated = float(row["model_tflop_per_step"]) * 1e12
        within = 1e-5 if row["flop_source"].startswith("analytic") else 0.01
        assert published_flops(run) == pytest.approx(stated, rel=within), number
        compared += row["fully_specified"] == "yes"
    assert compared == 476


# --- single cells


@pytest.mark.parametrize(
    ("text", "zero", "shard"),
    [
        ("distributed optimizer (zero1)", 1, 0),
        ("fsdp-full-shard (zero3)", 3, 0),
        ("fsdp-shard-grad-op (zero2)", 2, 0),
        ("fsdp2 full shard (8)", 3, 8),
        ("fsdp2 full shard (64)", 3, 0),
        ("megatron-fsdp (64)", 3, 0),
        ("ici_fsdp 8; dcn_data 4; dcn_fsdp 1", 3, 8),
        ("ici_fsdp -1; data parallel over 2 slices", 3, 32),
        ("ici_fsdp_parallelism=-1", 3, 0),
        ("frozen weights replicated over DP; only LoRA adapters trained", 0, 0),
        ("none (replicated optimizer)", 0, 0),
    ],
)
def test_sharding(text: str, zero: int, shard: int) -> None:
    layout = made(fsdp=text).layout
    assert (layout.zero, layout.shard) == (zero, shard)


@pytest.mark.parametrize(
    ("text", "modules", "layers"),
    [
        ("full (every block)", {"block"}, -1),
        ("full block 21", {"block"}, 21),
        ("granularity selective", {"core_attn"}, -1),
        ("selective (attention core)", {"core_attn"}, -1),
        ("selective: layernorm+moe_act", {"layernorm", "moe_act"}, -1),
        ("selective: mla_up_proj; granularity selective", {"mla_up_proj"}, -1),
        ("selective: mlp", {"mlp"}, -1),
        ("remat_policy full", {"block"}, -1),
        ("remat_policy minimal", {"layernorm", "mlp_act", "core_attn"}, -1),
        ("remat_policy minimal_flash", {"layernorm", "mlp_act"}, -1),
        ("remat_policy custom; offload to host: decoder_layer_input+out_proj", {"block"}, -1),
    ],
)
def test_recomputation(text: str, modules: set[str], layers: int) -> None:
    recompute = made(recompute=text).training.recompute
    assert (set(recompute.modules), recompute.layers) == (modules, layers)


@pytest.mark.parametrize("text", ["none", "none set in recipe"])
def test_no_recomputation(text: str) -> None:
    assert made(recompute=text).training.recompute == Recompute()


def test_recomputation_of_some_layers_and_what_goes_to_the_host() -> None:
    assert made(recompute="selective (every other layer)").training.recompute.every == 2
    custom = made(recompute="remat_policy custom; offload to host: decoder_layer_input+out_proj").training
    assert custom.recompute.offloaded == {"decoder_layer_input", "out_proj"}
    away = made(optimizer="CPU offload of activations: 40 layers").training.recompute
    assert away == Recompute(layers=40, offloaded=frozenset({"block"}))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bf16", "bf16"),
        ("bf16 (implied by the MFU column)", "bf16"),
        ("fp16 mixed", "fp16"),
        ("mxfp8-rceil", "mxfp8"),
        ("fp8-current-scaling", "fp8-current"),
        ("fp8 hybrid, delayed scaling", "fp8-delayed"),
        ("fp8-te", "fp8-delayed"),
        ("fp8 delayed scaling; fp8 attention", "fp8-attention"),
        ("fp8-rowwise", "fp8-rowwise"),
        ("fp8-tensorwise-dynamic (torchao Float8 linear)", "fp8-current"),
        ("nvfp4; attention DelayedScaling", "nvfp4-attention"),
        ("nvfp4", "nvfp4"),
        ("int8 matmuls (AQT), bf16 elsewhere", "int8"),
    ],
)
def test_precisions(text: str, name: str) -> None:
    assert made(precision=text).training.precision.name == name


def test_styles_follow_the_framework() -> None:
    assert made().training.style == "megatron"
    assert made(source="torchtitan").training.style == "torchtitan"
    assert made(source="tpu-recipes").training.style == "maxtext"
    assert made(source="MLPerf-Training", framework="maxtext").training.style == "maxtext"


def test_virtual_stages_are_interleaved() -> None:
    cells = {"tp": "1", "pp": "4", "dp": "16", "vp": "4"}
    assert made(**cells).training.schedule == "interleaved"
    assert made(**cells | {"vp": "1"}).training.schedule == "1f1b"


TENSOR = {"tp": "4", "dp": "16", "sequence_parallel": "yes"}


@pytest.mark.parametrize(
    ("cells", "overlap"),
    [
        ({}, Overlap()),
        ({"communication_overlap": "off"}, Overlap.none()),
        ({"framework": "Megatron-LM (2021-04)", "source": "Megatron-LM"}, Overlap.none()),
        (
            {"framework": "Megatron-LM (2022-05)", "source": "Megatron-LM"},
            replace(Overlap.none(), tensor_backward=True),
        ),
        (TENSOR | {"source": "MLPerf-Training"}, Overlap()),
        (TENSOR | {"source": "MLPerf-Training", "tensor_overlap": "yes"}, Overlap(tensor=True)),
        (TENSOR | {"source": "torchtitan", "tensor_overlap": "yes"}, Overlap(tensor=True)),
        (TENSOR, Overlap(tensor=True)),
        ({"expert_overlap": "yes", "model": "DeepSeek-V2-Lite"}, Overlap(experts=True)),
        ({"expert_overlap": "yes", "model": "Qwen3-30B-A3B"}, Overlap()),
        (TENSOR | {"train_type": "lora"}, Overlap()),
        ({"expert_overlap": "no"}, Overlap()),
    ],
)
def test_overlap(cells: Mapping[str, str], overlap: Overlap) -> None:
    assert made(**cells).training.overlap == overlap


def test_adapters_and_their_rank() -> None:
    assert made(train_type="lora", optimizer="AdamW on LoRA adapters (rank 8)").training.lora_rank == 8
    assert made(train_type="lora", optimizer="Adam").training.lora_rank == 16
    assert made(train_type="sft").training.lora_rank == 0


def test_experts_with_a_capacity() -> None:
    assert made(capacity_factor="1").training.capacity == 1.0
    assert made(capacity_factor="1.25").training.capacity == 1.25
    assert made(capacity_factor="").training.capacity == 0.0


@pytest.mark.parametrize(
    ("cells", "code"),
    [
        ({"recompute": ""}, "row.recompute"),
        ({"recompute": "not stated"}, "row.recompute"),
        ({"micro_batch": ""}, "row.micro-batch"),
        ({"micro_batch": "3"}, "row.micro-batch"),
        ({"fsdp": ""}, "row.sharding"),
        ({"precision": "posit8"}, "row.precision"),
        ({"train_type": "lora", "optimizer": "Adam"}, "row.lora-rank"),
        ({"capacity_factor": "dropped"}, "row.capacity"),
        ({"pp": "4", "dp": "16", "vp": ""}, "row.vp"),
        (TENSOR | {"sequence_parallel": "", "tensor_overlap": "yes"}, "row.sequence-parallel"),
        (TENSOR | {"model": "GPT-OSS-20B", "ep": "4", "sequence_parallel": "no"}, "row.sequence-parallel"),
        (TENSOR, "row.tensor-overlap"),
        ({"expert_overlap": "yes"}, "row.overlap"),
    ],
)
def test_assumptions_are_told(cells: Mapping[str, str], code: str) -> None:
    assert told(**cells) == {code}


def test_gradients_of_a_row_have_no_more_bits_than_its_activations() -> None:
    assert made(gradient_precision="16bit", precision="fp16").training.precision.gradient == "f16"
    with pytest.raises(FormatError, match="gradients of 16 bits contradict activations of 32 bits"):
        made(gradient_precision="16bit", precision="f32")


def test_a_row_that_says_all_assumes_nothing() -> None:
    assert told() == set()
    assert made().layout == Layout(dp=64, sequence_parallel=False)


def test_the_micro_batch_follows_from_the_passes() -> None:
    assert made(micro_batch="", grad_accum="2", dp="32", num_accelerators="32").training.micro_batch == 2
    assert told(micro_batch="", grad_accum="2") == set()
    assert made(micro_batch="3").training.micro_batch == 2


def test_learned_positions_are_as_many_as_tokens() -> None:
    assert made(model="MPT-7b", seq_len="65536").model.max_positions == 65536


# --- what is no row


@pytest.mark.parametrize("text", ["x", "-1", "0", "1.5", "nan", "inf", "1e12"])
def test_cells_that_are_no_counts(text: str) -> None:
    with pytest.raises(FormatError, match="tp is '") as caught:
        made(tp=text)
    assert (caught.value.path, caught.value.position) == ("runs.csv:3", "column tp")


def test_counts_may_be_written_as_real_numbers() -> None:
    assert made(micro_batch="2.0").training.micro_batch == 2


def test_degrees_are_of_the_accelerators() -> None:
    with pytest.raises(FormatError, match="= 128, but the row has 64 accelerators"):
        made(tp="2")
    assert made(tp="2", dp="", sequence_parallel="yes").layout.dp == 32


@pytest.mark.parametrize("name", ["Llama-9-1T", "", "../other.toml", "mine.toml"])
def test_unknown_models(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"the configuration of model .* is not known"):
        made(model=name)


def table(folder: Path, *rows: dict[str, str]) -> Path:
    path = folder / "runs.csv"
    lines = [",".join(BASE), *(",".join((BASE | row).values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_rows_are_counted_from_nought(tmp_path: Path) -> None:
    runs = table(tmp_path, {"seq_len": "1024"}, {"seq_len": "2048"})
    assert [row_of(runs, number, Diagnostics()).training.seq for number in (0, 1)] == [1024, 2048]
    assert row_of(runs, 1, Diagnostics()).place == f"{runs}:1"
    with pytest.raises(UsageError, match="has no row 2"):
        row_of(runs, 2, Diagnostics())


def test_models_of_a_table_beside(tmp_path: Path) -> None:
    runs = table(tmp_path, {"model": "mine"})
    (tmp_path / "models.csv").write_text("model,layers,hidden,ffn,heads,vocab\nmine,2,64,256,4,100\n")
    diagnostics = Diagnostics()
    assert row_of(runs, 0, diagnostics).model.hidden == 64
    assert [each.code for each in diagnostics] == ["row.model"]


def test_what_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    with pytest.raises(FormatError, match="No such file"):
        row_of(path, 0, Diagnostics())
    path.write_bytes(b"model\nx\n")
    with pytest.raises(FormatError, match="missing column global_batch, num_accelerators, seq_len"):
        row_of(path, 0, Diagnostics())
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="not a table"):
        row_of(path, 0, Diagnostics())


def test_rows_and_columns_that_may_be_shifted_are_refused(tmp_path: Path) -> None:
    runs = table(tmp_path, {"seq_len": "1,024"})
    with pytest.raises(FormatError, match="more cells than the header") as caught:
        row_of(runs, 0, Diagnostics())
    assert caught.value.position == "row 0"
    text = table(tmp_path, {}).read_text()
    runs.write_text("".join(f"{line},\n" for line in text.splitlines()))  # a comma ends each line
    assert row_of(runs, 0, Diagnostics()).training.seq > 0
    head, row = text.splitlines()
    runs.write_text(f"{head}\n{row.rpartition(',')[0]}\n")
    with pytest.raises(FormatError, match="fewer cells than the header") as caught:
        row_of(runs, 0, Diagnostics())
    assert caught.value.position == "row 0"
    runs.write_text("".join(f"seq_len,{line}\n" for line in text.splitlines()))
    with pytest.raises(FormatError, match="several columns are called 'seq_len'"):
        row_of(runs, 0, Diagnostics())


_NINES = "9" * 5000


@pytest.mark.parametrize(
    "cells",
    [
        {"recompute": f"full block {_NINES}"}, {"fsdp": "over 0 slices"}, {"fsdp": f"over {_NINES} slices"},
        {"fsdp": f"ici_fsdp {_NINES}"},
        {"recompute": "none", "optimizer": f"cpu offload of activations: {_NINES} layers"},
    ],
)  # fmt: skip
def test_numbers_beyond_all_counts_inside_of_texts(cells: Mapping[str, str]) -> None:
    assert made(**cells).layout.ranks > 0


@pytest.mark.parametrize(
    ("attention", "match"),
    [("mla", "kv_lora, qk_nope, qk_rope, v_dim missing"), ("zzz", "attention is zzz")],
)
def test_attention_of_a_table_is_not_guessed(attention: str, match: str, tmp_path: Path) -> None:
    head = "model,layers,hidden,ffn,heads,vocab,attention,sliding_window,sliding_pattern\nmine,2,64,256,4,100"
    runs = table(tmp_path, {"model": "mine"})
    (tmp_path / "models.csv").write_text(f"{head},{attention},,\n")
    with pytest.raises(UnsupportedError, match=match):
        row_of(runs, 0, Diagnostics())
    (tmp_path / "models.csv").write_text(f"{head},gqa,128,{_NINES} local : 1 global\n")
    assert row_of(runs, 0, Diagnostics()).model.hidden == 64


# --- conventions


def test_sources_count_attention_in_their_way() -> None:
    assert convention_of(made().row) is Convention.HALF
    assert convention_of(made(source="llm-foundry").row) is Convention.FULL
    assert convention_of(made(source="tpu-recipes", attention_flops="full").row) is Convention.FULL
    run = made(source="llm-foundry")
    assert publisher_flops(run) == model_flops(run.model, run.training, Convention.FULL)
    assert published_flops(run) == model_flops(run.model, run.training, Convention.HALF)


def test_rates_of_hardware_count_layers_again() -> None:
    """arXiv 2104.04473, section 5.1: 96 B s l h^2 (1 + s / 6h + V / 16 l h)."""
    cells = {"source": "Megatron-LM", "model": "Megatron-GPT21-145B", "seq_len": "2048"}
    run = made(hw_tflops_per_gpu="148", **cells)
    batch, seq, layers, hidden, vocab = 128, 2048, 80, 12288, 51200
    share = 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
    formula = 96 * batch * seq * layers * hidden**2 * share
    assert publisher_flops(run) == pytest.approx(formula, rel=1e-9)
