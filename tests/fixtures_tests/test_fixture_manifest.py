"""The committed fixtures match their manifest; these tests do not need JAX."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).parents[2] / "fixtures"
FOLDERS = ("stablehlo", "hlo", "binary")
MAX_TOTAL_BYTES = 3_000_000
MAX_PLAIN_BYTES = 60_000
MAX_FILE_BYTES = 200_000
# The programs the project's issue asks for by name; each must be there in the forms said.
REQUIRED = (
    "stablehlo/mlp.mlir",
    "stablehlo/mlp_train.mlir",
    "stablehlo/cnn_train.mlir",
    "stablehlo/llama_train_1dev.mlir.gz",
    "stablehlo/llama_fsdp_tp_global_N8.mlir.gz",
    "stablehlo/llama_fsdp_tp_local_N8.mlir.gz",
    "stablehlo/scan_layers_train.mlir",
    "stablehlo/moe_all_to_all.mlir",
    "stablehlo/pipeline_ring.mlir",
    "stablehlo/dot_int4.mlir",
    "stablehlo/dot_fp8.mlir",
    "stablehlo/dynamic_mlp.mlir",
    "stablehlo/custom_call_unknown.mlir",
    "hlo/llama_train_1dev.hlo.txt.gz",
    "hlo/llama_fsdp_tp_global_N8.hlo.txt.gz",
    "binary/llama_fsdp_tp_local_N8.mlirbc",
    "binary/llama_fsdp_tp_local_N8.vhlo.mlirbc",
    "binary/llama_fsdp_tp_global_N8.jax_export",
    "binary/llama_fsdp_tp_global_N8.hlo.pb.gz",
)
# A path that only one machine has, or a user's name in one.
MACHINE_PATH = re.compile(rb"/(?:home|root|usr|Users)/|site-packages|[A-Z]:\\")


class Cost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    flops: float
    transcendentals: float
    bytes_accessed: float
    unknown_custom_calls: int


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: str
    program: str
    form: str
    stage: str
    script: str
    note: str
    versions: str
    sha256: str
    size_bytes: int
    content_bytes: int
    devices: int
    operation_count: int
    operations: dict[str, int]
    collective_operand_bytes: dict[str, int]
    xla_cost: Cost | None
    no_cost: str
    xla_memory: dict[str, int] | None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: str
    files: list[Row]


MANIFEST = msgspec.json.decode((ROOT / "manifest.json").read_bytes(), type=Manifest)
ROWS = {row.file: row for row in MANIFEST.files}


def content(row: Row) -> bytes:
    data = (ROOT / row.file).read_bytes()
    return gzip.decompress(data) if row.file.endswith(".gz") else data


def flops(file: str) -> float:
    cost = ROWS[file].xla_cost
    assert cost is not None
    return cost.flops


def test_every_file_is_listed_once_and_every_row_has_a_file() -> None:
    found = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).iterdir()}
    assert len(ROWS) == len(MANIFEST.files)
    assert found == set(ROWS)


def test_required_programs_are_there() -> None:
    assert not set(REQUIRED) - set(ROWS)


@pytest.mark.parametrize("row", MANIFEST.files, ids=lambda row: row.file)
def test_file_matches_its_row(row: Row) -> None:
    data = (ROOT / row.file).read_bytes()
    assert hashlib.sha256(data).hexdigest() == row.sha256
    assert len(data) == row.size_bytes <= MAX_FILE_BYTES
    assert len(content(row)) == row.content_bytes
    assert sum(row.operations.values()) == row.operation_count > 0
    assert (row.xla_cost is None) == bool(row.no_cost)


@pytest.mark.parametrize("row", MANIFEST.files, ids=lambda row: row.file)
def test_file_tells_nothing_about_the_machine_that_made_it(row: Row) -> None:
    assert MACHINE_PATH.search(content(row)) is None
    if row.file.endswith(".gz"):
        header = (ROOT / row.file).read_bytes()[:10]
        assert header[3] == 0, "no name, comment or extra field"
        assert header[4:8] == bytes(4), "no time"


def test_sizes_are_bounded() -> None:
    assert sum(row.size_bytes for row in MANIFEST.files) <= MAX_TOTAL_BYTES
    plain = [row for row in MANIFEST.files if not row.file.endswith(".gz")]
    assert all(row.size_bytes <= MAX_PLAIN_BYTES for row in plain)
    packed = [row for row in MANIFEST.files if row.file.endswith(".gz")]
    assert all(row.content_bytes > MAX_PLAIN_BYTES for row in packed)


def test_every_script_exists_and_the_table_lists_every_file() -> None:
    table = (ROOT / "SOURCES.md").read_text()
    for row in MANIFEST.files:
        assert (ROOT.parent / row.script).is_file()
        assert f"| `{row.file}` | `{row.script}` |" in table
        assert row.sha256[:16] in table


def test_text_recounted_without_a_parser_agrees_with_the_manifest() -> None:
    row = ROWS["stablehlo/llama_fsdp_tp_local_N8.mlir.gz"]
    text = content(row).decode()
    words = Counter(re.findall(r'= "?(stablehlo\.\w+)', text))
    for kind in ("stablehlo.dot_general", "stablehlo.all_gather", "stablehlo.all_reduce"):
        assert words[kind] == row.operations[kind] > 0


def test_partitioning_conserves_work() -> None:
    """Eight shares make the whole; what every device repeats (norms, rotary table) is under 2%."""
    shares = 8 * flops("stablehlo/llama_fsdp_tp_local_N8.mlir.gz")
    whole = flops("stablehlo/llama_fsdp_tp_global_N8.mlir.gz")
    assert whole <= shares <= 1.02 * whole


def test_forms_of_one_program_cost_the_same() -> None:
    text = flops("stablehlo/llama_fsdp_tp_local_N8.mlir.gz")
    assert flops("binary/llama_fsdp_tp_local_N8.mlirbc") == text
    assert flops("binary/llama_fsdp_tp_local_N8.vhlo.mlirbc") == text
    assert flops("hlo/llama_fsdp_tp_global_N8.hlo.txt.gz") == flops(
        "binary/llama_fsdp_tp_global_N8.hlo.pb.gz"
    )


def test_hexadecimal_groups_are_a_blob() -> None:
    text = content(ROWS["stablehlo/hand_hex_groups.mlir"]).decode()
    found = re.search(r'dense<"0x([0-9A-F]+)"> : tensor<64x2xi64>', text)
    assert found is not None
    ids = [
        int.from_bytes(bytes.fromhex(found[1])[at : at + 8], "little")
        for at in range(0, len(found[1]) // 2, 8)
    ]
    assert sorted(ids) == list(range(128))
    assert ids[:4] == [0, 64, 1, 65]


def test_manifest_rejects_an_unknown_field() -> None:
    """The checks above read a typed manifest: a field added without them must fail here."""
    document: Any = msgspec.json.decode((ROOT / "manifest.json").read_bytes())
    document["files"][0]["surprise"] = 1
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(document), type=Manifest)
