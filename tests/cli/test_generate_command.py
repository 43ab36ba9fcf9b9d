"""``hespas generate llm``: files, accounts, rows of tables, models of one's own, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol, cast

import pytest
from jsonschema import Draft202012Validator
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
    assert sum(each["size_bytes"] for each in told["memory"]) == told["peak_memory_bytes"]
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
    assert "the micro-batch is not stated" in done.stderr
    for number, code in ((2, 4), (3, 2), ("x", 2)):
        refused = run("--row", f"{table}:{number}", "--dry-run")
        assert refused.exit_code == code, refused.output


@pytest.mark.parametrize("phase", ["prefill", "decode", "mixed", "speculative", "disaggregated"])
def test_steps_of_serving(phase: str, tmp_path: Path) -> None:
    done = run(
        "gpt-2", "--phase", phase, "--batch", 4, "--prompt", 64, "--dry-run", "--json", tmp_path / "g.json"
    )
    assert done.exit_code == 0, done.output
    told = document(tmp_path / "g.json")
    assert told["ranks"] == (2 if phase == "disaggregated" else 1)
    assert told["peak_memory_bytes"] > 2 * told["parameters"]
    assert told["model_flops_per_step"] > 2 * told["parameters"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gpt-2", "--tp", 5, "--dry-run"), "tp-divides-heads: heads 12 does not part into 5 tensor ranks"),
        (("gpt-9", "--dry-run"), "GPT-2"),
        (("gpt-2",), "--out DST writes the workload"),
        (("gpt-2", "--dry-run", "--out", "x"), "--out DST writes the workload"),
        (("gpt-2", "--out", "-"), "not one stream"),
        (("--dry-run",), "a MODEL or a --row is needed"),
        (("gpt-2", "--precision", "fp3", "--dry-run"), "no precision 'fp3'"),
        (("gpt-2", "--recompute", "everything", "--dry-run"), "nothing that can be computed again"),
        (("gpt-2", "--overlap", "all,none", "--dry-run"), "nothing is called 'all'"),
        (("gpt-2", "--phase", "decode", "--cp", 2, "--dry-run"), "context ranks"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[object, ...], said: str) -> None:
    done = run(*words)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_models_are_listed() -> None:
    done = run("--list")
    assert done.exit_code == 0
    assert "Llama-3.1-405B" in done.stdout
    assert len(done.stdout.splitlines()) > 60
