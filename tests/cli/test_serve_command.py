"""``hespas serve`` as users type it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hespas.cli.main import app

_LOG = "arrival_s,prompt_tokens,output_tokens\n0,100,5\n0.1,200,3\n"


def _serve(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["serve", *(str(each) for each in arguments)])


def test_a_log_is_served(tmp_path: Path) -> None:
    log, rows, document = (tmp_path / name for name in ("log.csv", "rows.csv", "serving.json"))
    log.write_text(_LOG, encoding="utf-8")
    done = _serve(
        "Llama-3-8B",
        "--hardware",
        "H100-SXM",
        "--requests",
        log,
        "--out",
        rows,
        "--json",
        document,
        "--per-request",
    )
    assert done.exit_code == 0, done.output
    assert "Llama-3-8B on 1 x H100-SXM (vllm)" in done.output
    assert "2 requests" in done.output
    assert "inter-token" in done.output
    found = json.loads(document.read_bytes())
    assert found["inputs"] == [str(log)]
    assert [each["prompt_tokens"] for each in found["rows"]] == [100, 200]
    assert rows.read_text(encoding="utf-8").count("\n") == 3
    again = _serve("Llama-3-8B", "--hardware", "H100-SXM", "--requests", log, "--out", rows)
    assert again.exit_code == 2
    assert "--overwrite" in again.output


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--requests", "poisson:speed=1"), 2, "'poisson' has no setting 'speed'"),
        (("--requests", "closed:requests=2", "--prefill-servers", "1"), 2, "--decode-servers is required"),
        (("--requests", "closed:requests=2", "--prefill-servers", "1,2"), 2, "several values of"),
        (("--requests", "nothing.csv"), 3, "nothing.csv"),
        (("--requests", "closed:requests=2", "--ep", "2"), 2, "--ep 1"),
        (("--requests", "nope:rate=1"), 2, "unknown arrival process 'nope'"),
        (
            ("--requests", "closed:requests=2", "--precision", "f32", "--gpu-memory-utilization", "0.2"),
            4,
            "leave no memory for a KV cache",
        ),
        (("--requests", "closed:requests=2,prompt=500", "--kv-cache-tokens", "64"), 4, "does not fit"),
    ],
)
def test_faults_say_what_to_do(arguments: tuple[str, ...], code: int, text: str) -> None:
    done = _serve("Llama-3-8B", "--hardware", "H100-SXM", *arguments)
    assert done.exit_code == code, done.output
    assert text in done.output
    assert "Traceback" not in done.output
