"""Model files and the shipped models."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from hespas.generators.llm.model import (
    Attention,
    Experts,
    LatentAttention,
    Mamba,
    Mlp,
    model_parameters,
)
from hespas.generators.llm.model_file import load_model, model_in_table, model_names
from hespas.graph.errors import FormatError, UnsupportedError, UsageError

DATA = Path(__file__).parents[4] / "shared" / "data" / "published_e2e"
absent = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data/published_e2e is not here")

PUBLISHED = {
    "GPT-2": 124_439_808,
    "GPT-2-Medium": 354_823_168,
    "GPT-2-Large": 774_030_080,
    "GPT-2-XL": 1_557_611_200,
    "Llama-1-7B": 6_738_415_616,
    "Llama-1-65B": 65_285_660_672,
    "Llama-2-13B": 13_015_864_320,
    "Llama-2-70B": 68_976_648_192,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "CodeLlama-34B": 33_743_970_304,
    "Gemma-2B": 2_506_172_416,
    "Gemma-7B": 8_537_680_896,
    "Gemma-2-2B": 2_614_341_888,
    "Gemma-2-9B": 9_241_705_984,
    "Gemma-2-27B": 27_227_128_320,
    "Gemma-3-1B": 999_885_952,
    "Mistral-7B": 7_241_732_096,
    "Mistral-Nemo-12B": 12_247_782_400,
    "Mistral-Large-2": 122_610_069_504,
    "Mixtral-8x7B": 46_702_792_704,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Phi-3-Mini": 3_821_079_552,
    "Phi-4": 14_659_507_200,
    "Yi-34B": 34_388_917_248,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-MoE-16B": 16_375_728_128,
    "DeepSeek-V3-noMTP": 671_026_404_352,
}
"""Elements of the published weights, every one of them."""
ROUNDED = {
    "Qwen2.5-0.5B": 494_032_768,  # biases of queries, keys and values are left out
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-72B": 72_706_203_648,
    "BLOOM-176B": 176_247_271_424,  # a norm of the embedding is left out
    "DeepSeek-V2": 236e9,
    "Kimi-K2": 1.026e12,
    "Qwen3-Coder-480B-A35B": 480e9,
    "Qwen2-57B-A14B": 57.4e9,
    "Llama-4-Maverick": 400e9,
    "Llama-4-Scout": 107.8e9,
    "GPT-OSS-20B": 20.9e9,
    "GPT-OSS-120B": 116.8e9,
    "Nemotron-4-340B": 341e9,
    "Nemotron-4-15B": 15.6e9,
    "Nemotron-3-Nano": 31.6e9,
    "Mamba2-2.7B": 2.7e9,
    "Mamba2-130M": 129e6,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_exactly_the_published_parameters(name: str) -> None:
    assert model_parameters(load_model(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_models_have_about_the_published_parameters(name: str) -> None:
    assert model_parameters(load_model(name)) == pytest.approx(ROUNDED[name], rel=0.003)


def test_every_model_that_ships_can_be_read_and_names_its_source() -> None:
    assert len(model_names()) >= 100
    for name in model_names():
        model = load_model(name)
        assert model.name == name
        assert len(model.source) > 8


def test_no_two_models_share_a_name() -> None:
    text = (Path(__file__).parents[3] / "hespas/generators/llm/presets.toml").read_text(encoding="utf-8")
    names = re.findall(r'^name = "(.*)"', text, re.MULTILINE)
    for listed in re.findall(r"^aliases = \[(.*)\]", text, re.MULTILINE):
        names += re.findall(r'"([^"]*)"', listed)
    folded = [re.sub(r"[^a-z0-9]", "", name.casefold()) for name in names]
    assert len(folded) == len(set(folded))


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("llama3-70b", "Llama-3-70B"),
        ("LLAMA 3.1 8B", "Llama-3.1-8B"),
        ("llama-3.3-70b", "Llama-3.1-70B"),
        ("gpt3", "GPT-3-175B"),
        ("deepseek_v3_671b", "DeepSeek-V3"),
        ("gpt-oss-20b", "GPT-OSS-20B"),
    ],
)
def test_names_in_other_spellings(asked: str, name: str) -> None:
    assert load_model(asked).name == name


def test_unknown_names_get_suggestions() -> None:
    with pytest.raises(UsageError, match="no model 'llama-3-7b'") as caught:
        load_model("llama-3-7b")
    assert "Llama-3-70B" in (caught.value.hint or "")


# --- what their layers are


def test_patterns_of_layers() -> None:
    gemma = [block.window for block in load_model("Gemma-3-12B").blocks() if isinstance(block, Attention)]
    assert gemma[:12] == [1024] * 5 + [0] + [1024] * 5 + [0]
    scout = [block.chunk for block in load_model("Llama-4-Scout").blocks() if isinstance(block, Attention)]
    assert scout[:4] == [8192, 8192, 8192, 0]
    maverick = [type(layer[1]) for layer in load_model("Llama-4-Maverick").layers]
    assert maverick[:4] == [Mlp, Experts, Mlp, Experts]
    deepseek = load_model("DeepSeek-V3")
    assert [type(layer[1]) for layer in deepseek.layers[:4]] == [Mlp, Mlp, Mlp, Experts]
    assert {type(layer[0]) for layer in deepseek.all_layers} == {LatentAttention}
    assert len(deepseek.all_layers) == 62
    nano = load_model("Nemotron-3-Nano").layers
    assert [type(layer[0]) for layer in nano[:6]] == [Mamba, Experts, Mamba, Experts, Mamba, Attention]
    assert {type(layer[0]) for layer in load_model("Mamba2-2.7B").layers} == {Mamba}


# --- files of one's own

SMALL = """
name = "mine"
hidden = 256
layers = 4
heads = 8
kv_heads = 2
ffn = "round_up(8 * hidden / 3, 64)"
vocab = 1000
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_with_expressions(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, SMALL))
    assert model.layers == ((Attention(heads=8, kv_heads=2, head_dim=32), Mlp(ffn=704)),) * 4


