"""Round-trip matrix: pairs summed over files, losses compared with declared ones, and its documents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import pytest
from jsonschema import Draft202012Validator

from hespas import api
from hespas.converters import Format, Value, WriteOptions, format_names, load_format
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, UsageError
from hespas.validators.roundtrip import (
    ColumnResult,
    ColumnStatus,
    FilePairs,
    FormatPair,
    PairStatus,
    pairs,
    roundtrip,
    roundtrip_html,
    roundtrip_json,
)
from hespas.validators.roundtrip.matrix import matrix, unreported

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "fixtures" / "stablehlo" / "mlp.mlir"
SHARDED = ROOT / "fixtures" / "stablehlo" / "moe_all_to_all.mlir"


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def pair(*columns: ColumnResult, **findings: int) -> FormatPair:
    told = {code.replace("_", "-").replace("--", "."): count for code, count in findings.items()}
    return FormatPair(source="op-graph", via="chakra", status=PairStatus.KEPT, columns=columns, findings=told)


def files(*pairs: FormatPair) -> list[FilePairs]:
    return [
        FilePairs(path=f"f{number}", format="op-graph", pairs=(each,)) for number, each in enumerate(pairs)
    ]


def test_a_loss_that_the_format_declares_is_reported() -> None:
    lost = ColumnResult("metadata", ColumnStatus.LOST, 3, 3)
    assert "metadata" in load_format("dot").losses[""]
    drawn = FormatPair(source="op-graph", via="dot", status=PairStatus.KEPT, columns=(lost,))
    assert unreported(drawn) == []
    assert unreported(pair(lost)) == ["metadata"]


def test_a_loss_counts_as_reported_only_beside_its_finding() -> None:
    lost = ColumnResult("source_id", ColumnStatus.LOST, 3, 3)
    assert unreported(pair(lost)) == ["source_id"]
    assert unreported(pair(lost, chakra__source_location=3)) == []
    assert unreported(pair(lost, chakra__unknown_duration=3)) == ["source_id"]


def test_a_finding_accounts_for_as_many_rows_as_it_counts() -> None:
    changed = ColumnResult("p2p.tag", ColumnStatus.CHANGED, 9, 6)
    assert unreported(pair(changed, chakra__host_transfer=5)) == ["p2p.tag"]
    assert unreported(pair(changed, chakra__host_transfer=6)) == []
    assert unreported(pair(changed, chakra__host_transfer=5, chakra__permute=1)) == []
    in_three_parts = ColumnResult("p2p.tag", ColumnStatus.CHANGED, 9, 6, 2)
    assert unreported(pair(in_three_parts, chakra__host_transfer=2)) == []
    shifted = ColumnResult("id", ColumnStatus.CHANGED, 9, 6)
    assert unreported(pair(shifted, chakra__permute=1)) == []


def test_a_file_that_is_written_otherwise_each_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = load_format("op-graph")
    times: list[Path] = []

    def write(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
        times.append(path)
        api.write(value, path, format="op-graph", options=options, diagnostics=diagnostics)
        path.write_bytes(path.read_bytes() + b" " * (len(times) % 2))

    unsteady = replace(chosen, write=write)

    def load(name: str) -> Format:
        return unsteady if name == "op-graph" else load_format(name)

    monkeypatch.setattr(pairs, "load_format", load)
    done = roundtrip([PROGRAM], ["op-graph"])
    unstable = {(cell.source, cell.via): cell.unreported for cell in done.cells}
    assert unstable == {("stablehlo", "op-graph"): (), ("op-graph", "op-graph"): ("bytes",)}


def test_the_declaration_of_a_table_covers_its_columns() -> None:
    changed = ColumnResult("p2p.tag", ColumnStatus.CHANGED, 3, 1)
    assert unreported(pair(changed, chakra__host_transfer=1)) == []


def test_what_one_file_loses_in_silence_is_not_covered_by_the_finding_of_another() -> None:
    lost = ColumnResult("source_id", ColumnStatus.LOST, 3, 3)
    done = matrix(files(pair(lost, chakra__source_location=3), pair(lost)))
    assert done.cells[0].unreported == ("source_id",)
    assert not done.valid
    assert done.cells[0].columns == (ColumnResult("source_id", ColumnStatus.LOST, 6, 6),)
    assert done.cells[0].findings == {"chakra.source-location": 3}


def test_refusals_are_counted_by_message_and_are_no_loss() -> None:
    refused = FormatPair(source="op-graph", via="chakra", status=PairStatus.REFUSED, refused="too long")
    done = matrix(files(refused, refused, pair(ColumnResult("flops", ColumnStatus.EXACT, 1, 0))))
    cell = done.cells[0]
    assert (cell.refused, cell.compared, done.valid) == ({"too long": 2}, 1, True)


def _document(content: bytes) -> dict[str, object]:
    schema = json.loads((ROOT / "hespas" / "schemas" / "roundtrip.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    document = json.loads(content)
    cast("_Validator", Draft202012Validator(schema)).validate(document)
    return cast("dict[str, object]", document)


def test_a_program_comes_back_from_the_lossless_formats_and_its_trace_says_what_it_lacks() -> None:
    done = roundtrip([PROGRAM, SHARDED], ["op-graph", "op-graph-arrow", "chakra"])
    cells = {(cell.source, cell.via): cell for cell in done.cells}
    assert done.valid
    for source in ("stablehlo", "op-graph", "op-graph-arrow", "chakra"):
        for via in ("op-graph", "op-graph-arrow"):
            assert {each.kept for each in cells[source, via].columns} <= {
                ColumnStatus.EXACT,
                ColumnStatus.ABSENT,
            }
    assert {each.kept for each in cells["chakra", "chakra"].columns} <= {
        ColumnStatus.EXACT,
        ColumnStatus.ABSENT,
    }
    assert [each.column for each in cells["op-graph", "chakra"].lost] == ["attachments", "source_id"]
    document = _document(roundtrip_json(done))
    assert document["valid"] is True


def test_two_processes_find_what_one_finds() -> None:
    one = roundtrip([PROGRAM, SHARDED], ["op-graph"])
    two = roundtrip([PROGRAM, SHARDED], ["op-graph"], jobs=2)
    assert one == two


def test_a_folder_stands_for_the_files_in_it_that_are_of_some_format(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "mlp.mlir").write_bytes(PROGRAM.read_bytes())
    (tmp_path / "notes.md").write_text("no program\n")
    (tmp_path / "empty.mlir").write_bytes(b"")
    done = roundtrip([tmp_path], ["op-graph"])
    assert [file.path for file in done.inputs] == [str(tmp_path / "deep" / "mlp.mlir")]


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such file"):
        roundtrip([tmp_path / "absent"])
    (tmp_path / "notes.md").write_text("no program\n")
    with pytest.raises(UsageError, match="no file has a known format"):
        roundtrip([tmp_path])
    with pytest.raises(UsageError, match="nonsense"):
        roundtrip([PROGRAM], ["nonsense"])


def test_the_page_shows_hostile_names_as_text() -> None:
    hostile = FilePairs(
        path="<script>alert(1)</script>",
        format="op-graph",
        pairs=(pair(ColumnResult("flops", ColumnStatus.EXACT, 1, 0)),),
    )
    page = roundtrip_html(matrix([hostile]))
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "://" not in page


@pytest.mark.parametrize("name", format_names())
def test_declared_losses_name_columns_that_exist(name: str) -> None:
    from hespas.graph.equality import COMPARED_COLUMNS
    from hespas.validators.roundtrip.columns import JOB_COLUMNS

    known = {*JOB_COLUMNS, *COMPARED_COLUMNS, *(each.partition(".")[0] for each in COMPARED_COLUMNS), "*"}
    assert {column for columns in load_format(name).losses.values() for column in columns} <= known
