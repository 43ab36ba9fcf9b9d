"""``hespas generate llm``: files, accounts, rows of tables, user models, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol, cast

import pytest
from jsonschema import Draft202012Validator
from typer.main import get_command
from typer.testing import CliRunner, Result

import hespas
from hespas.cli.main import app
from hespas.graph import Workload

SCHEMA = Path(__file__).parents[2] / "hespas" / "schemas" / "generate.schema.json"


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["generate", "llm", *map(str, words)])


def document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    cast("_Validator", Draft202012Validator(schema)).validate(found)
    return found


def test_a_dry_run_says_what_it_would_be(tmp_path: Path) -> None:
    done = run(
        "gpt-2", "--dp", 4, "--seq", 1024, "--global-batch", 16, "--dry-run", "--json", tmp_path / "g.json"
    )
    assert done.exit_code == 0, done.output
    told = document(tmp_path / "g.json")
    assert (told["ranks"], told["classes"]) == (4, 1)
    assert told["parameters"] == 124_439_808
    assert told["model_flops_per_step"] < told["hardware_flops_per_step"]
    tensors = [each["size_bytes"] for each in told["memory"] if each["counted_as"] == "allocated"]
    assert sum(tensors) == told["peak_memory_bytes"] < told["device_memory_bytes"]
    assert "parameters" in done.stdout


def test_traces_take_what_a_dry_run_says(tmp_path: Path) -> None:
    settings = ("gpt-2", "--dp", 2, "--pp", 2, "--seq", 256, "--global-batch", 4)
    told = run(*settings, "--dry-run", "--json", tmp_path / "g.json")
    assert told.exit_code == 0, told.output
    done = run(*settings, "--out", tmp_path / "traces")
    assert done.exit_code == 0, done.output
    files = sorted((tmp_path / "traces").glob("*.et"))
    assert len(files) == 4
    written = sum(each.stat().st_size for each in files)
    assert written == pytest.approx(document(tmp_path / "g.json")["et_bytes"], rel=0.005)
    again = run(*settings, "--out", tmp_path / "again")
    assert again.exit_code == 0
    same = [each.read_bytes() for each in sorted((tmp_path / "again").glob("*.et"))]
    assert [each.read_bytes() for each in files] == same
    assert hespas.check(tmp_path / "traces", profile="astra-sim").valid


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    model = tmp_path / "mine.toml"
    model.write_text(
        'name = "mine"\nhidden = 256\nlayers = 2\nheads = 4\nvocab = 512\n'
        'ffn = "round_up(8 * hidden / 3, 64)"\n'
    )
    done = run(model, "--tp", 2, "--seq", 64, "--out", tmp_path / "step.json")
    assert done.exit_code == 0, done.output
    workload = hespas.read(tmp_path / "step.json")
    assert isinstance(workload, Workload)
    assert workload.num_ranks == 2


def test_a_row_of_a_table(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(
        "model,num_accelerators,seq_len,global_batch,micro_batch,dp,tp,pp,fsdp,recompute,precision\n"
        "Llama-2-7B,8,4096,32,1,8,1,1,fsdp-full-shard (zero3),full,bf16\n"
        "GPT-2,16,1024,32,,16,1,1,distributed optimizer (zero1),none,fp8 delayed scaling\n"
        "Nobody-9B,8,4096,32,1,8,1,1,,none,bf16\n"
    )
    done = run("--row", f"{table}:1", "--dry-run", "--json", tmp_path / "g.json")
    assert done.exit_code == 0, done.output
    told = document(tmp_path / "g.json")
    assert told["ranks"] == 16
    assert {each["code"] for each in told["diagnostics"]} == {"row.micro-batch"}
    assert "the micro-batch is missing" in done.stderr
    for number, code in ((2, 4), (3, 2), ("x", 2)):
        refused = run("--row", f"{table}:{number}", "--dry-run")
        assert refused.exit_code == code, refused.output


_SERVING = {
    "prefill": {"prompt"},
    "decode": {"context"},
    "mixed": {"prompt", "context"},
    "speculative": {"context", "drafts"},
    "disaggregated": {"prompt", "context"},
}


@pytest.mark.parametrize("phase", list(_SERVING))
def test_steps_of_serving(phase: str, tmp_path: Path) -> None:
    tokens = [word for name in sorted(_SERVING[phase]) for word in (f"--{name}", 8)]
    done = run("gpt-2", "--phase", phase, "--batch", 4, *tokens, "--dry-run", "--json", tmp_path / "g.json")
    assert done.exit_code == 0, done.output
    told = document(tmp_path / "g.json")
    assert told["ranks"] == (2 if phase == "disaggregated" else 1)
    assert told["peak_memory_bytes"] > 2 * told["parameters"]
    assert told["model_flops_per_step"] > 2 * told["parameters"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gpt-2", "--tp", 5, "--dry-run"), "tp-divides-heads: heads 12 does not divide over 5 tensor ranks"),
        (("gpt-9", "--dry-run"), "GPT-2"),
        (("gpt-2",), "either --out DST or --dry-run is required"),
        (("gpt-2", "--dry-run", "--out", "x"), "--out and --dry-run exclude each other"),
        (("gpt-2", "--out", "-"), "a workload consists of files"),
        (("--dry-run",), "either MODEL or --row is required"),
        (("gpt-2", "--precision", "fp3", "--dry-run"), "unknown precision 'fp3'"),
        (("gpt-2", "--recompute", "everything", "--dry-run"), "unknown module 'everything'"),
        (("gpt-2", "--overlap", "all,none", "--dry-run"), "unknown overlap 'all'"),
        (("gpt-2", "--phase", "decode", "--cp", 2, "--dry-run"), "does not support context parallelism"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[object, ...], said: str) -> None:
    done = run(*words)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert "Traceback" not in done.stderr


# --- options that nothing reads

_VALUES: dict[str, tuple[object, ...]] = {
    "--dp": (2,), "--tp": (2,), "--pp": (2,), "--vp": (2,), "--cp": (2,), "--ep": (2,), "--etp": (2,),
    "--zero": (3,), "--fsdp": (), "--data-shard": (1,), "--no-sequence-parallel": (), "--ring-attention": (),
    "--seq": (64,), "--global-batch": (8,), "--micro-batch": (2,), "--precision": ("fp8",),
    "--gradient-precision": ("16bit",),
    "--recompute": ("full",), "--schedule": ("gpipe",), "--lora-rank": (4,), "--framework": ("maxtext",),
    "--overlap": ("none",), "--capacity": (1,), "--imbalance": (2,), "--phase": ("decode",), "--batch": (2,),
    "--expert-node": (2,), "--context-all-to-all": (), "--offload": ("optimizer",),
    "--context": (8,), "--prompt": (8,), "--num-speculative-tokens": (2,), "--kv-cache-dtype": ("f16",),
    "--block-size": (32,),
    "--launch": ("whole",),
}  # fmt: skip
"""A value of every option that says what is made."""
_TRAINING = {
    "--zero", "--fsdp", "--data-shard", "--no-sequence-parallel", "--ring-attention", "--seq",
    "--global-batch", "--micro-batch", "--recompute", "--schedule", "--lora-rank", "--framework", "--overlap",
    "--capacity", "--imbalance", "--context-all-to-all", "--offload", "--launch",
}  # fmt: skip


def test_every_option_of_a_step_has_a_value_here() -> None:
    command: Any = get_command(app)
    params = command.commands["generate"].commands["llm"].params
    own = {name for each in params if each.rich_help_panel != "Output" for name in each.opts}
    spelt = {name.replace("--no-", "--") for name in _VALUES}
    others = {
        "--untrusted",
        "--limit",
        "model",
        "--row",
        "--list",
        "--out",
        "--to",
        "--dry-run",
        "--hardware",
        "--system",
    }
    assert own - spelt == others


def test_the_step_is_simulated_where_a_system_is_named(tmp_path: Path) -> None:
    words = ("gpt-2", "--dp", 2, "--seq", 64, "--system", "dgx-h100", "--json", tmp_path / "g.json")
    done = run(*words, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "per step on dgx-h100, H100-SXM (90 % interval: " in done.stdout
    assert "MFU" in done.stdout
    assert "tokens/s" in done.stdout
    step = document(tmp_path / "g.json")["step"]
    assert step["step_low_ns"] < step["step_ns"] < step["step_high_ns"]
    assert step["tokens_per_s"] == pytest.approx(2 * 64 / (step["step_ns"] / 1e9))


def test_launches_of_a_program_of_xla_have_no_effect() -> None:
    done = run("gpt-2", "--framework", "maxtext", "--launch", "partial-graphs", "--dry-run")
    assert "generate.no-effect" in done.stderr


@pytest.mark.parametrize("option", list(_VALUES))
def test_rows_and_lists_take_no_option(option: str, tmp_path: Path) -> None:
    words = (option, *_VALUES[option])
    done = run("--row", tmp_path / "none.csv:0", *words, "--dry-run")
    assert (done.exit_code, f"row-says-all: {option}: " in done.stderr) == (2, True), done.output
    done = run("--list", *words)
    assert (done.exit_code, f"list-only: {option}: " in done.stderr) == (2, True), done.output


@pytest.mark.parametrize("phase", _SERVING)
def test_serving_refuses_what_it_does_not_read(phase: str) -> None:
    read = {f"--{name}".replace("--drafts", "--num-speculative-tokens") for name in _SERVING[phase]}
    tokens = {"--prompt", "--context", "--num-speculative-tokens"} - read
    for option in sorted(_TRAINING | tokens):
        done = run("gpt-2", "--phase", phase, option, *_VALUES[option], "--dry-run")
        assert (done.exit_code, f"phase-reads: {option}: " in done.stderr) == (2, True), done.output


@pytest.mark.parametrize(
    "option",
    ["--batch", "--context", "--prompt", "--num-speculative-tokens", "--kv-cache-dtype", "--block-size"],
)
def test_training_refuses_options_of_serving(option: str) -> None:
    done = run("gpt-2", option, *_VALUES[option], "--dry-run")
    assert (done.exit_code, f"serving-only: {option}: " in done.stderr) == (2, True), done.output


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (("gpt-2", "--capacity", 1.5), "capacity-needs-experts"),
        (("gpt-2", "--imbalance", 1.5), "imbalance-needs-experts"),
        (("gpt-2", "--recompute", "moe_act"), "recompute-needs-module"),
        (("gpt-2", "--recompute", "layernorm,mla_up_proj"), "recompute-needs-module"),
        (("gpt-2", "--overlap", "experts"), "overlap-needs-shared-expert"),
        (("qwen3-30b-a3b", "--overlap", "experts"), "overlap-needs-shared-expert"),
        (("gpt-2", "--tp", 2, "--no-sequence-parallel", "--overlap", "tensor"), "overlap-needs-sequence"),
        (("gpt-2", "--tp", 2, "--lora-rank", 4, "--overlap", "tensor"), "overlap-needs-sequence"),
        (("gpt-2", "--dp", 4, "--zero", 0, "--data-shard", 2), "shard-needs-zero"),
        (("gpt-2", "--dp", 4, "--zero", 1, "--fsdp"), "fsdp-is-zero-3"),
        (("gpt-2", "--shard", "1/2"), "dry-run-writes-nothing: --shard"),
        (("gpt-2", "--only-classes", "--resume"), "dry-run-writes-nothing: --only-classes, --resume"),
        (("gpt-2", "--to", "chakra", "--cluster", "tcp://x"), "dry-run-writes-nothing: --to, --cluster"),
    ],
)
def test_what_a_model_or_a_mode_has_no_part_for_is_refused(words: tuple[object, ...], rule: str) -> None:
    done = run(*words, "--seq", 64, "--dry-run")
    assert done.exit_code == 2, done.output
    assert rule in done.stderr
    assert "try: " in done.stderr


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--no-sequence-parallel",), "--no-sequence-parallel"),
        (("--ring-attention",), "--ring-attention"),
        (("--schedule", "gpipe"), "--schedule"),
        (("--overlap", "tensor,gradients,parameters,pipeline"), "--overlap"),
        (("--zero", 0), "--zero"),
    ],
)
def test_what_changes_nothing_at_these_degrees_is_told(
    words: tuple[object, ...], flag: str, tmp_path: Path
) -> None:
    plain = run("gpt-2", "--seq", 64, "--out", tmp_path / "plain.json")
    done = run("gpt-2", "--seq", 64, *words, "--out", tmp_path / "same.json")
    assert (plain.exit_code, done.exit_code) == (0, 0), done.output
    assert f"{flag}: has no effect" in done.stderr
    assert "no effect" not in plain.stderr
    assert (tmp_path / "plain.json").read_bytes() == (tmp_path / "same.json").read_bytes()


def test_all_that_overlaps_is_what_there_is() -> None:
    for words in (("gpt-2",), ("gpt-2", "--tp", 2, "--no-sequence-parallel"), ("qwen3-30b-a3b",)):
        done = run(*words, "--seq", 64, "--overlap", "all", "--dry-run")
        assert (done.exit_code, "no effect" in done.stderr) == (0, False), done.output


def test_other_generators_tell_what_has_no_effect() -> None:
    for words in (("dlrm", "--ranks", "1", "--sharding", "row"), ("vit", "--fsdp"), ("dit", "--fsdp")):
        done = CliRunner().invoke(app, ["generate", *words, "--dry-run"])
        assert (done.exit_code, "has no effect" in done.stderr) == (0, True), done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gpt-2", "--dp", 10**9), "ranks-bounded: ranks: 1,000,000,000 is beyond 16,777,216"),
        (("gpt-2", "--dp", 10**20), "ranks-bounded"),
        (("gpt-2", "--global-batch", 10**12), "micro-batches-bounded"),
        (("gpt-2", "--pp", 2, "--global-batch", 10**6), "passes-bounded"),
        (("gpt-2", "--seq", 10**400), "tokens-bounded: tokens of a micro-batch: far is beyond"),
        (("gpt-2", "--micro-batch", 10**18), "tokens-bounded"),
        (("gpt-2", "--lora-rank", 10**18), "lora-bounded"),
        (("deepseek-v2-lite", "--capacity", "inf"), "capacity-bounded"),
        (("deepseek-v2-lite", "--imbalance", "1e300"), "imbalance-bounded"),
        (("gpt-2", "--recompute", "full:" + 5000 * "9"), "recompute 'full:999"),
        (("gpt-2", "--phase", "decode", "--kv-cache-dtype", "bf99"), "unknown element type 'bf99'"),
        (("gpt-2", "--phase", "decode", "--batch", 10**18), "tokens-bounded"),
        (("gpt-2", "--phase", "prefill", "--dp", 10**9), "ranks-bounded"),
    ],
)
def test_what_is_beyond_any_machine_is_refused_at_once(words: tuple[object, ...], said: str) -> None:
    done = run(*words, "--dry-run")
    assert (done.exit_code, said in done.stderr) == (2, True), done.output
    assert "try: " in done.stderr


def test_a_step_run_operator_by_operator(tmp_path: Path) -> None:
    words = ("eager", "bert-large", "--batch", "2", "--seq", "64", "--train")
    done = CliRunner().invoke(app, ["generate", *words, "--out", str(tmp_path / "step.json")])
    assert done.exit_code == 0, done.output
    workload = hespas.read(tmp_path / "step.json")
    assert isinstance(workload, Workload)
    assert workload.classes[0].name == "bert-large-train-64-2"


@pytest.mark.parametrize(
    "words",
    [
        ("vit", "--dp", 10**9),
        ("vit", "--batch", 10**19),
        ("vit", "--layers", 10**7),
        ("dit", "--image", 10**12),
        ("eager", "gpt2-large", "--batch", 10**19),
        ("eager", "gpt2-large", "--seq", 1025),
        ("eager", "gpt2-large", "--train", "--compiled"),
        ("eager", "gpt5"),
        ("dlrm", "--ranks", 2**40, "--tables", 2**40),
        ("dlrm", "--rows", 2**70),
        ("collectives", "--ranks", 10**7),
        ("collectives", "--ranks", 2, "--repeat", 10**9),
        ("random", "--ranks", 4, "--nodes", 10**9),
    ],
)
def test_other_generators_refuse_what_is_beyond_any_machine(words: tuple[object, ...]) -> None:
    done = CliRunner().invoke(app, ["generate", *map(str, words), "--dry-run"])
    assert done.exit_code == 2, done.output
    assert "error: " in done.stderr
    assert "try: " in done.stderr


def test_a_cluster_has_an_address(tmp_path: Path) -> None:
    done = run("gpt-2", "--seq", 64, "--dp", 2, "--out", tmp_path / "out", "--cluster", "ftp:::x")
    assert (done.exit_code, "expected the address of a dask scheduler" in done.stderr) == (2, True), (
        done.output
    )
    assert list(tmp_path.iterdir()) == []


def test_models_are_listed() -> None:
    done = run("--list")
    assert done.exit_code == 0
    assert "Llama-3.1-405B" in done.stdout
    assert len(done.stdout.splitlines()) > 60
