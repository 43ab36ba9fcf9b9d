"""Recordings of rocprofv3: database and JSON have equal content, and no event is lost."""

from __future__ import annotations

import gzip
import json
import math
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fixtures.make import rocprof
from hespas.converters import load_format, sniff
from hespas.converters.format import ReadOptions
from hespas.graph import Diagnostics, OpClass, Profile
from hespas.graph.errors import FormatError, UnsupportedError

FILES = {rocprof.DATABASE: "rocpd", rocprof.TRACKS: "rocpd", rocprof.DOCUMENT: "rocprofv3"}


def read(path: Path) -> tuple[Profile, Diagnostics]:
    entry, diagnostics = sniff(path), Diagnostics()
    assert entry.read is not None
    profile = entry.read(path, ReadOptions(), diagnostics)
    assert isinstance(profile, Profile)
    return profile, diagnostics


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "results.db"
    path.write_bytes(gzip.decompress(rocprof.DATABASE.read_bytes()))
    return path


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def contents(path: Path) -> list[str]:
    data = path.read_bytes()
    if not data.startswith(b"\x1f\x8b"):
        return data.decode().splitlines()
    connection = sqlite3.connect(":memory:")
    with closing(connection):
        connection.deserialize(gzip.decompress(data))
        return list(connection.iterdump())


def test_the_committed_files_are_what_the_script_makes(tmp_path: Path) -> None:
    rocprof.write_database_of(tmp_path / "a.gz", apart=False)
    rocprof.write_database_of(tmp_path / "b.gz", apart=True)
    rocprof.write_document(tmp_path / "c")
    for made, kept in zip(("a.gz", "b.gz", "c"), FILES, strict=True):
        assert contents(tmp_path / made) == contents(kept)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shared", ["", "string", "info_kernel_symbol", "metadata"])
def test_tables_need_no_suffix(shared: str, packed: bool, database: Path) -> None:
    """All of a set without one, or one table for all sets; also where the names stand without quotes."""
    with closing(sqlite3.connect(database)) as connection:
        lines = [line for line in connection.iterdump() if "_909" not in line and "CREATE VIEW" not in line]
    script = "\n".join(lines)
    suffix, whole = "_019ad0f2_908", load_set(database, script)
    names = [f"rocpd_{shared}{suffix}"] if shared else sorted(set(re.findall(rf"rocpd_\w+{suffix}", script)))
    for name in names:
        short = name.removesuffix(suffix)
        script = script.replace(f'"{name}"', short).replace(f"`{name}`", short).replace(name, short)
    plain = load_set(database, script, packed=packed)
    for column in ("kernel_id", "op_id", "category_id"):
        rows = [[each.strings[row] for row in getattr(each, column).tolist()] for each in (whole, plain)]
        assert rows[0] == rows[1]
    assert plain.duration_ns.tolist() == whole.duration_ns.tolist()
    assert plain.metadata["schema_version"] == "3"


