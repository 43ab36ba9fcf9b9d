"""Malformed input that needs a new process: bombs, damage inside compiled parsers, special files."""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.malformed_command import FIXTURES, FORMATS, SUFFIX, Command, Outcome, convert_own
from tests.malformed_inputs import CHAKRA, et_file, et_node, json_graph, many_devices

pytest.importorskip("jaxlib")

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return Command(tmp_path)


# --- bombs

_MOST_MIB = 900
"""The libraries take some 250 MiB, and a bomb is refused once 256 MiB of it are known."""


def _bomb(head: bytes, unit: bytes) -> bytes:
    """A gigabyte of ``unit`` behind ``head`` in one gzip stream of a megabyte."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = packer.compress(head) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(unit * (16 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + start + block * 64 + b"\x03\0" + bytes(8)


_BOMBS = {
    "stablehlo": (b"module {", b" "),
    "hlo": (b"HloModule m\n", b"\n"),
    "op-graph": (b'{"schema": "hespas.op-graph/1", "nodes": [', b" "),
    "op-graph-arrow": (b"ARROW1\0\0hespas.op-graph-arrow/1", b"\0"),
    "chakra": (et_file(et_node(1)) + b"\x80\x80\x80\x80\x04", b"\0"),
}


@linux
@pytest.mark.parametrize("form", _BOMBS)
def test_gzip_bombs(command: Command, form: str) -> None:
    source = command.source(f"bomb{SUFFIX[form]}.gz", _bomb(*_BOMBS[form]))
    outcome, peak_mib = command.run_process(source)
    assert (outcome.code, outcome.complaints(source)) == (3, []), outcome.start
    assert peak_mib < _MOST_MIB


@linux
def test_brackets_do_not_multiply_memory(command: Command) -> None:
    source = command.source("brackets.mlir", b"module {" + b"{" * (32 << 20))
    outcome, peak_mib = command.run_process(source)
    assert (outcome.code, outcome.complaints(source)) == (3, []), outcome.start
    assert peak_mib < _MOST_MIB


@linux
@pytest.mark.parametrize("ranks", [2, 60_000_000])
def test_a_group_of_billions_is_not_listed(command: Command, ranks: int) -> None:
    """It fits into 25 characters; comm_group.json would hold every member."""
    group = {"kind": "all_reduce", "groups": "[1,2147483647]<=[2147483647]"}
    graph = json_graph({"id": 0, "op": "x", "deps": [], "collective": group}, num_ranks=ranks)
    source = command.source("group.json", graph)
    outcome, peak_mib = command.run_process(source, "--ranks", "0", to="rank.et", cpu_s=20)
    assert outcome.code in {3, 4}, outcome.start
    assert outcome.complaints(source) == [], outcome.start
    assert peak_mib < _MOST_MIB


@linux
@pytest.mark.parametrize("replicas", [50_000, 999_999_999, 2**31 - 1])
def test_stated_devices_are_not_listed(command: Command, replicas: int) -> None:
    """The program is sound, so unsupported (4) is as true an answer as malformed (3)."""
    source = command.source("devices.mlir", many_devices(replicas, replicas))
    outcome, peak_mib = command.run_process(source, cpu_s=10)
    assert outcome.code in {3, 4}, outcome.start
    assert outcome.complaints(source) == [], outcome.start
    assert peak_mib < _MOST_MIB


# --- damage at random places

_BATCH = """
import json, sys
from pathlib import Path
from typer.testing import CliRunner
from hespas.cli.convert import app
for name in Path(sys.argv[1]).read_text().split("\\n"):
    out = Path(name).parent / "graph.json"
    done = CliRunner().invoke(app, [name, str(out)])
    print(json.dumps([done.exit_code, done.stderr]), flush=True)
    out.unlink(missing_ok=True)
