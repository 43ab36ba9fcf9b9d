"""``hespas view``: figures agree with the graph, the document with its schema, names are shown as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from hespas import api
from hespas.cli.main import app
from hespas.graph import (
    CollectiveKind,
    ExplicitGroups,
    GraphBuilder,
    NodeKind,
    OpClass,
    StridedGroups,
    Workload,
)
from hespas.graph.passes import totals
from tests.converters.pytorch.traces import Json, host, kernel, launch, write_kineto

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
DATA = ROOT.parent / "shared" / "data"


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def view(path: Path, tmp_path: Path, *options: str) -> tuple[list[str], dict[str, object]]:
    done = CliRunner().invoke(
        app, ["view", str(path), "--overwrite", "--json", str(tmp_path / "v.json"), *options]
    )
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "v.json").read_text())
    schema = json.loads((ROOT / "hespas" / "schemas" / "view.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    cast("_Validator", Draft202012Validator(schema)).validate(document)
    return done.stdout.splitlines(), document


PROGRAMS = (
    "binary/llama_fsdp_tp_local_N8.mlirbc",
    "stablehlo/scan_nested.mlir",
    "hlo/moe_all_to_all.hlo.txt",
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_sums_are_those_of_the_graph(program: str, tmp_path: Path) -> None:
    _, document = view(FIXTURES / program, tmp_path)
    workload = api.read(FIXTURES / program)
    assert isinstance(workload, Workload)
    [found] = cast("list[dict[str, list[dict[str, float]]]]", document["classes"])
    expected = totals(workload.classes[0])
    for rows in (found["by_class"], found["by_op"]):
        assert sum(row["nodes"] for row in rows) == len(workload.classes[0])
        assert sum(row["flops"] or 0 for row in rows) == pytest.approx(expected.flops)
        assert sum(row["bytes_moved"] or 0 for row in rows) == pytest.approx(expected.bytes_moved)
    assert sum(row["nodes"] for row in found["collectives"]) == len(workload.classes[0].collectives)
    assert sum(row["comm_bytes"] for row in found["collectives"]) == expected.collective_bytes


def test_loops_stand_in_a_tree_with_their_trips(tmp_path: Path) -> None:
    lines, document = view(FIXTURES / "stablehlo" / "scan_nested.mlir", tmp_path)
    at = lines.index("regions (2 of 2)")
    assert lines[at + 1] == "  loop body while.3, 3 iterations, 10 operations"
    assert lines[at + 2] == "    loop body while.7, 5 iterations, 6 operations"
    [found] = cast("list[dict[str, list[dict[str, object]]]]", document["classes"])
    product = next(row for row in found["by_op"] if row["name"] == "stablehlo.dot_general")
    assert (product["nodes"], product["executions"]) == (1, 15.0)


def chain(*names: str) -> Workload:
    b = GraphBuilder("g")
    for number, name in enumerate(names):
        b.add_node(
            name_id=b.strings.add(name),
            op_id=b.strings.add(name),
            op_class=OpClass.ELEMENTWISE,
            kind=NodeKind.COMPUTE,
            data_deps=[0] if number else [],
            flops=1.0,
            transcendentals=0.0,
            bytes_read=1.0,
            bytes_written=1.0,
        )
    return Workload.spmd(b.build(), 3)


def test_depth_and_width_and_ranks(tmp_path: Path) -> None:
    api.write(chain("a", "b", "c", "d"), tmp_path / "g.json")
    lines, _ = view(tmp_path / "g.json", tmp_path)
    assert "3 ranks in 1 class" in lines
    assert any(line.endswith("longest chain 2, widest level 3") for line in lines)


def test_hostile_names_are_shown_as_text(tmp_path: Path) -> None:
    api.write(chain("\x1b[31mred", "[bold]b", "two\nlines", "x" * 500), tmp_path / "g.json")
    lines, _ = view(tmp_path / "g.json", tmp_path)
    shown = "\n".join(lines)
    assert "\x1b" not in shown
    assert "\\u001b[31mred" in shown
    assert "[bold]b" in shown
    assert "two\\nlines" in shown
    assert max(map(len, lines)) < 200


def test_a_missing_file_is_exit_code_3(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["view", str(tmp_path / "absent")])
    assert done.exit_code == 3
    assert "no such file" in done.stderr


@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")
def test_a_profile_is_summed_by_category_and_operation(tmp_path: Path) -> None:
    lines, document = view(DATA / "profiles" / "h100_qwen1.5-0.5b_inf.json.gz", tmp_path)
    profile = cast("dict[str, object]", document["profile"])
    assert profile["duration_ns"] == 45_647_300.0
    assert profile["device"] == "NVIDIA H100 80GB HBM3"
    assert any(line.startswith("kernel ") for line in lines)


def many(count: int) -> Workload:
    """As many rank classes, each with one operation more than the one before."""
    graphs = tuple(
        chain(*(f"c{number}n{node}" for node in range(number + 1))).classes[0] for number in range(count)
    )
    return Workload(name="many", classes=graphs, rank_class=np.arange(count, dtype=np.int32))


def test_many_classes_are_a_table_and_one_of_them_in_full(tmp_path: Path) -> None:
    api.write(many(32), tmp_path / "g.json")
    lines, document = view(tmp_path / "g.json", tmp_path, "--top", "4", "--class", "3")
    assert len(lines) < 40
    at = next(place for place, line in enumerate(lines) if line.startswith("classes (4 of 32)"))
    assert [line.split()[:2] for line in lines[at + 1 : at + 5]] == [
        [str(number), "g"] for number in range(4)
    ]
    assert (
        "  4 operations, 3 data dependencies, 0 control dependencies; longest chain 2, widest level 3"
        in lines
    )
    assert len(cast("list[object]", document["classes"])) == 32
    wrong = CliRunner().invoke(app, ["view", str(tmp_path / "g.json"), "--class", "32"])
    assert (wrong.exit_code, "0 to 31" in wrong.stderr) == (2, True)


def test_groupings_of_one_size_are_told_apart(tmp_path: Path) -> None:
    b = GraphBuilder("g")
    pairs = (StridedGroups(((4, 2),), ((2, 1),)), StridedGroups(((4, 1),), ((2, 4),)))
    uneven = ExplicitGroups.from_rows([[5], [0, 3, 6]])
    wide = StridedGroups(((2, 16),), ((16, 1),))
    for groups in (*pairs, uneven, wide):
        node = b.add_node(
            name_id=b.strings.add("sum"),
            op_id=b.strings.add("sum"),
            op_class=OpClass.COLLECTIVE,
            kind=NodeKind.COLLECTIVE,
        )
        b.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=b.group_set(groups), comm_bytes=8.0)
    api.write(Workload.spmd(b.build(), 32), tmp_path / "g.json")
    lines, document = view(tmp_path / "g.json", tmp_path)
    shown = "\n".join(lines)
    assert "4 groups of 2, the first 0 1" in shown
    assert "4 groups of 2, the first 0 4" in shown
    assert "2 groups of up to 3, the first 5" in shown
    assert "2 groups of 16, the first 0 1 2 3 4 5 6 7 ..." in shown
    [found] = cast("list[dict[str, list[dict[str, object]]]]", document["classes"])
    assert {
        (row["num_groups"], tuple(cast("list[int]", row["first_group"]))) for row in found["collectives"]
    } == {
        (4, (0, 1)),
        (4, (0, 4)),
        (2, (5,)),
        (2, tuple(range(8))),
    }


def test_events_of_negative_duration_take_no_time_from_others(tmp_path: Path) -> None:
    events: list[Json] = []
    for number, length_us in enumerate((5.0, -4.0)):
        events += [host("aten::mm", 100.0 * number, 9, number + 1), launch(100.0 * number + 2, number)]
        events.append(kernel("gemm", 100.0 * number + 20, length_us, number))
    lines, document = view(write_kineto(tmp_path / "k.json", events), tmp_path)
    found = cast("dict[str, object]", document["profile"])
    assert (found["duration_ns"], found["negative_events"], found["linked_share"]) == (5_000, 1, 1)
    assert found["span_ns"] == 100_000
    assert [row["duration_ns"] for row in cast("list[dict[str, float]]", found["by_op"])] == [5_000]
    assert "1 event of negative duration not included in times" in lines
    lines, document = view(write_kineto(tmp_path / "k.json", events[:3]), tmp_path)
    assert cast("dict[str, object]", document["profile"])["negative_events"] == 0
    assert not any("negative" in line for line in lines)


def test_a_share_of_unknown_time_is_not_told(tmp_path: Path) -> None:
    table = tmp_path / "kernels.csv"
    table.write_text("op,duration_ns\ngemm,100\nadd,\n", "utf-8")
    lines, document = view(table, tmp_path)
    assert cast("dict[str, object]", document["profile"])["linked_share"] is None
    assert not any("nan%" in line or "has a host operation" in line for line in lines)
    assert any("unknown of device time" in line for line in lines)


def test_files_of_folders_beside_those_of_a_job_are_named(tmp_path: Path) -> None:
    for name in ("rank0", "programs"):
        (tmp_path / name).mkdir()
    events = [host("aten::mm", 0, 10, 1), launch(2, 1), kernel("gemm", 20, 30, 1)]
    write_kineto(tmp_path / "rank0" / "trace.json", events)
    done = CliRunner().invoke(app, ["view", str(tmp_path)])
    assert (done.exit_code, "input.left-out" in done.stderr) == (0, False), done.output
    (tmp_path / "programs" / "mlp.mlir").write_bytes((FIXTURES / "stablehlo" / "mlp.mlir").read_bytes())
    done = CliRunner().invoke(app, ["view", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "read as pytorch, without programs/mlp.mlir (stablehlo) [input.left-out]" in done.stderr


def test_a_folder_of_several_jobs_is_refused_with_a_remedy() -> None:
    done = CliRunner().invoke(app, ["view", str(FIXTURES / "stablehlo")])
    assert done.exit_code == 3
    assert "try: name a file in it" in done.stderr
