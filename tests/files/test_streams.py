"""Input bytes: gzip detected by its magic, bounded sizes, truncation reported."""

from __future__ import annotations

import gzip
import random
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from hespas import api
from hespas.files.limits import INPUT_BYTES_VARIABLE, Limits, limits
from hespas.files.streams import read_bytes, read_document
from hespas.graph.errors import FormatError, UsageError
from tests.limits import SAFETY_S
from tests.validators.small_tables import vectors, write_table

LIMIT = 1 << 30


def _write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "input"
    path.write_bytes(data)
    return path


def test_plain_and_gzipped_and_multi_member_content_is_the_same(tmp_path: Path) -> None:
    noise = random.Random(7).randbytes(3_000_000)
    data = noise + b"a" * 2_000_000
    assert read_bytes(_write(tmp_path, data), LIMIT) == data
    assert read_bytes(_write(tmp_path, gzip.compress(data)), LIMIT) == data
    members = gzip.compress(noise) + gzip.compress(b"") + gzip.compress(b"a" * 2_000_000)
    assert read_bytes(_write(tmp_path, members), LIMIT) == data


def test_every_truncation_of_a_gzip_file_is_found(tmp_path: Path) -> None:
    whole = gzip.compress(random.Random(7).randbytes(2_000))
    for length in (2, 5, 12, len(whole) // 2, len(whole) - 4, len(whole) - 1):
        with pytest.raises(FormatError, match="gzip stream"):
            read_bytes(_write(tmp_path, whole[:length]), LIMIT)


def test_an_empty_and_a_missing_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="empty"):
        read_bytes(_write(tmp_path, b""), LIMIT)
    with pytest.raises(FormatError, match="No such file"):
        read_bytes(tmp_path / "absent", LIMIT)


def test_a_bomb_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    bomb = _write(tmp_path, gzip.compress(b"\0" * (300 << 20), compresslevel=1))
    with pytest.raises(FormatError, match="decompresses to more than"):
        read_bytes(bomb, LIMIT)


def test_a_broken_gzip_stream_is_told(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(random.Random(7).randbytes(2_000)))
    data[500] ^= 0xFF
    with pytest.raises(FormatError, match="gzip"):
        read_bytes(_write(tmp_path, bytes(data)), LIMIT)


def test_a_sparse_file_is_refused_by_its_size(tmp_path: Path) -> None:
    path = _write(tmp_path, b"{}")
    with path.open("r+b") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(FormatError, match="more than the limit"):
        read_bytes(path, LIMIT)
    with pytest.raises(FormatError, match="more than the limit") as caught:
        read_document(path, 1000, "a configuration")
    assert (caught.value.position, INPUT_BYTES_VARIABLE in (caught.value.hint or "")) == ("byte 1000", True)


def test_the_environment_raises_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = _write(tmp_path, gzip.compress(b"\0" * (100 << 20), compresslevel=1))
    with pytest.raises(FormatError, match="decompresses to more than"):
        read_bytes(bomb, LIMIT)
    monkeypatch.setenv(INPUT_BYTES_VARIABLE, str(200 << 20))
    assert len(read_bytes(bomb, LIMIT)) == 100 << 20
    assert limits().device_bytes == 200 << 20
    assert limits().input_bytes == Limits().input_bytes
    assert limits().table_bytes == Limits().table_bytes
    assert limits().packed_ratio == Limits().packed_ratio
    monkeypatch.setenv(INPUT_BYTES_VARIABLE, "-1")
    with pytest.raises(UsageError, match=INPUT_BYTES_VARIABLE):
        limits()


ROOT = Path(__file__).parents[2]


def _make(path: Path) -> None:
    """A file of the kind that its name says."""
    if path.name.startswith("ops"):
        rows = vectors("H100-SXM", ("add",), lambda _, moved: 4 + moved / 2.01e6)
        table = write_table(path.with_name("table.csv"), rows)
        if path.suffix == ".parquet":
            pd.read_csv(table).to_parquet(path)
        else:
            path.write_bytes(gzip.compress(table.read_bytes()))
        return
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    api.convert(ROOT / "fixtures" / "stablehlo" / "mlp.mlir", plain, ranks=range(1))
    if plain != path:
        path.write_bytes(gzip.compress(plain.read_bytes()))


_SWAPPED = """
import os, sys
from pathlib import Path
from hespas import api
from hespas.files import streams
from hespas.graph.errors import FormatError

path, original, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
plain_open, opened = os.open, 0

def swapping(name, *rest, **named):
    global opened
    handle = plain_open(name, *rest, **named)
    if str(name) == str(path):
        opened += 1
        if opened == after:
            path.unlink()
            os.mkfifo(path)
    return handle

def read():
    if kind == "table":
        api.estimate_table(path, "H100-SXM")
    else:
        api.read(path)

streams.os.open, after = swapping, 0
outcomes = []
while True:
    path.unlink(missing_ok=True)
    path.write_bytes(original.read_bytes())
    opened, after = 0, after + 1
    try:
        read()
        outcomes.append("read")
    except FormatError as error:
        outcomes.append("refused" if "not a regular file" in str(error) else str(error))
    if not path.is_fifo():
        break
print(*outcomes, sep=",")
"""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("job.et", "workload"),
        ("job.et.gz", "workload"),
        ("job.json.gz", "workload"),
        ("ops.csv.gz", "table"),
        ("ops.parquet", "table"),
        ("stablehlo/mlp.mlir", "workload"),
        ("profiles/tpu_v4_megacore.trace.json.gz", "profile"),
        ("profiles/tpu_v4_megacore.xplane.pb", "profile"),
        ("profiles/rocprofv3_two_processes.json", "profile"),
        ("profiles/nsys_sparse.sqlite.gz", "profile"),
    ],
)
def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(
    name: str, kind: str, tmp_path: Path
) -> None:
    original, path = ROOT / "fixtures" / name, tmp_path / Path(name).name
    if not original.exists():
        original = tmp_path / "original" / name
        original.parent.mkdir()
        _make(original)
    command = [sys.executable, "-c", _SWAPPED, str(path), str(original), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SAFETY_S)
    outcomes = done.stdout.strip().split(",")
    assert set(outcomes) <= {"read", "refused"}, done.stdout + done.stderr
    assert outcomes[-1] == "read"
