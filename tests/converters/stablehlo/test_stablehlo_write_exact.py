"""An unchanged graph is written as the program from which it was read, with all attributes."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hespas.converters import load_format
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.stablehlo.mlir import load_bindings
from hespas.converters.stablehlo.program import ProgramForm, form_of_name, in_form, parse_program
from hespas.converters.stablehlo.reader import read_program
from hespas.graph import Diagnostics, OpGraph, Workload
from hespas.graph.builder import region_executions
from hespas.graph.equality import graphs_equal, workloads_equal
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.passes import FoldFree, FuseElementwise, UnrollLoops, with_durations
from tests.converters.stablehlo.replays import FIXTURES, SHARED, read_any, write_bytes

pytest.importorskip("jaxlib")

TEXTS = sorted((FIXTURES / "stablehlo").glob("*.mlir*"))
BINARIES = sorted(path for path in (FIXTURES / "binary").iterdir() if ".hlo." not in path.name)
SHARED_TEXTS = sorted(SHARED.glob("*.mlir.gz"))
"""Without the shared data beside the repository, there are none."""


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def _plain_name(path: Path) -> str:
    return path.name.removesuffix(".gz")


def _read(path: Path) -> Workload:
    return read_program(_content(path), path.name, ReadOptions(), Diagnostics())


def _canonical(data: bytes, *, locations: bool) -> str:
    """Every operation, attribute and type of a program in MLIR's generic form."""
    bindings = load_bindings()
    return bindings.text(parse_program(data, bindings).module, locations=locations, generic=True)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_text_comes_back_byte_for_byte(path: Path, tmp_path: Path) -> None:
    written, found = write_bytes(_read(path), tmp_path / _plain_name(path))
    assert written == _content(path)
    assert found.counts() == {}


@pytest.mark.parametrize("path", BINARIES, ids=lambda path: path.name)
def test_bytecode_comes_back_byte_for_byte(path: Path, tmp_path: Path) -> None:
    written, found = write_bytes(_read(path), tmp_path / path.name)
    assert written == _content(path)
    assert found.counts() == {}


@pytest.mark.parametrize("through", ["op-graph", "op-graph-arrow"])
@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_text_survives_the_hub_s_own_formats(path: Path, through: str, tmp_path: Path) -> None:
    workload, between = _read(path), tmp_path / "between"
    write = load_format(through).write
    assert write is not None
    write(workload, between, WriteOptions(name="between"), Diagnostics())
    again = read_any(between, through)
    assert workloads_equal(workload, again) == []
    written, found = write_bytes(again, tmp_path / _plain_name(path))
    assert written == _content(path)
    assert found.counts() == {}


@pytest.mark.parametrize("path", SHARED_TEXTS, ids=lambda path: path.name)
def test_shared_workloads_come_back_byte_for_byte(path: Path, tmp_path: Path) -> None:
    written, found = write_bytes(_read(path), tmp_path / _plain_name(path))
    assert written == _content(path)
    assert found.counts() == {}


# --- other forms: no operation, attribute, type or location differs


@pytest.mark.parametrize("path", [*TEXTS, *BINARIES], ids=lambda path: path.name)
def test_other_forms_hold_the_same_program(path: Path) -> None:
    bindings, source = load_bindings(), _content(path)
    own = parse_program(source, bindings).form
    located = b"loc(" in source or own is not ProgramForm.TEXT
    bytecode = in_form(source, own, ProgramForm.BYTECODE, "", bindings)
    assert _canonical(bytecode, locations=located) == _canonical(source, locations=located)
    text = in_form(bytecode, ProgramForm.BYTECODE, ProgramForm.TEXT, "", bindings)
    assert _canonical(text, locations=False) == _canonical(source, locations=False)
    assert (b"loc(" in text) == (b"loc(" in source if own is ProgramForm.TEXT else b"loc(" in text)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_portable_artifacts_hold_the_same_program(path: Path) -> None:
    """By what their readers see: StableHLO leaves out of them attributes that have their default values."""
    source = _content(path)
    artifact = in_form(source, ProgramForm.TEXT, ProgramForm.ARTIFACT, "", load_bindings())
    assert artifact.startswith(b"ML\xefR\rStableHLO_v")
    one, two = (
        read_program(data, path.name, ReadOptions(locations=False), Diagnostics()).classes[0]
        for data in (source, artifact)
    )
    assert [each.column for each in graphs_equal(one, two)] == ["attachments"]


