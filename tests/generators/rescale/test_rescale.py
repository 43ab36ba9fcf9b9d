"""Small runs rescaled to eight ranks, compared with real runs of eight ranks; errors; 65,536 ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hespas
from hespas.api.conversion import Rescaling
from hespas.cli.convert import app
from hespas.converters.measured_ops.steps import RecordedSteps
from hespas.generators.rescale import Rescale, find_mesh, parse_sizes
from hespas.generators.rescale.figures import AxisSizes, GraphFigures, extrapolate
from hespas.graph import (
    RECORDED_STEPS,
    CollectiveKind,
    Diagnostics,
    ExplicitGroups,
    GraphBuilder,
    OpClass,
    OpGraph,
    Severity,
    StridedGroups,
    Workload,
)
from hespas.graph.equality import graphs_equal
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.mesh import Mesh
from hespas.graph.passes import is_recorded_wait

RUNS = Path(__file__).parents[3] / "fixtures" / "rescale"


def read(name: str) -> Workload:
    value = hespas.read(RUNS / name)
    assert isinstance(value, Workload)
    return value


def rescaled(source: str, sizes: str, *others: str, mesh: str = "") -> Workload:
    job = Rescale(sizes=parse_sizes(sizes), mesh=mesh, others=tuple(map(read, others)))
    return job(read(source), Diagnostics())


def differences(one: OpGraph, two: OpGraph) -> list[str]:
    """Columns that differ beside attributes and documents of the program at its size."""
    columns = (entry.column for entry in graphs_equal(one, two))
    return [column for column in columns if column.split(".")[0] not in {"extra", "attachments"}]


def operations(graph: OpGraph) -> Counter[tuple[object, ...]]:
    """The multiset of operations: name, shapes, FLOPs and bytes."""
    rows = np.flatnonzero(~is_recorded_wait(graph)).tolist()
    types = graph.types
    return Counter(
        (
            graph.op_name(node),
            *(types.shape(int(row)) for row in (*graph.operands.row(node), *graph.results.row(node))),
            *(repr(float(column[node])) for column in (graph.flops, graph.bytes_read, graph.bytes_written)),
        )
        for node in rows
    )


def calls(graph: OpGraph) -> list[tuple[object, ...]]:
    """The collectives: kind, bytes, and the members of every group."""
    table = graph.collectives
    groups = [[tuple(map(int, row)) for row in graph.group_sets[int(each)]] for each in table.group_set]
    rows = zip(table.kind, table.comm_bytes, table.operand_bytes, table.result_bytes, strict=True)
    return [(*map(float, row), each) for row, each in zip(rows, groups, strict=True)]


@pytest.mark.parametrize(
    ("source", "sizes", "others", "real"),
    [
        ("dp2.mlir.gz", "dp=8", (), "dp8.mlir.gz"),
        ("dp2_tp2.mlir.gz", "dp=4", (), "dp4_tp2.mlir.gz"),
        ("fsdp2.mlir.gz", "fsdp=8", (), "fsdp8.mlir.gz"),
        ("fsdp4.mlir.gz", "fsdp=8", (), "fsdp8.mlir.gz"),
        ("tp2.mlir.gz", "tp=8", (), "tp8.mlir.gz"),
        ("fsdp2.mlir.gz", "fsdp=8", ("fsdp4.mlir.gz",), "fsdp8.mlir.gz"),
        ("tp2.mlir.gz", "tp=8", ("tp4.mlir.gz",), "tp8.mlir.gz"),
        ("fsdp2_tp2.mlir.gz", "tp=4", (), "fsdp2_tp4.mlir.gz"),
        ("fsdp2.hlo.txt.gz", "fsdp=8", ("fsdp4.hlo.txt.gz",), "fsdp8.hlo.txt.gz"),
        ("fsdp8.mlir.gz", "fsdp=2", (), "fsdp2.mlir.gz"),
    ],
)
def test_a_small_jax_program_becomes_the_large_one(
    source: str, sizes: str, others: tuple[str, ...], real: str
) -> None:
    made, wanted = rescaled(source, sizes, *others), read(real)
    assert made.num_ranks == wanted.num_ranks
    assert operations(made.classes[0]) == operations(wanted.classes[0])
    assert calls(made.classes[0]) == calls(wanted.classes[0])
    assert differences(made.classes[0], wanted.classes[0]) == []


@pytest.mark.parametrize("small", ["gloo2", "gloo4"])
def test_a_small_gloo_run_becomes_the_large_one(small: str) -> None:
    made, wanted = rescaled(small, "dp=8"), read("gloo8")
    assert made.num_ranks == wanted.num_ranks == 8
    assert made.is_complete
    for rank in range(8):
        graph, real = made.graph_of(rank), wanted.graph_of(0 if rank % 2 == 0 else 7)
        assert operations(graph) == operations(real)
        assert calls(graph) == calls(real)


def test_recorded_times_stay_where_nothing_changed() -> None:
    found = Diagnostics()
    source = read("gloo2")
    made = Rescale(sizes={"dp": 8})(source, found)
    before, after = source.classes[0], made.classes[0]
    unknown = np.flatnonzero(np.isnan(after.duration_ns) & ~np.isnan(before.duration_ns))
    assert unknown.tolist() == before.collectives.node.tolist()
    kept = np.setdiff1d(np.arange(len(before)), unknown)
    assert np.array_equal(before.duration_ns[kept], after.duration_ns[kept], equal_nan=True)
    assert found.counts()["rescale.unknown-time"] == sum(len(g.collectives) for g in source.classes)


def test_a_rescaled_recording_has_the_recorded_steps() -> None:
    def with_two_steps(graph: OpGraph) -> OpGraph:
        steps = RecordedSteps(span_ns=[1e6, 1e6], busy_ns=[1e6, 1e6], inside=1.0).of(graph)
        return replace(graph, attachments={RECORDED_STEPS: steps.document(), "program.mlir": b""})

    source = read("gloo2")
    source = replace(source, classes=tuple(map(with_two_steps, source.classes)))
    found = Diagnostics()
    made = Rescale(sizes={"dp": 8})(source, found)
    assert all(list(graph.attachments) == [RECORDED_STEPS] for graph in made.classes)
    assert found.counts()["rescale.source-program"] == 2
    large, small = (hespas.simulate(job, "H100-SXM").to_dict() for job in (made, source))
    assert large["recorded_steps"] == small["recorded_steps"] == 2


def test_one_rank_has_no_axis() -> None:
    alone = hespas.read(RUNS.parent / "stablehlo" / "mlp.mlir")
    assert isinstance(alone, Workload)
    with pytest.raises(UsageError, match="the trace has one rank and no axis 'dp'") as raised:
        Rescale(sizes={"dp": 8})(alone, Diagnostics())
    assert raised.value.hint == "trace a run of 2 or more ranks, or copy this rank: `num_devices=N`"


def test_two_axes_at_once() -> None:
    made = rescaled("fsdp2_tp2.mlir.gz", "fsdp=4,tp=4")
    step = rescaled("fsdp2_tp2.mlir.gz", "tp=4")
    again = Rescale(sizes={"fsdp": 4})(step, Diagnostics())
    assert made.num_ranks == 16
    assert differences(made.classes[0], again.classes[0]) == []


def test_growing_and_shrinking_again_changes_nothing() -> None:
    source = read("tp2.mlir.gz")
    back = Rescale(sizes={"tp": 2})(Rescale(sizes={"tp": 8})(source, Diagnostics()), Diagnostics())
    assert differences(back.classes[0], source.classes[0]) == []


def test_the_input_is_not_changed() -> None:
    source, again = read("fsdp2.mlir.gz"), read("fsdp2.mlir.gz")
    Rescale(sizes={"fsdp": 8})(source, Diagnostics())
    assert graphs_equal(source.classes[0], again.classes[0]) == []


def test_65536_ranks_keep_their_groups_symbolic() -> None:
    made = rescaled("dp2_tp2.mlir.gz", "dp=32768")
    assert made.num_ranks == 65_536
    assert made.rank_class.strides == (0,)
    assert made.group_sets == (
        StridedGroups(((32_768, 2),), ((2, 1),)),
        StridedGroups(((2, 1),), ((32_768, 2),)),
    )
    assert made.nbytes < 2 * read("dp2_tp2.mlir.gz").nbytes


# --- meshes


def test_a_mesh_is_found_from_groups() -> None:
    assert find_mesh(read("dp4_tp2.mlir.gz")).sizes == (4, 2)
    assert str(Mesh(("dp", "tp"), (4, 2))) == "dp=4,tp=2"


def with_groups(*groups: StridedGroups | ExplicitGroups) -> Workload:
    source = read("dp4_tp2.mlir.gz")
    return replace(source, classes=(replace(source.classes[0], group_sets=groups),))


def test_groups_of_no_mesh_are_shown() -> None:
    odd = with_groups(ExplicitGroups(((0, 1, 3), (2, 4, 5))), StridedGroups(((4, 2),), ((2, 1),)))
    with pytest.raises(
        UnsupportedError, match=r"not axes of a mesh: 2 groups of 3, the first 0 1 3"
    ) as raised:
        find_mesh(odd)
    assert raised.value.position
    assert raised.value.hint


def test_groups_listed_by_some_ranks_are_those_of_all() -> None:
    listed = with_groups(ExplicitGroups(((0, 1),)), ExplicitGroups(((0, 2, 4, 6),)))
    job = Rescale(sizes={"dp": 8}, mesh="dp=4,tp=2")
    made = job(listed, Diagnostics())
    assert {groups.num_ranks for groups in made.group_sets} == {16}
    assert sorted(groups.group_size for groups in made.group_sets) == [2, 8]


@pytest.mark.parametrize(
    ("mesh", "why"), [("dp=2,tp=2", "4 ranks, the job 8"), ("dp=8,dp=1", "twice"), ("dp", "AXIS=N")]
)
def test_a_wrong_mesh_is_refused(mesh: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        rescaled("dp4_tp2.mlir.gz", "dp=8", mesh=mesh)


@pytest.mark.parametrize("text", ["dp", "dp=0", "dp=2,dp=4", "=3", "dp=x", "dp=" + "9" * 20])
def test_sizes_are_checked(text: str) -> None:
    with pytest.raises(UsageError, match="AXIS=SIZE"):
        parse_sizes(text)


# --- what is not proved is refused


@pytest.mark.parametrize(
    ("source", "sizes", "others", "why"),
    [
        ("fsdp2.hlo.txt.gz", "fsdp=8", (), r"no rule for a fusion"),
        ("dp2.mlir.gz", "dp=8", ("fsdp4.mlir.gz",), r"is not this program \(dp=2\) at another size"),
        ("fsdp2.mlir.gz", "fsdp=3", (), r"is not divisible"),
        (
            "fsdp2.mlir.gz",
            "fsdp=3",
            ("fsdp4.mlir.gz",),
            r"cannot extrapolate .* to fsdp=3: it is .* at fsdp=2 and .* at fsdp=4, but extent",
        ),
        ("dp2.mlir.gz", "pp=4", (), r"pipeline"),
    ],
)
def test_what_is_not_proved_is_refused(source: str, sizes: str, others: tuple[str, ...], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why) as raised:
        rescaled(source, sizes, *others)
    assert raised.value.position
    assert raised.value.hint


def test_a_second_trace_of_another_program_is_refused() -> None:
    second = read("fsdp4.mlir.gz")
    graph = second.classes[0]
    ops = graph.op_id.copy()
    ops[40] = graph.op_id[0] if graph.op_id[40] != graph.op_id[0] else graph.op_id[1]
    other = replace(second, classes=(replace(graph, op_id=ops),))
    with pytest.raises(UnsupportedError, match=r"are different programs: 417 operations") as raised:
        Rescale(sizes={"fsdp": 8}, others=(other,))(read("fsdp2.mlir.gz"), Diagnostics())
    assert "node 40 " in str(raised.value)


def test_recordings_of_two_axes_of_sums_want_names() -> None:
    source = read("gloo4")
    wide = replace(
        source,
        classes=tuple(
            replace(graph, group_sets=(StridedGroups(((2, 1),), ((2, 2),)),)) for graph in source.classes
        ),
    )
    with pytest.raises(UnsupportedError, match="does not identify the axes of the 2x2 mesh"):
        Rescale(sizes={"dp": 8})(wide, Diagnostics())
    made = Rescale(sizes={"dp": 8}, mesh="dp=2,tp=2")(wide, Diagnostics())
    assert made.group_sets == (StridedGroups(((2, 1),), ((8, 2),)),)


def test_an_axis_without_traffic_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="the trace has no traffic along axis tp"):
        rescaled("dp2.mlir.gz", "tp=4", mesh="dp=2,tp=1")


def test_ranks_that_call_other_collectives_are_no_data_axis() -> None:
    source = read("gloo2")
    table = source.classes[1].collectives
    kinds = np.full(len(table), int(CollectiveKind.BROADCAST), np.uint8)
    other = replace(source.classes[1], collectives=replace(table, kind=kinds))
    with pytest.raises(UnsupportedError, match="do not call the same collectives"):
        Rescale(sizes={"dp": 4})(replace(source, classes=(source.classes[0], other)), Diagnostics())


# --- the command


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def test_the_command_writes_the_large_job(tmp_path: Path) -> None:
    out = tmp_path / "large.json"
    done = hespas.convert(RUNS / "fsdp2.mlir.gz", out, rescale="fsdp=8")
    assert done.conservation is not None
    reasons = {row.reason: row.count for row in done.conservation.dropped}
    assert reasons["rescale.ranks"] == done.conservation.before.ops - done.conservation.after.ops
    assert reasons["rescale.work"] > 0
    again = hespas.read(out)
    assert isinstance(again, Workload)
    assert differences(again.classes[0], read("fsdp8.mlir.gz").classes[0]) == []


def test_traces_without_views_want_a_second_one(tmp_path: Path) -> None:
    for name in ("dp2", "dp8", "fsdp2", "fsdp4", "fsdp8"):
        hespas.convert(RUNS / f"{name}.mlir.gz", tmp_path / name, target_format="chakra", granularity="op")
    small, second, large, few, many = (
        hespas.read(tmp_path / name) for name in ("fsdp2", "fsdp4", "fsdp8", "dp2", "dp8")
    )
    assert isinstance(small, Workload)
    assert isinstance(second, Workload)
    assert isinstance(large, Workload)
    assert isinstance(few, Workload)
    assert isinstance(many, Workload)
    made = Rescale(sizes={"dp": 8})(few, Diagnostics())
    assert differences(made.classes[0], many.classes[0]) == ["name"]
    with pytest.raises(UnsupportedError, match="no operand has the type of a result of"):
        Rescale(sizes={"fsdp": 8})(small, Diagnostics())
    made = Rescale(sizes={"fsdp": 8}, others=(second,))(small, Diagnostics())
    assert differences(made.classes[0], large.classes[0]) == ["name"]


def test_the_data_axis_of_a_pipeline_grows_and_its_messages_go_on() -> None:
    source = hespas.read(RUNS.parent / "chakra" / "pipeline_2x2")
    assert isinstance(source, Workload)
    made = Rescale(sizes={"dp": 8})(source, Diagnostics())
    assert made.class_sizes == (8, 8)
    assert {groups.num_ranks for groups in made.group_sets} == {16}
    sends = [(each.digit, each.target_of(3)) for each in made.classes[0].permutations]
    assert ((2, 8), 11) in sends
    with pytest.raises(UnsupportedError, match="axis pp is a pipeline"):
        Rescale(sizes={"pp": 4})(source, Diagnostics())


def test_options_of_rescaling_that_stand_alone_are_wrong_usage(tmp_path: Path) -> None:
    target = str(tmp_path / "x.json")
    with pytest.raises(UsageError):
        hespas.convert(RUNS / "dp2.mlir.gz", target, rescale="dp")
    rescaling = Rescaling(sizes="dp", others=(tmp_path / "absent",))
    with pytest.raises(UsageError):  # before the other traces are read
        hespas.convert(RUNS / "dp2.mlir.gz", target, rescale=rescaling)
    code, said = run(str(RUNS / "dp2.mlir.gz"), target, "--with", str(RUNS / "dp8.mlir.gz"))
    assert code == 2
    assert "--with requires --rescale" in said
    code, said = run(str(RUNS / "gloo2"), target, "--mesh", "dp=2")
    assert code == 2
    assert "no shardings to partition by" in said
    assert not Path(target).exists()


def test_a_mesh_alone_partitions_a_program_with_shardings(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    code, _ = run(str(RUNS / "fsdp2.mlir.gz"), str(target), "--mesh", "fsdp=2")
    assert code == 0
    made = hespas.read(target)
    assert isinstance(made, Workload)
    assert made.num_ranks == 2
    code, said = run(str(RUNS / "dp2.mlir.gz"), str(tmp_path / "y.json"), "--mesh", "dp=4")
    assert code == 2
    assert "axis dp is manual in the program" in said


def test_traces_of_a_rescaled_recording_are_valid(tmp_path: Path) -> None:
    hespas.convert(RUNS / "gloo2", tmp_path / "large", target_format="chakra", rescale={"dp": 8})
    assert len(list((tmp_path / "large").glob("*.et"))) == 8
    assert not [row for row in hespas.check(tmp_path / "large").violations if row.severity is Severity.ERROR]


def test_a_longer_second_trace_differs_from_the_end_of_the_first() -> None:
    def program(*ops: str) -> OpGraph:
        builder = GraphBuilder("g")
        for op in ops:
            row = builder.strings.add(op)
            builder.add_node(name_id=row, op_id=row, op_class=OpClass.ELEMENTWISE)
        return builder.build()

    short, long = program("add", "mul"), program("add", "mul", "exp")
    sizes = AxisSizes("dp", 2, 4, 8)
    with pytest.raises(UnsupportedError, match="the first difference is the end against exp"):
        extrapolate(short, GraphFigures.of(short), long, sizes)
    with pytest.raises(UnsupportedError, match="the first difference is exp against the end"):
        extrapolate(long, GraphFigures.of(long), short, sizes)
