"""Exports of Nsight Systems: every row is read as generated, also with missing tables."""

from __future__ import annotations

import gzip
import math
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from fixtures.make.nsys_export import FULL, GRAPHS, SPARSE, full_rows, write_full, write_graphs, write_sparse
from hespas.converters import sniff
from hespas.converters.format import ReadOptions
from hespas.converters.nsys import FORMAT
from hespas.graph import Diagnostics, OpClass, Profile
from hespas.graph.errors import FormatError, UnsupportedError

FILES = {FULL: write_full, SPARSE: write_sparse, GRAPHS: write_graphs}
WORK = ("KERNEL", "MEMCPY", "MEMSET")


def read(path: Path) -> tuple[Profile, Diagnostics]:
    diagnostics = Diagnostics()
    assert FORMAT.read is not None
    profile = FORMAT.read(path, ReadOptions(), diagnostics)
    assert isinstance(profile, Profile)
    return profile, diagnostics


def unpacked(path: Path, into: Path) -> Path:
    into.write_bytes(gzip.decompress(path.read_bytes()))
    return into


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return unpacked(FULL, tmp_path / "export.sqlite")


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def shown(profile: Profile, row: int) -> tuple[object, ...]:
    text = profile.strings
    moved = float(profile.bytes_moved[row])
    return (
        text[int(profile.kernel_id[row])],
        text[int(profile.category_id[row])],
        text[int(profile.op_id[row])],
        text[int(profile.shapes_id[row])],
        int(profile.rank[row]),
        int(profile.stream[row]),
        int(profile.run[row]),
        float(profile.start_ns[row]),
        float(profile.duration_ns[row]),
        -1 if math.isnan(moved) else moved,
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_committed_file_is_what_the_script_makes(path: Path, tmp_path: Path) -> None:
    FILES[path](tmp_path / "again.gz")
    made = unpacked(tmp_path / "again.gz", tmp_path / "again")
    kept = unpacked(path, tmp_path / "kept")
    with closing(sqlite3.connect(made)) as one, closing(sqlite3.connect(kept)) as other:
        assert list(one.iterdump()) == list(other.iterdump())


def test_every_event_of_two_processes_is_found_as_it_is_meant() -> None:
    profile, diagnostics = read(FULL)
    expected = full_rows()[1]
    first = min(event.start_ns for event in expected)
    assert [shown(profile, row) for row in range(len(profile))] == [
        (event.kernel, event.category, event.op, event.shapes, event.rank, event.stream, event.run,
         event.start_ns - first, event.duration_ns, event.bytes_moved)
        for event in expected
    ]  # fmt: skip
    collective = [(row, event.collective) for row, event in enumerate(expected) if event.collective]
    found = zip(profile.comms.event.tolist(), profile.comms.kind_id.tolist(), strict=True)
    assert [(row, profile.strings[kind]) for row, kind in found] == collective
    assert {int(profile.op_class[row]) for row, _ in collective} == {OpClass.COLLECTIVE}
    assert profile.devices == ("NVIDIA H100 80GB HBM3",)
    counts = diagnostics.counts()
    assert counts["nsys.unlinked"] == counts["nsys.no-launch"] == 4
    assert counts["nsys.linked-by-graph-node"] == 2
    assert counts["nsys.open-range"] == 2
    assert counts["nsys.ranks"] == 2


def test_the_host_operations_nest_and_keep_sequence_and_thread() -> None:
    profile, _ = read(FULL)
    names = [profile.strings[row] for row in profile.host.name_id.tolist()]
    tuned = names.index("gemm picked by the tuner")
    chain: list[str] = []
    while tuned >= 0:
        chain.append(names[tuned])
        tuned = int(profile.host.parent[tuned])
    assert chain == ["gemm picked by the tuner", "aten::addmm", "aten::linear", "ProfilerStep#3"]
    backward = names.index("autograd::engine::evaluate_function: AddmmBackward0")
    assert int(profile.host.parent[backward]) == -1
    assert int(profile.host.sequence[backward]) == 6
    assert profile.strings[int(profile.host.thread_id[backward])] == "4101:4151"
    assert int(profile.host.parent[names.index("epoch")]) == -1


def test_nothing_of_the_machine_gets_into_a_profile() -> None:
    profile, _ = read(FULL)
    kept = [*profile.strings, *profile.metadata, *profile.metadata.values(), *profile.devices]
    assert not [text for text in kept if "secret" in text]
    assert profile.metadata["schema_version"] == "3.16.1"
    assert profile.metadata["session_start_ns"] == "1767225600000000000"
    assert profile.metadata["first_event_ns"] == "3000000005"


def test_device_time_is_that_of_the_tables(export: Path) -> None:
    with closing(sqlite3.connect(export)) as connection:
        sums = [
            connection.execute(f"SELECT sum(end - start) FROM CUPTI_ACTIVITY_KIND_{name}").fetchone()[0]
            for name in WORK
        ]
    profile, _ = read(export)
    assert int(profile.duration_ns.sum()) == sum(sums)


TABLES = sorted(full_rows()[0])


@pytest.mark.parametrize("table", TABLES)
def test_any_table_may_be_missing(table: str, export: Path) -> None:
    whole, _ = read(export)
    change(export, f"DROP TABLE {table}")
    profile, _ = read(export)
    lost = {f"CUPTI_ACTIVITY_KIND_{name}" for name in WORK}
    if table in lost:
        assert len(profile) < len(whole)
    else:
        assert profile.duration_ns.tolist() == whole.duration_ns.tolist()
        assert profile.stream.tolist() == whole.stream.tolist()


@pytest.mark.parametrize("table", [f"CUPTI_ACTIVITY_KIND_{name}" for name in (*WORK, "RUNTIME")])
def test_any_column_may_be_missing_or_null(table: str, export: Path) -> None:
    whole, _ = read(export)
    with closing(sqlite3.connect(export)) as connection:
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    for column in columns:
        if column in {"start", "end"}:
            continue
        change(export, f"CREATE TABLE kept AS SELECT * FROM {table}", f"UPDATE kept SET {column} = NULL",
               f"ALTER TABLE {table} RENAME TO away", f"ALTER TABLE kept RENAME TO {table}")  # fmt: skip
        nulls, _ = read(export)
        change(export, f"ALTER TABLE {table} DROP COLUMN {column}")
        without, _ = read(export)
        change(export, f"DROP TABLE {table}", f"ALTER TABLE away RENAME TO {table}")
        for profile in (nulls, without):
            assert sorted(profile.duration_ns.tolist()) == sorted(whole.duration_ns.tolist())


def test_work_without_times_is_left_out_and_told() -> None:
    profile, diagnostics = read(SPARSE)
    assert profile.duration_ns.tolist() == [30.0, 5.0, 40.0, 1.0]
    assert profile.stream.tolist() == [7, 7, -1, 7]
    assert [profile.strings[row] for row in profile.kernel_id.tolist()] == [
        "kernel_one", "kernel_one", "kernel_two", ""
    ]  # fmt: skip
    counts = diagnostics.counts()
    assert counts["nsys.event-without-time"] == counts["nsys.unnamed"] == 1
    assert counts["nsys.no-launch"] == 2


def test_equal_correlations_of_two_processes_are_ambiguous_where_kernels_tell_no_process(
    export: Path,
) -> None:
    change(export, "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = NULL")
    _, diagnostics = read(export)
    assert diagnostics.counts()["nsys.ambiguous-launch"] > 0
    change(export, "DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE (globalTid >> 24) & 65535 = 4102")
    profile, diagnostics = read(export)
    assert "nsys.ambiguous-launch" not in diagnostics.counts()
    assert "aten::addmm" in {profile.strings[row] for row in profile.op_id.tolist()}


def test_a_graph_counts_once_and_ranges_of_xla_name_instruction_and_module() -> None:
    profile, diagnostics = read(GRAPHS)
    ops = [
        (profile.strings[op], profile.strings[module], profile.strings[category], duration)
        for op, module, category, duration in zip(
            profile.op_id.tolist(), profile.module_id.tolist(), profile.category_id.tolist(),
            profile.duration_ns.tolist(), strict=True,
        )
    ]  # fmt: skip
    assert ops == [
        ("gemm_fusion_dot.1", "jit_step", "kernel", 50.0),
        ("XlaModule", "jit_step", "kernel", 40.0),
        ("XlaModule", "jit_step", "cuda_graph", 70.0),
    ]
    assert diagnostics.counts()["nsys.graph-of-recorded-nodes"] == 1


def test_several_kinds_of_gpu_are_told_apart(export: Path) -> None:
    change(export, "UPDATE TARGET_INFO_GPU SET name = 'NVIDIA A100' WHERE id = 1")
    profile, _ = read(export)
    names = np.array(profile.devices)[profile.device_index]
    assert set(zip(profile.rank.tolist(), names.tolist(), strict=True)) == {
        (0, "NVIDIA H100 80GB HBM3"), (1, "NVIDIA A100")
    }  # fmt: skip


def test_it_is_told_by_its_tables_wherever_they_stand(export: Path, tmp_path: Path) -> None:
    assert sniff(FULL).name == sniff(export).name == "nsys"
    wide = ", ".join(f"column_{number} INTEGER" for number in range(900))
    late = tmp_path / "nameless"
    change(late, *(f"CREATE TABLE first_{number} ({wide})" for number in range(20)))
    change(late, "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT)")
    assert b"CUPTI" not in late.read_bytes()[:65536]
    assert sniff(late).name == "nsys"
    (tmp_path / "packed").write_bytes(gzip.compress(late.read_bytes()))
    assert sniff(tmp_path / "packed").name == "nsys"
    other = tmp_path / "other"
    change(other, "CREATE TABLE people (name TEXT)")
    with pytest.raises(FormatError, match="no known format"):
        sniff(other)


def test_what_must_be_exported_or_is_of_another_tool_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.nsys-rep").write_bytes(b"\x00" * 500)
    with pytest.raises(UnsupportedError, match="exported") as caught:
        read(tmp_path / "run.nsys-rep")
    assert "nsys export --type sqlite run.nsys-rep" in str(caught.value)
    change(
        tmp_path / "old", "CREATE TABLE StringTable (_id_ INT)", "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (a)"
    )
    with pytest.raises(UnsupportedError, match="nvprof"):
        read(tmp_path / "old")


def test_an_export_without_events_is_refused(tmp_path: Path) -> None:
    change(tmp_path / "empty", "CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
    with pytest.raises(FormatError, match="neither device work nor ranges"):
        read(tmp_path / "empty")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'", "not an integer"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET streamId = x'00'", "not an integer"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 9223372036854775807", "63 bits"),
        ("UPDATE NVTX_EVENTS SET start = 1.5", "not an integer"),
    ],
)
def test_values_that_make_no_sense_are_refused(statement: str, message: str, export: Path) -> None:
    change(export, statement)
    with pytest.raises(FormatError, match=message):
        read(export)