@pytest.mark.parametrize(
    ("change", "where", "wrong", "hint"),
    [
        ("hiden = 3", "hiden", "unknown key", "did you mean 'hidden'"),
        ('heads = "8 *"', "heads", "the expression is incomplete", "name ="),
        ('ffn = "4 * hiden"', "ffn", "unknown size 'hiden'; did you mean 'hidden'", ""),
        ("heads = 8.5", "heads", "expected a whole number or an expression, got 8.5", "4 \\* hidden"),
        ("heads = 7", "head_dim", "is not a whole number", ""),
        ("kv_heads = 3", "kv_heads", "8 heads do not divide over 3 key heads", "divides heads"),
        ("layers = 0", "layers", "expected 1 or more, got 0", "layers = 1"),
        ("layers = 2001", "layers", "2,001 layers exceed the limit of 2,000", ""),
        ("mtp_layers = 999999", "mtp_layers", "999,999 layers exceed", ""),
        ("experts = 4\ntopk = 5", "topk", "a token uses 5 of 4 experts", ""),
        ('hybrid = "M*"', "mamba_heads", "expected 1 or more", ""),
        ('hybrid = "*-"', "hybrid", "2 letters for 4 layers", "a letter for each layer"),
        ('hybrid = "*-X*"', "hybrid", "unknown layer 'X'", "M, \\*, - and E"),
        ('windows = "LX"', "windows", "limited layers need a window or a chunk", ""),
        ('windows = "LX"\nwindow = 8', "windows", "letters other than L and G", ""),
        ('windows = "LG"', "windows", "limited layers need a window or a chunk", "window or chunk"),
        ('norm = "batch"', "norm", "expected one of rms, layer", 'norm = "rms"'),
        ("tied = 1", "tied", "expected true or false, got 1", ""),
        ('kv_heads = "heads"\nheads = "kv_heads"', "heads", "heads and kv_heads depend on each other", ""),
        ("ffn = 0", "ffn", "expected 1 or more", ""),
        ("kv_lora = 64", "nope_dim", "expected 1 or more", ""),
        (
            'hybrid = "MMMM"\nmamba_heads = 6\nmamba_groups = 4',
            "mamba_groups",
            "6 heads do not divide into 4",
            "",
        ),
    ],
)
def test_what_is_wrong_with_a_file_names_the_key(
    tmp_path: Path, change: str, where: str, wrong: str, hint: str
) -> None:
    changed = [line.partition(" = ")[0] for line in change.splitlines()]
    kept = [line for line in SMALL.splitlines() if line.partition(" = ")[0] not in changed]
    path = write(tmp_path, "\n".join([*kept, change]))
    with pytest.raises(FormatError, match=wrong) as caught:
        load_model(path)
    assert (caught.value.path, caught.value.position) == (str(path), where)
    assert re.search(hint, caught.value.hint or "")


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL.replace("vocab = 1000\n", ""))
    with pytest.raises(FormatError, match="missing key") as caught:
        load_model(path)
    assert caught.value.position == "vocab"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"nowhere\.toml"):
        load_model(tmp_path / "nowhere.toml")


# --- tables of models


@absent
def test_models_that_ship_are_those_of_the_table() -> None:
    """Totals of the table are of matrices and embeddings: without positions, norms and biases."""
    compared = 0
    with (DATA / "models.csv").open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            if not row["params_total_b"]:
                continue
            model, total = load_model(row["model"]), float(row["params_total_b"])
            found = (model_parameters(model) - model.max_positions * model.hidden) / 1e9
            assert found == pytest.approx(total, rel=0.0007, abs=0.0006), row["model"]
            compared += 1
    assert compared == 54


@absent
def test_rows_of_the_table_give_the_models_that_ship() -> None:
    table, compared = DATA / "models.csv", 0
    with table.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            try:
                made = model_in_table(table, row["model"])
            except UnsupportedError:
                assert row["attention"].startswith(("hybrid", "compressed"))
                continue
            shipped = load_model(row["model"])
            assert made is not None
            assert [type(block) for block in made.blocks()] == [type(block) for block in shipped.blocks()]
            assert model_parameters(made) == pytest.approx(model_parameters(shipped), rel=0.013)
            windows = [
                [(each.window, each.chunk) for each in model.blocks() if isinstance(each, Attention)]
                for model in (made, shipped)
            ]
            assert windows[0] == windows[1]
            compared += 1
    assert compared == 54


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    table = tmp_path / "models.csv"
    text = "model,layers,hidden,ffn,heads,vocab,tied_embeddings\nmine,2,64,256,4,100,yes\nhalf,2,64,,4,,\n"
    table.write_text(text, encoding="utf-8")
    made = model_in_table(table, "mine")
    assert made is not None
    assert model_parameters(made) == 2 * (4 * 64**2 + 3 * 64 * 256 + 2 * 64) + 100 * 64 + 64
    assert model_in_table(table, "other") is None
    assert model_in_table(tmp_path / "nowhere.csv", "mine") is None
    with pytest.raises(FormatError, match="directory"):
        model_in_table(tmp_path, "mine")
    with pytest.raises(UnsupportedError, match="'half' is not known: ffn, vocab missing"):
        model_in_table(table, "half")
    table.write_text(text.replace(",256,", ",wide,"), encoding="utf-8")
    with pytest.raises(FormatError, match="'wide' is not a whole number"):
        model_in_table(table, "mine")