def test_locations_survive_every_form() -> None:
    bindings = load_bindings()
    source = _content(FIXTURES / "stablehlo" / "llama_fsdp_tp_global_N8_located.mlir.gz")
    bytecode = in_form(source, ProgramForm.TEXT, ProgramForm.BYTECODE, "", bindings)
    text = in_form(bytecode, ProgramForm.BYTECODE, ProgramForm.TEXT, "", bindings)
    assert _canonical(text, locations=True) == _canonical(source, locations=True)
    artifact = in_form(source, ProgramForm.TEXT, ProgramForm.ARTIFACT, "", bindings)
    one, two = (
        read_program(data, "", ReadOptions(), Diagnostics()).classes[0] for data in (source, artifact)
    )
    assert [each.column for each in graphs_equal(one, two)] == ["attachments"]
    assert len({one.strings[row] for row in one.source_id.tolist()}) > 40


@pytest.mark.parametrize(
    ("name", "version", "form"),
    [
        ("a.mlir", "", ProgramForm.TEXT),
        ("a.stablehlo.gz", "", ProgramForm.TEXT),
        ("standard.output", "", ProgramForm.TEXT),
        ("a.mlirbc", "", ProgramForm.BYTECODE),
        ("a.mlir.bc.gz", "", ProgramForm.BYTECODE),
        ("a.mlirbc", "1.0.0", ProgramForm.ARTIFACT),
        ("a.vhlo.mlirbc", "", ProgramForm.ARTIFACT),
        ("a.vhlo", "", ProgramForm.ARTIFACT),
        ("a.jax_export", "", ProgramForm.EXPORT),
    ],
)
def test_the_name_tells_the_form(name: str, version: str, form: ProgramForm) -> None:
    assert form_of_name(name, version) is form


def test_text_of_a_version_is_refused() -> None:
    with pytest.raises(UsageError, match="text has no version"):
        form_of_name("a.mlir", "1.0.0")


def test_a_version_is_that_of_the_artifact(tmp_path: Path) -> None:
    workload = _read(FIXTURES / "stablehlo" / "mlp.mlir")
    options = WriteOptions(name="old.vhlo", version="1.0.0")
    written, found = write_bytes(workload, tmp_path / "old.vhlo", options)
    assert written.startswith(b"ML\xefR\rStableHLO_v1.0.0\0")
    assert found.counts() == {}


@pytest.mark.parametrize("version", load_format("stablehlo").write_versions)
def test_every_version_offered_is_written(version: str) -> None:
    source = _content(FIXTURES / "stablehlo" / "branches.mlir")
    written = in_form(source, ProgramForm.TEXT, ProgramForm.ARTIFACT, version, load_bindings())
    assert f"StableHLO_v{version}\0".encode() in written[:40]
    assert parse_program(written, load_bindings()).form is ProgramForm.ARTIFACT


def test_what_an_old_version_lacks_is_refused() -> None:
    source = _content(FIXTURES / "stablehlo" / "hand_mesh_groups.mlir")
    with pytest.raises(UnsupportedError, match=r"no portable artifact of StableHLO 0\.9\.0"):
        in_form(source, ProgramForm.TEXT, ProgramForm.ARTIFACT, "0.9.0", load_bindings())


def test_an_export_file_is_not_made_up(tmp_path: Path) -> None:
    workload = _read(FIXTURES / "stablehlo" / "mlp.mlir")
    with pytest.raises(UnsupportedError, match=r"jax\.export"):
        write_bytes(workload, tmp_path / "a.jax_export")
    assert not (tmp_path / "a.jax_export").exists()


def test_gz_packs_the_same_bytes_each_time(tmp_path: Path) -> None:
    path = FIXTURES / "stablehlo" / "mlp.mlir"
    one, _ = write_bytes(_read(path), tmp_path / "one.mlir.gz")
    two, _ = write_bytes(_read(path), tmp_path / "two.mlir.gz")
    assert gzip.decompress(one) == path.read_bytes()
    assert one == two


# --- when a graph still is the program


def _changed(name: str, change: Callable[[OpGraph], OpGraph]) -> Workload:
    workload = _read(FIXTURES / "stablehlo" / name)
    return replace(workload, classes=(change(workload.classes[0]),))


def test_durations_do_not_make_another_program_and_are_reported(tmp_path: Path) -> None:
    estimated = _changed("mlp.mlir", lambda graph: with_durations(graph, np.arange(len(graph), dtype=float)))
    written, found = write_bytes(estimated, tmp_path / "a.mlir")
    assert written == (FIXTURES / "stablehlo" / "mlp.mlir").read_bytes()
    assert found.counts() == {"stablehlo.durations": len(estimated.classes[0])}