"""


def _damaged(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(out))
        out[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(4), rng.randbytes(4)])
    return bytes(out)


def _outcome(line: str) -> Outcome:
    code, said = json.loads(line)
    return Outcome(code, said, ())


def _check_damage(command: Command, name: str, data: bytes, count: int) -> None:
    """Any outcome but our bug, a death of the process, or a refusal that does not help."""
    rng = random.Random(name)
    sources = [command.source(f"{number}.{name}", _damaged(data, rng)) for number in range(count)]
    listed = command.source("list", "\n".join(map(str, sources)).encode())
    done = subprocess.run(
        [sys.executable, "-c", _BATCH, str(listed)], capture_output=True, text=True, check=False
    )
    wrong: dict[str, str] = {}
    outcomes = [_outcome(line) for line in done.stdout.splitlines()]
    for source, outcome in zip(sources, outcomes, strict=False):
        # The compiled parsers know no position of some faults.
        complaints = set(outcome.complaints(source)) - {"no position"}
        if outcome.code not in {0, 3, 4} or (outcome.code and complaints):
            wrong[source.name] = f"{complaints} {outcome.start}"
    assert len(outcomes) == count, (
        f"exit {done.returncode} at {sources[len(outcomes)].name}: {done.stderr[-300:]}"
    )
    assert wrong == {}


_TEXTS = {
    "mlir": "stablehlo/hand_collectives.mlir",
    "hlo": "hlo/collectives_shard_map.hlo.txt",
}
_COMPILED = {
    "hlo.pb": "binary/llama_fsdp_tp_global_N8.hlo.pb.gz",
    "mlirbc": "binary/llama_fsdp_tp_local_N8.mlirbc",
    "vhlo.mlirbc": "binary/llama_fsdp_tp_local_N8.vhlo.mlirbc",
    "jax_export": "binary/dynamic_mlp.jax_export",
}


def _fixture(name: str) -> bytes:
    path = FIXTURES / (_TEXTS | _COMPILED)[name]
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


@pytest.mark.parametrize("name", _TEXTS)
def test_damaged_programs(command: Command, name: str) -> None:
    _check_damage(command, name, _fixture(name), 40)


@pytest.mark.parametrize("name", _TEXTS | _COMPILED)
def test_much_damaged_programs(command: Command, name: str) -> None:
    _check_damage(command, name, _fixture(name), 600)


@linux
@pytest.mark.parametrize(
    ("name", "offset", "value"),
    [
        ("mlirbc", 15207, 0),
        ("mlirbc", 18392, 229),
        ("vhlo.mlirbc", 2690, 67),
        ("vhlo.mlirbc", 17967, 255),
        ("jax_export", 427, 255),
        ("jax_export", 1501, 23),
    ],
)
def test_a_wrong_byte_is_refused(command: Command, name: str, offset: int, value: int) -> None:
    """Single bytes, found by search, that crash the bindings, exhaust memory or make text of no encoding."""
    data = bytearray(_fixture(name))
    data[offset] = value
    source = command.source(f"wrong.{name}", bytes(data))
    outcome, _ = command.run_process(source)
    assert (outcome.code, outcome.complaints(source)) == (3, []), outcome.start


@linux
def test_a_byte_of_no_encoding_in_a_name_is_kept(command: Command) -> None:
    data = bytearray(_fixture("jax_export"))
    data[2418] = 255
    outcome, _ = command.run_process(command.source("odd.jax_export", bytes(data)))
    assert outcome.code == 0, outcome.start


@pytest.mark.parametrize("name", ["json", "arrow", "et"])
def test_damaged_outputs(command: Command, name: str) -> None:
    options = ["--ranks", "0"] if name == "et" else []
    whole = command.folder / f"whole.{name}"
    _check_damage(command, name, convert_own("hlo/pipeline_ring.hlo.txt", whole, *options), 40)


# --- standard input, folders, and what is no file


def test_standard_input_is_not_called_by_the_name_of_a_temporary_file(command: Command) -> None:
    main = [sys.executable, "-c", "from hespas.cli.convert import main; main()"]
    done = subprocess.run(
        [*main, "-", str(command.folder / "graph.json"), "--from", "op-graph"],
        input=b'{"nodes": [',
        capture_output=True,
        env={**os.environ, "TMPDIR": str(command.folder / "scratch")},
        check=False,
    )
    said = done.stderr.decode()
    assert done.returncode == 3
    assert "try: " in said
    assert str(command.folder) not in said
    assert [entry.name for entry in command.folder.rglob("*")] == ["scratch"]


_TRACE = et_file(et_node(1))


@dataclass(frozen=True, slots=True)
class _Job:
    """A folder of rank files."""

    folder: Path

    def add(self, *names: str, data: bytes = _TRACE) -> _Job:
        self.folder.mkdir(exist_ok=True)
        for name in names:
            (self.folder / name).write_bytes(data)
        return self

    def groups(self, data: bytes) -> _Job:
        return self.add("j.0.et").add("comm_group.json", data=data)

    def second(self, make: Callable[[Path], None]) -> _Job:
        self.add("j.0.et")
        make(self.folder / "j.1.et")
        return self


_JOBS: dict[str, Callable[[_Job], _Job]] = {
    "empty": lambda job: job.add(),
    "other files": lambda job: job.add("a.txt", "b.mlir"),
    "gap": lambda job: job.add("j.0.et", "j.2.et"),
    "no rank 0": lambda job: job.add("j.1.et"),
    "far rank": lambda job: job.add("j.0.et", "j.2000000000.et"),
    "rank past 64 bits": lambda job: job.add("j.0.et", "j.99999999999999999999.et"),
    "two jobs": lambda job: job.add("j.0.et", "k.0.et"),
    "rank twice": lambda job: job.add("j.0.et", "j.00.et"),
    "packed twice": lambda job: job.add("j.0.et").add("j.0.et.gz", data=gzip.compress(_TRACE)),
    "an empty rank": lambda job: job.add("j.0.et").add("j.1.et", data=b""),
    "a cut rank": lambda job: job.add("j.0.et").add("j.1.et", data=_TRACE[:-3]),
    "a rank with a cycle": lambda job: job.add("j.0.et").add("j.1.et", data=CHAKRA["cycle of two"]),
    "a folder for a rank": lambda job: job.second(lambda path: path.mkdir()),
    "a broken link": lambda job: job.second(lambda path: path.symlink_to("nowhere")),
    "groups cut off": lambda job: job.groups(b'{"1": [0,'),
    "groups nested": lambda job: job.groups(b"[" * 100_000),
    "groups not UTF-8": lambda job: job.groups(b'{"\xff": [0]}'),
    "negative member": lambda job: job.groups(b'{"1": [-1, 0]}'),
}


@pytest.mark.parametrize("name", _JOBS)
def test_folders(command: Command, name: str) -> None:
    folder = _JOBS[name](_Job(command.folder / "job")).folder
    command.refuse(folder)
    command.refuse(folder, "--from", "chakra")


@pytest.mark.parametrize("chosen", FORMATS[:-1])
def test_a_folder_for_a_file(command: Command, chosen: str) -> None:
    command.refuse(_Job(command.folder / "job").add("j.0.et").folder, "--from", chosen)


@pytest.fixture
def special(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Paths at which no file stands."""
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    opened = socket.socket(socket.AF_UNIX)
    makers: dict[str, Callable[[Path], object]] = {
        "pipe": os.mkfifo,
        "socket": lambda path: opened.bind(path.name),
        "loop": lambda path: path.symlink_to(path),
        "broken link": lambda path: path.symlink_to(tmp_path / "nowhere"),
    }
    named = {"long name": tmp_path / ("x" * 300), "below a file": FIXTURES / "hlo" / "mlp.hlo.txt" / "x"}

    def make(kind: str) -> Path:
        if kind not in makers:
            return named.get(kind, Path(kind))
        path = tmp_path / f"{kind}.et"
        makers[kind](path)
        return path

    yield make
    opened.close()


