"""Empty or impossible cells are rejected with their position, never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

import hespas
from hespas.cli.validate import app
from hespas.graph.errors import FormatError, UsageError
from hespas.studies.serving import evaluate_runs, read_rows

_RUN: dict[str, object] = {
    "model_path": "meta-llama/Llama-3.1-8B-Instruct", "system": "h100_sxm", "backend": "vllm",
    "precision": "bf16", "mode": "agg", "isl": 64, "osl": 8, "tp_size": 1, "batch_size": 2, "split": "calib",
    "silicon_ttft_ms": 9.0, "silicon_tpot_ms": 8.0,
}  # fmt: skip


def _runs(folder: Path, *changes: dict[str, object]) -> Path:
    path = folder / "runs.csv"
    pd.DataFrame([_RUN | change for change in changes]).to_csv(path, index=False)
    return path


def _validate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["serving", *map(str, arguments)])


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("isl", "abc"), ("isl", -5), ("isl", 1.5), ("isl", 0), ("osl", None), ("osl", "inf"),
        ("tp_size", "x"), ("batch_size", "many"), ("silicon_ttft_ms", "soon"), ("silicon_tpot_ms", -1),
        ("model_path", None), ("backend", ""), ("system", None),
    ],
)  # fmt: skip
def test_a_malformed_cell_is_told_with_its_place(column: str, value: object, tmp_path: Path) -> None:
    path = _runs(tmp_path, {}, {column: value})
    with pytest.raises(FormatError, match=column) as caught:
        read_rows(path)
    assert (caught.value.path, caught.value.position) == (str(path), f"row 1, column {column}")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"precision": "fp7"}, "unsupported precision fp7 of Llama-3.1-8B"),
        ({"precision": "int4"}, "unsupported precision int4 of Llama-3.1-8B"),
        ({"backend": "tgi"}, "unknown serving engine tgi"),
        ({"mode": "both"}, "unknown mode 'both'"),
        ({"batch_size": None}, "does not state the concurrency"),
        ({"tp_size": None}, "does not state tp_size"),
        ({"silicon_ttft_ms": None}, "no measured times"),
        ({"batch_size": 10**9}, "1,000,000,000 concurrent requests exceed one server"),
        ({"isl": 10**14}, "tokens"),
        (
            {"batch_size": None, "silicon_data_source": "silicon_concurrency=" + "9" * 5000},
            "does not state the concurrency",
        ),
        ({"model_path": "here/nothing.toml"}, "unknown model nothing.toml"),
    ],
)
def test_a_row_that_is_not_supported_is_refused_by_itself(
    change: dict[str, object], reason: str, tmp_path: Path
) -> None:
    good, refused = read_rows(_runs(tmp_path, {}, change))
    assert good.reason == ""
    assert good.step is not None
    assert reason in refused.reason
    assert refused.step is None


def test_a_precision_that_is_not_stated_is_assumed_and_said(tmp_path: Path) -> None:
    stated, silent = read_rows(_runs(tmp_path, {}, {"precision": None}))
    assert "precision" in silent.assumed
    assert "precision" not in stated.assumed


def test_releases_are_texts(tmp_path: Path) -> None:
    rows = read_rows(_runs(tmp_path, {"backend_version": "1.10"}, {"backend_version": "2"}))
    assert [row.release for row in rows] == ["1.10", "2"]


def test_parquet_is_read_as_csv_is(tmp_path: Path) -> None:
    path = tmp_path / "runs.parquet"
    pd.DataFrame([_RUN, _RUN | {"precision": None}]).to_parquet(path)
    rows = read_rows(path)
    assert [row.prompt for row in rows] == [64, 64]
    assert rows == read_rows(_runs(tmp_path, {}, {"precision": None}))


def test_refused_rows_are_counted_with_their_place(tmp_path: Path) -> None:
    done = _validate("--table", _runs(tmp_path, {}, {"backend": "tgi"}, {"backend": "tgi"}))
    assert done.exit_code == 0, done.output
    assert "1 of 3 runs are evaluated" in done.output
    assert "2: unknown serving engine tgi (row 1)" in done.output


def test_the_interface_does_what_the_command_does(tmp_path: Path) -> None:
    table, document = _runs(tmp_path, {}, {"backend": "tgi"}), tmp_path / "serving.json"
    assert _validate("--table", table, "--json", document, "--quiet").exit_code == 0
    done = hespas.validate_serving(table)
    assert done.to_json() == document.read_bytes()
    assert "1 of 2 runs evaluated, median error of ttft" in repr(done)
    assert done.to_pandas()["status"].tolist() == ["predicted", "unknown serving engine tgi"]
    found = done.to_dict()
    assert found["inputs"] == [str(table)]
    assert [(each["code"], each["location"]) for each in found["diagnostics"]] == [
        ("serving.not-predicted", "row 1")
    ]
    with pytest.raises(UsageError, match="no runs to evaluate"):
        hespas.validate_serving()
    with pytest.raises(UsageError, match="no row of the table has the split"):
        hespas.validate_serving(table, split="x")
    with pytest.raises(UsageError, match="`calibrate=all`: 'all' is not one of 'none', "):
        hespas.validate_serving(table, calibrate=cast("Any", "all"))


@pytest.mark.parametrize(
    ("content", "arguments", "code", "text"),
    [
        ("isl\n", (), 3, "missing column model_path"),
        (",".join(_RUN) + "\n", (), 3, "no row below the header"),
        ("", (), 3, "the file is empty"),
        (None, ("--split", "devvla"), 2, "no row of the table has the split 'devvla'"),
    ],
)
def test_tables_of_nothing(
    content: str | None, arguments: tuple[str, ...], code: int, text: str, tmp_path: Path
) -> None:
    path = _runs(tmp_path, {})
    if content is not None:
        path.write_text(content, encoding="utf-8")
    done = _validate("--table", path, *arguments)
    assert done.exit_code == code, done.output
    assert text in done.output
    assert "try:" in done.output


def test_a_table_past_the_limits_is_refused(tmp_path: Path) -> None:
    path = _runs(tmp_path, {})
    with path.open("ab") as stream:
        stream.truncate(1 << 40)  # a hole: takes no space
    done = _validate("--table", path)
    assert done.exit_code == 3, done.output
    assert "bytes" in done.output


@pytest.mark.parametrize(
    ("system", "device"),
    [
        ("b300_sxm", "B300-SXM"),
        ("H100-SXM5-80GB", "H100-SXM"),
        ("mi300x", "MI300X"),
        ("a100_sxm", "A100-SXM-80GB"),
    ],
)
def test_a_device_is_looked_up_in_the_catalogue(system: str, device: str, tmp_path: Path) -> None:
    (row,) = read_rows(_runs(tmp_path, {"system": system}))
    assert (row.hardware, row.reason) == (device, "")
    (row,) = read_rows(_runs(tmp_path, {"system": "moon"}))
    assert row.reason == "unknown device moon"


@pytest.mark.parametrize(
    ("checkpoint", "stated", "model", "precision"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "bfloat16", "Llama-3.1-8B", "bf16"),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", "", "Llama-3.1-70B", "fp8"),
        ("deepseek-ai/DeepSeek-R1-0528-NVFP4", "", "DeepSeek-V3", "fp4"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "NVFP4", "Qwen3-235B-A22B", "fp4"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "fp8_block", "Mixtral-8x7B", "fp8"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "fp8", "Qwen2.5-72B", "fp8"),
    ],
)
def test_checkpoints_state_model_and_format(
    checkpoint: str, stated: str, model: str, precision: str, tmp_path: Path
) -> None:
    (row,) = read_rows(_runs(tmp_path, {"model_path": checkpoint, "precision": stated or None}))
    assert (row.model, row.precision, row.reason) == (model, precision, "")
    assert "precision" not in row.assumed


def test_runs_near_capacity_are_summarized_apart(tmp_path: Path) -> None:
    """Two sequences on one device are few; a million tokens each are more than its cache holds."""
    rows = read_rows(_runs(tmp_path, {}, {"isl": 400_000}))
    done = evaluate_runs(rows)
    shares = [each.load_share for each in done.rows]
    assert 0 < shares[0] < 0.9
    assert shares[1] > 1
    values = {each.value for each in done.summaries() if each.by == "capacity"}
    assert "below capacity" in values


def test_facts_of_a_source_are_columns_or_packed_into_its_cell(tmp_path: Path) -> None:
    packed = {"silicon_data_source": "2026-03-25.csv; silicon_concurrency=48; measured=2026-03-25"}
    columns = {"concurrency": 48, "benchmark": "InferenceMAX", "measured": "2026-03-25"}
    one, two = (read_rows(_runs(tmp_path, {"backend": "vllm", **cells}))[0] for cells in (packed, columns))
    assert one == two
    assert (one.concurrency, one.source, one.ratio) == (48, "InferenceMAX", 0.8)
    other = read_rows(_runs(tmp_path, {**packed, "concurrency": 8}))[0]
    assert other.concurrency == 8