def test_a_newer_schema_and_a_log_beside_are_told(export: Path) -> None:
    change(export, "UPDATE META_DATA_EXPORT SET value = '4.0' WHERE name = 'EXPORT_SCHEMA_VERSION'")
    export.with_name(f"{export.name}-wal").write_bytes(b"frames")
    _, diagnostics = read(export)
    assert diagnostics.counts()["nsys.newer-schema"] == diagnostics.counts()["nsys.write-ahead-log"] == 1


def test_other_spellings_of_the_names_are_read_alike(export: Path) -> None:
    before, _ = read(export)
    change(
        export,
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME TO renamed",
        "ALTER TABLE renamed RENAME TO cupti_activity_kind_kernel",
        'ALTER TABLE cupti_activity_kind_kernel RENAME COLUMN "end" TO "END"',
    )
    after, diagnostics = read(export)
    assert after.duration_ns.tolist() == before.duration_ns.tolist()
    assert "nsys.not-stored" not in diagnostics.counts()


def test_kernels_behind_a_view_are_told(export: Path) -> None:
    change(
        export,
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME TO behind",
        "CREATE VIEW cupti_activity_kind_kernel AS SELECT * FROM behind",
    )
    _, diagnostics = read(export)
    told = [each for each in diagnostics if each.code == "nsys.not-stored"]
    assert len(told) == 1
    assert "CUPTI_ACTIVITY_KIND_KERNEL: it is a view" in told[0].message


def test_less_than_no_time_is_no_part_of_the_device_time(export: Path) -> None:
    """Shares of what is not linked stay between nothing and all of it."""
    changed = 'correlationId = -5, graphNodeId = NULL, "end" = "start" - 9000'
    rows = "rowid IN (SELECT rowid FROM CUPTI_ACTIVITY_KIND_KERNEL LIMIT 2)"
    change(
        export,
        f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET {changed} WHERE {rows}",
    )
    profile, diagnostics = read(export)
    assert np.count_nonzero(profile.duration_ns < 0) == 2
    told = [each.message for each in diagnostics if each.code == "nsys.no-launch"]
    shares = [float(text.partition(": ")[2].partition("%")[0]) for text in told]
    assert shares
    assert all(0 <= share <= 100 for share in shares)