@pytest.mark.parametrize("kind", ["socket", "loop", "broken link", "long name", "below a file", "/dev/null"])
def test_what_is_no_file(command: Command, special: Callable[[str], Path], kind: str) -> None:
    source = special(kind)
    command.refuse(source)
    for chosen in FORMATS:
        command.refuse(source, "--from", chosen)


@linux
@pytest.mark.parametrize("options", [(), ("--from", "hlo"), ("--from", "chakra")])
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "/dev/urandom"])
def test_what_never_ends_is_refused_at_once(
    command: Command, special: Callable[[str], Path], kind: str, options: tuple[str, ...]
) -> None:
    source = special(kind)
    outcome, _ = command.run_process(source, *options, cpu_s=10)
    assert (outcome.code, outcome.complaints(source)) == (3, []), outcome.start


@linux
def test_a_pipe_in_the_place_of_a_rank(command: Command) -> None:
    folder = _Job(command.folder / "job").second(os.mkfifo).folder
    outcome, _ = command.run_process(folder, cpu_s=10)
    assert (outcome.code, outcome.complaints(folder)) == (3, []), outcome.start


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(command: Command) -> None:
    source = command.source("secret.mlir", (FIXTURES / "stablehlo" / "mlp.mlir").read_bytes())
    source.chmod(0)
    for chosen in FORMATS:
        command.refuse(source, "--from", chosen)
