"""Malformed input of any reader: exit code 3 with file, position and fix, and no leftover files.

Everything goes through the command. Bombs, special files and damage at random places, which need a process of
their own, are in ``test_malformed_process.py``.
"""

from __future__ import annotations

import gzip
import random
import tempfile
from pathlib import Path

import pytest

from tests.malformed_command import FIXTURES, FORMATS, SUFFIX, Command, convert_own
from tests.malformed_inputs import (
    ACCEPTED,
    CHAKRA,
    DEEP,
    DOUBLING,
    HLO,
    JSON,
    JUNK,
    STABLEHLO,
    et_chain,
    et_frame_ends,
    hlo_chain,
    json_chain,
    mlir_chain,
)

pytest.importorskip("jaxlib")

CUTS, MANY_CUTS = 15, 50


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return Command(tmp_path)


# --- truncation

SMALL = (
    "stablehlo/hand_collectives.mlir",
    "stablehlo/hand_quantized.mlir",
    "stablehlo/hand_small_ops.mlir.gz",
    "stablehlo/scan_nested.mlir",
    "binary/dynamic_mlp.jax_export",
    "binary/llama_fsdp_tp_local_N8.mlirbc",
    "binary/llama_fsdp_tp_local_N8.vhlo.mlirbc",
    "hlo/cnn_train.hlo.txt.gz",
    "hlo/hand_groups.hlo.txt",
    "binary/llama_fsdp_tp_global_N8.hlo.pb.gz",
)
ALL = sorted(
    str(path.relative_to(FIXTURES))
    for room in ("stablehlo", "hlo", "binary")
    for path in (FIXTURES / room).iterdir()
)


def _is_still_sound(name: str, data: bytes, cut: int) -> bool:
    """Nothing was lost (blanks and padding at the end), or a trace was cut between two of its nodes.

    Chakra traces have no end mark, so the latter is a shorter sound trace unless a dependency is missing.
    """
    if name.endswith(".et"):
        return cut in et_frame_ends(data)
    return not data[cut:].strip(b"\0 \r\n")


def _check_cuts(command: Command, name: str, data: bytes, cuts: int = MANY_CUTS) -> None:
    """Cut at random places, the same in every run."""
    wrong: dict[int, tuple[list[str], str]] = {}
    for cut in random.Random(name).sample(range(1, len(data)), min(cuts, len(data) - 1)):
        source = command.source(name, data[:cut])
        outcome = command.run(source)
        complaints = outcome.complaints(source)
        is_sound = outcome.code == 0 and _is_still_sound(name, data, cut)
        if not is_sound and (outcome.code != 3 or complaints):
            wrong[cut] = (complaints, outcome.start)
    assert wrong == {}


@pytest.mark.parametrize("name", SMALL)
def test_truncated_fixtures(command: Command, name: str) -> None:
    _check_cuts(command, Path(name).name, (FIXTURES / name).read_bytes(), CUTS)


@pytest.mark.parametrize("name", ALL)
def test_all_truncated_fixtures(command: Command, name: str) -> None:
    _check_cuts(command, Path(name).name, (FIXTURES / name).read_bytes())


@pytest.mark.parametrize("name", [name for name in ALL if name.endswith(".gz")])
def test_all_truncated_fixtures_unpacked(command: Command, name: str) -> None:
    data = gzip.decompress((FIXTURES / name).read_bytes())
    _check_cuts(command, Path(name).name.removesuffix(".gz"), data)


def _own(folder: Path, name: str) -> bytes:
    """One of our own files: of a small program, or of a pipeline for traces so that they hold messages."""
    if ".et" in name:
        return convert_own("hlo/pipeline_ring.hlo.txt", folder / name, "--ranks", "1")
    return convert_own("stablehlo/mlp.mlir", folder / name)


@pytest.mark.parametrize("name", ["mlp.json", "mlp.arrow", "ring.et", "ring.et.gz"])
def test_truncated_outputs(command: Command, name: str) -> None:
    _check_cuts(command, f"cut {name}", _own(command.folder, name), CUTS)


@pytest.mark.parametrize("name", ["mlp.json", "mlp.arrow"])
def test_truncated_packed_outputs(command: Command, name: str) -> None:
    _check_cuts(command, f"{name}.gz", gzip.compress(_own(command.folder, name), mtime=0), CUTS)


@pytest.mark.parametrize("suffix", [".json", ".arrow", ".et"])
@pytest.mark.parametrize("name", [name for name in ALL if "llama" in name and "N1024" not in name])
def test_all_truncated_outputs(command: Command, name: str, suffix: str) -> None:
    options = ["--ranks", "0"] if suffix == ".et" else []
    data = convert_own(name, command.folder / f"whole{suffix}", *options)
    _check_cuts(command, f"cut{suffix}", data)


# --- junk and wrong formats