def load_set(path: Path, script: str, *, packed: bool = False) -> Profile:
    """Create a database with a script, and return its profile."""
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
    if packed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    return read(path)[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_event_of_two_processes_is_found_as_it_is_meant(path: Path) -> None:
    assert sniff(path).name == FILES[path]
    profile, diagnostics = read(path)
    texts, expected = profile.strings, rocprof.expected()
    found = [
        (
            texts[int(profile.kernel_id[row])],
            texts[int(profile.category_id[row])],
            texts[int(profile.op_id[row])],
            texts[int(profile.shapes_id[row])],
            int(profile.rank[row]),
            int(profile.stream[row]),
            int(profile.run[row]),
            float(profile.start_ns[row]),
            float(profile.duration_ns[row]),
            -1 if math.isnan(profile.bytes_moved[row]) else float(profile.bytes_moved[row]),
        )
        for row in range(len(profile))
    ]
    assert found == [
        (event.kernel, event.category, event.op, event.shapes, event.rank, event.stream, event.run,
         event.start_ns, event.duration_ns, event.bytes_moved)
        for event in expected
    ]  # fmt: skip
    comms = zip(profile.comms.event.tolist(), profile.comms.kind_id.tolist(), strict=True)
    assert [(row, texts[kind]) for row, kind in comms] == [
        (row, event.collective) for row, event in enumerate(expected) if event.collective
    ]
    names = [texts[row] for row in profile.kernel_id.tolist()]
    assert profile.op_class[names.index("MEMORY_COPY_HOST_TO_DEVICE")] == OpClass.MEMORY
    assert profile.op_class[names.index("MEMORY_COPY_DEVICE_TO_DEVICE")] == OpClass.MOVE
    assert profile.devices == ("AMD Instinct MI300X",)
    counts = diagnostics.counts()
    assert counts[f"{FILES[path]}.unlinked"] == 4
    assert counts[f"{FILES[path]}.linked-by-name"] == 2
    assert counts[f"{FILES[path]}.ranks"] == 2


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_of_the_machine_gets_into_a_profile(path: Path) -> None:
    profile, _ = read(path)
    kept = [*profile.strings, *profile.metadata, *profile.metadata.values(), *profile.devices]
    assert not [text for text in kept if "secret" in text]
    assert profile.metadata["first_event_ns"] == "70000000000000"


def test_calls_of_the_runtime_are_no_operations_of_the_host() -> None:
    profile, _ = read(rocprof.DATABASE)
    names = {profile.strings[row] for row in profile.host.name_id.tolist()}
    assert {"aten::addmm", "ncclAllReduce", "step 2"} <= names
    assert not [name for name in names if name.startswith("hip")]


def test_device_time_is_that_of_the_tables(database: Path) -> None:
    total = 0
    with closing(sqlite3.connect(database)) as connection:
        for table in ("rocpd_kernel_dispatch", "rocpd_memory_copy"):
            for pid in (908, 909):
                query = f"SELECT sum(end - start) FROM {table}_019ad0f2_{pid}"
                total += connection.execute(query).fetchone()[0]
    profile, _ = read(database)
    assert int(profile.duration_ns.sum()) == total


INFO = ["info_node", "info_process", "info_agent", "info_kernel_symbol"]


@pytest.mark.parametrize("name", ["metadata", "string", *INFO, "event", "region"])
def test_any_table_but_those_of_work_may_be_missing(name: str, database: Path) -> None:
    whole, _ = read(database)
    for pid in (908, 909):
        change(database, f"DROP TABLE rocpd_{name}_019ad0f2_{pid}")
    profile, _ = read(database)
    assert profile.duration_ns.tolist() == whole.duration_ns.tolist()


def test_views_are_not_needed_and_a_hostile_one_is_not_run(database: Path) -> None:
    whole, _ = read(database)
    endless = "WITH RECURSIVE n(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM n) SELECT a AS start FROM n"
    change(database, "DROP VIEW rocpd_kernel_dispatch", f"CREATE VIEW rocpd_kernel_dispatch AS {endless}")
    profile, _ = read(database)
    assert profile.duration_ns.tolist() == whole.duration_ns.tolist()


def test_kernels_without_streams_are_ordered_by_queue(database: Path) -> None:
    for pid in (908, 909):
        for table in ("kernel_dispatch", "memory_copy"):
            change(database, f"UPDATE rocpd_{table}_019ad0f2_{pid} SET stream_id = 0")
    profile, diagnostics = read(database)
    assert set(profile.stream.tolist()) == {0, 1}
    assert diagnostics.counts()["rocpd.ordered-by-queue"] == 10


def test_tables_without_a_suffix_are_read(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    change(
        path,
        "CREATE TABLE rocpd_kernel_dispatch (id INTEGER PRIMARY KEY, kernel_id INT, start INT, end INT)",
        "CREATE TABLE rocpd_info_kernel_symbol (id INTEGER PRIMARY KEY, display_name TEXT)",
        "INSERT INTO rocpd_kernel_dispatch VALUES (1, 5, 100, 130), (2, 6, 140, NULL), (3, NULL, 150, 151)",
        "INSERT INTO rocpd_info_kernel_symbol VALUES (5, 'gemm')",
    )
    profile, diagnostics = read(path)
    assert profile.duration_ns.tolist() == [30.0, 1.0]
    assert [profile.strings[row] for row in profile.kernel_id.tolist()] == ["gemm", ""]
    counts = diagnostics.counts()
    assert counts["rocpd.event-without-time"] == counts["rocpd.unnamed"] == counts["rocpd.other-schema"] == 1


def test_the_older_tracer_and_a_database_without_work_are_told(tmp_path: Path) -> None:
    change(tmp_path / "rpd", "CREATE TABLE rocpd_op (id INT)", "CREATE TABLE rocpd_api (id INT)")
    with pytest.raises(UnsupportedError, match="older rpd tracer"):
        read(tmp_path / "rpd")
    change(tmp_path / "none", "CREATE TABLE rocpd_string_1 (id INT)")
    with pytest.raises(FormatError, match="no tables of kernels"):
        read(tmp_path / "none")
    change(tmp_path / "empty", "CREATE TABLE rocpd_region_1 (id INT)")
    with pytest.raises(FormatError, match="neither device work nor ranges"):
        read(tmp_path / "empty")


def test_more_processes_than_there_can_be_are_refused(tmp_path: Path) -> None:
    change(
        tmp_path / "many",
        "CREATE TABLE rocpd_region_1 (pid INT, tid INT, start INT, end INT)",
        "WITH RECURSIVE n(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM n WHERE a < 2000) "
        "INSERT INTO rocpd_region_1 SELECT a, a, 1, 2 FROM n",
    )
    with pytest.raises(FormatError, match="processes"):
        read(tmp_path / "many")


def test_kernels_known_by_their_counters_alone_are_kept(tmp_path: Path) -> None:
    document = json.loads(rocprof.DOCUMENT.read_text())
    for process in document["rocprofiler-sdk-tool"]:
        kernels = process["buffer_records"].pop("kernel_dispatch")
        process["callback_records"]["counter_collection"] = [{"dispatch_data": each} for each in kernels]
    path = tmp_path / "counted.json"
    path.write_text(json.dumps(document))
    whole, _ = read(rocprof.DOCUMENT)
    profile, _ = read(path)
    assert profile.duration_ns.tolist() == whole.duration_ns.tolist()
    assert profile.op_id.tolist() == whole.op_id.tolist()


def test_the_formats_say_what_they_are() -> None:
    for name in ("rocpd", "rocprofv3"):
        assert load_format(name).name == name


def test_copies_behind_a_view_are_told_and_other_spellings_read(database: Path) -> None:
    before, diagnostics = read(database)
    assert "rocpd.not-stored" not in diagnostics.counts()  # its own views join the sets
    with closing(sqlite3.connect(database)) as connection:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'rocpd_memory_copy%'"
        name: str = connection.execute(query).fetchone()[0]
    change(
        database, f'ALTER TABLE "{name}" RENAME TO renamed', f'ALTER TABLE renamed RENAME TO "{name.upper()}"'
    )
    assert read(database)[0].duration_ns.tolist() == before.duration_ns.tolist()
    change(
        database,
        f'ALTER TABLE "{name.upper()}" RENAME TO renamed',
        f'CREATE VIEW "{name}" AS SELECT * FROM renamed',
    )
    after, diagnostics = read(database)
    assert len(after) < len(before)
    assert diagnostics.counts()["rocpd.not-stored"] == 1