@pytest.mark.parametrize(
    ("column", "code"),
    [
        ("stream", "streams"),
        ("flops", "costs"),
        ("rate_dtype", "costs"),
        ("id", "names"),
        ("name_id", "names"),
    ],
)
def test_annotations_are_reported_by_what_they_are(column: str, code: str, tmp_path: Path) -> None:
    def change(graph: OpGraph) -> OpGraph:
        values = getattr(graph, column).copy()
        values[0] = 5
        return replace(graph, **{column: values})

    written, found = write_bytes(_changed("mlp.mlir", change), tmp_path / "a.mlir")
    assert written == (FIXTURES / "stablehlo" / "mlp.mlir").read_bytes()
    assert found.counts() == {f"stablehlo.{code}": 1}


def test_trips_that_the_program_does_not_say_are_reported(tmp_path: Path) -> None:
    def settle(graph: OpGraph) -> OpGraph:
        trips = np.where(np.isnan(graph.regions.trips), 7.0, graph.regions.trips)
        return replace(graph, regions=replace(graph.regions, trips=trips))

    written, found = write_bytes(_changed("while_unknown.mlir", settle), tmp_path / "a.mlir")
    assert b"hespas.replay" not in written
    assert found.counts() == {"stablehlo.trips": 1}


def test_other_trips_than_the_program_s_are_another_program(tmp_path: Path) -> None:
    def lengthen(graph: OpGraph) -> OpGraph:
        regions = replace(graph.regions, trips=graph.regions.trips + 1)
        return replace(graph, regions=regions, executions=region_executions(regions, graph.region))

    written, _ = write_bytes(_changed("fori_static.mlir", lengthen), tmp_path / "a.mlir")
    assert b"hespas.replay" in written


@pytest.mark.parametrize(
    "rewrite", [FuseElementwise(), FoldFree(), UnrollLoops()], ids=["fused", "folded", "unrolled"]
)
def test_what_passes_made_is_another_program(
    rewrite: Callable[[OpGraph, Diagnostics], OpGraph], tmp_path: Path
) -> None:
    rewritten = _changed("fori_static.mlir", lambda graph: rewrite(graph, Diagnostics()))
    written, found = write_bytes(rewritten, tmp_path / "a.mlir")
    assert b"hespas.replay" in written
    (message,) = [each.message for each in found if each.code == "stablehlo.replay"]
    assert "changed the program that it was read from" in message


def test_an_edited_operation_is_another_program(tmp_path: Path) -> None:
    def edit(graph: OpGraph) -> OpGraph:
        ops = graph.op_id.copy()
        ops[ops == graph.strings.find("stablehlo.add")] = graph.strings.find("stablehlo.dot_general")
        return replace(graph, op_id=ops)

    written, found = write_bytes(_changed("mlp.mlir", edit), tmp_path / "a.mlir")
    assert b"hespas.replay" in written
    assert any("op_id" in each.message for each in found)


def test_another_number_of_ranks_is_another_program(tmp_path: Path) -> None:
    workload = _read(FIXTURES / "stablehlo" / "hand_collectives.mlir")
    assert workload.num_ranks == 8
    more = Workload.spmd(workload.classes[0], 16)
    written, found = write_bytes(more, tmp_path / "a.mlir")
    assert b"mhlo.num_replicas = 16" in written
    assert found.counts()["stablehlo.replay"]


@pytest.mark.parametrize("damage", [b"module {", b"", b"ML\xefR\rStableHLO_v1.0.0\0nonsense", b"\xff\xfe"])
def test_a_damaged_attachment_is_no_program(damage: bytes, tmp_path: Path) -> None:
    broken = _changed("mlp.mlir", lambda graph: replace(graph, attachments={"stablehlo": damage}))
    written, found = write_bytes(broken, tmp_path / "a.mlir")
    assert b"hespas.replay" in written
    assert any("cannot be read" in each.message for each in found if each.code == "stablehlo.replay")


def test_the_program_of_another_graph_is_not_written(tmp_path: Path) -> None:
    other = (FIXTURES / "stablehlo" / "top_k.mlir").read_bytes()
    swapped = _changed("mlp.mlir", lambda graph: replace(graph, attachments={"stablehlo": other}))
    written, _ = write_bytes(swapped, tmp_path / "a.mlir")
    assert b"hespas.replay" in written


def test_writing_does_not_change_the_workload(tmp_path: Path) -> None:
    path = FIXTURES / "stablehlo" / "hand_loops.mlir"
    workload = _read(path)
    write_bytes(workload, tmp_path / "a.mlir")
    assert workloads_equal(workload, _read(path)) == []