@pytest.mark.parametrize("name", JUNK)
def test_junk(command: Command, name: str) -> None:
    """Under a name that tells nothing, under that of each format, and where each format is forced."""
    for suffix in (".bin", *SUFFIX.values()):
        command.refuse(command.source(f"junk{suffix}", JUNK[name]))
    for chosen in FORMATS:
        command.refuse(command.source("junk.bin", JUNK[name]), "--from", chosen)


@pytest.mark.parametrize("chosen", ["", *FORMATS])
def test_an_empty_file(command: Command, chosen: str) -> None:
    options = ("--from", chosen) if chosen else ()
    assert "empty" in command.refuse(command.source("empty.mlir", b""), *options)


@pytest.mark.parametrize("name", ["step.mlir.gz", "step.hlo.gz", "step.json.gz", "step.et.gz"])
def test_a_packed_file_that_is_cut_early_is_not_called_empty(command: Command, name: str) -> None:
    data = gzip.compress(random.Random(name).randbytes(100), mtime=0)
    assert "is empty" not in command.refuse(command.source(name, data[:12]))


@pytest.mark.parametrize(
    ("own", "form"),
    [
        ("stablehlo", "stablehlo/mlp.mlir"),
        ("stablehlo", "binary/llama_fsdp_tp_local_N8.mlirbc"),
        ("stablehlo", "binary/llama_fsdp_tp_local_N8.vhlo.mlirbc"),
        ("stablehlo", "binary/dynamic_mlp.jax_export"),
        ("hlo", "hlo/mlp.hlo.txt"),
        ("hlo", "binary/llama_fsdp_tp_global_N8.hlo.pb.gz"),
        ("op-graph", "mlp.json"),
        ("op-graph-arrow", "mlp.arrow"),
        ("chakra", "ring.et"),
        ("chakra", "ring.et.gz"),
    ],
)
def test_wrong_format(command: Command, own: str, form: str) -> None:
    source = FIXTURES / form
    if "/" not in form:
        source = command.folder / form
        _own(command.folder, form)
    for other in FORMATS:
        if other != own:
            command.refuse(source, "--from", other)


# --- programs that are wrong in one way

_TABLES = {"stablehlo": STABLEHLO, "hlo": HLO, "op-graph": JSON, "chakra": CHAKRA}


@pytest.mark.parametrize(
    ("form", "name"), [(form, name) for form, table in _TABLES.items() for name in table]
)
def test_faults(command: Command, form: str, name: str) -> None:
    command.refuse(command.source(f"wrong{SUFFIX[form]}", _TABLES[form][name]), "--from", form)


@pytest.mark.parametrize("name", DEEP)
def test_deep_nesting(command: Command, name: str) -> None:
    # Types may nest as deep as they like, in XLA: it is we who have a limit.
    command.refuse(command.source(name, DEEP[name]), code=4 if name == "tuples.hlo" else 3)


@pytest.mark.parametrize("name", ACCEPTED)
def test_unusual_but_sound(command: Command, name: str) -> None:
    outcome = command.run(command.source(name, ACCEPTED[name]))
    assert (outcome.code, outcome.left) == (0, ("graph.json",)), outcome.start
    assert not outcome.has_control_characters


@pytest.mark.parametrize("name", ["lines.mlir", "lines.hlo", "lines.json"])
def test_a_byte_order_mark_is_accepted_or_refused(command: Command, name: str) -> None:
    source = command.source(name, b"\xef\xbb\xbf" + ACCEPTED[name])
    outcome = command.run(source)
    assert outcome.code == 0 or (outcome.code, outcome.complaints(source)) == (3, []), outcome.start


@pytest.mark.parametrize("name", DOUBLING)
def test_calls_that_double_are_not_written_out(command: Command, name: str) -> None:
    """The program is sound, so unsupported (4) is as true an answer as malformed (3)."""
    source = command.source(name, DOUBLING[name])
    outcome = command.run(source)
    assert outcome.code in {3, 4}, outcome.start
    assert outcome.complaints(source) == [], outcome.start


# --- long chains


def _check_chain(command: Command, count: int) -> None:
    """Through every reader, none of which may recurse; and closed to a ring."""
    files = [command.source("chain.json", json_chain(count))]
    for name in ("chain.arrow", "chain.et", "again.arrow"):
        files.append(command.folder / name)
        convert_own(str(files[-2]), files[-1], "--ranks", "0")
    for file in files:
        file.unlink()
    for name, data in (("chain.mlir", mlir_chain(count // 10)), ("chain.hlo", hlo_chain(count // 10))):
        assert command.run(command.source(name, data)).code == 0
    for name, data in (("ring.json", json_chain(count, ring=True)), ("ring.et", et_chain(count, ring=True))):
        assert "cycle" in command.refuse(command.source(name, data))


def test_long_chains(command: Command) -> None:
    _check_chain(command, 30_000)


def test_chains_of_a_million(command: Command) -> None:
    _check_chain(command, 1_000_000)
