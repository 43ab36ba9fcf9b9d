from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest

import hespas
from hespas.captures import partition as module
from hespas.captures.partition import MeshCollectiveRow, capture_program, collective_rows, partition
from hespas.graph import PROGRAM_BYTES, WHOLE_JOB, Diagnostics, Severity, Workload
from hespas.graph.errors import FormatError, HespasError, UnsupportedError, UsageError
from hespas.graph.mesh import Mesh

pytest.importorskip("jaxlib")
FIXTURES = Path(__file__).parents[2] / "fixtures" / "stablehlo"
LLAMA = gzip.decompress((FIXTURES / "llama_fsdp_tp_global_N8.mlir.gz").read_bytes())
MANUAL = (FIXTURES / "collectives_shard_map.mlir").read_bytes()

TILES = b"""module @tiles attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(
      %x: tensor<8x16xbf16> {mhlo.sharding = "{devices=[4,1,2]<=[8] last_tile_dim_replicate}"})
      -> tensor<8x8xbf16> {
    %0 = stablehlo.transpose %x, dims = [1, 0] : (tensor<8x16xbf16>) -> tensor<16x8xbf16>
    %1 = stablehlo.dot_general %x, %0, contracting_dims = [1] x [0]
        : (tensor<8x16xbf16>, tensor<16x8xbf16>) -> tensor<8x8xbf16>
    return %1 : tensor<8x8xbf16>
  }
}
"""


def on_meshes(*meshes: str) -> bytes:
    """A product whose left side is split over the first of the meshes, along ``data``."""
    stated = "\n".join(f"sdy.mesh @mesh{number} = <[{axes}]>" for number, axes in enumerate(meshes))
    return f"""module @m {{
  {stated}
  func.func public @main(%x: tensor<16x16xf32> {{sdy.sharding = #sdy.sharding<@mesh0, [{{"data"}}, {{}}]>}})
      -> tensor<16x16xf32> {{
    %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
        : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
    return %0 : tensor<16x16xf32>
  }}
}}""".encode()


def products(workload: Workload) -> float:
    """FLOPs of contractions of a rank."""
    table = workload.classes[0].contractions
    return float((2.0 * table.batch * table.m * table.n * table.k).sum())


def test_the_formats_of_numbers_are_those_of_the_program() -> None:
    text = partition(LLAMA)
    dots = [line for line in text.splitlines() if " dot(" in line]
    assert dots
    assert all("= bf16[" in line for line in dots)
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert any("= bf16[" in line for line in gathers)
    assert not any("= f32[" in line for line in gathers)


def test_sixty_five_thousand_devices_have_the_collectives_of_eight() -> None:
    small, large = Mesh.of("data=2,model=4"), Mesh.of("data=16384,model=4")
    rows = dict[Mesh, dict[tuple[str, str], MeshCollectiveRow]]()
    for mesh in (small, large):
        done = capture_program(LLAMA, "llama.mlir", mesh=mesh, diagnostics=Diagnostics())
        assert done.workload.num_ranks == mesh.num_devices
        assert done.workload.metadata["mesh"] == str(mesh)
        rows[mesh] = {(row.kind, row.axes): row for row in collective_rows(done.workload, mesh)}
    of_tensors = ("all_reduce", "model")
    assert rows[small][of_tensors].group_size == rows[large][of_tensors].group_size == 4
    assert rows[large][of_tensors].groups == 16384


def test_partitioned_flops_are_a_share_of_the_whole() -> None:
    whole = hespas.read(FIXTURES / "llama_fsdp_tp_global_N8.mlir.gz")
    assert isinstance(whole, Workload)
    for axes, share in (("data=2,model=4", 8), ("data=4,model=4", 16)):
        done = capture_program(LLAMA, "llama", mesh=Mesh.of(axes), diagnostics=Diagnostics()).workload
        assert products(done) * share == pytest.approx(products(whole), rel=0.001)


def test_tiles_of_gspmd_are_partitioned_by_it() -> None:
    text = partition(TILES)
    assert "num_partitions=8" in text
    assert "bf16[2,8]" in text


@pytest.mark.parametrize(
    ("program", "axes", "told"),
    [
        (LLAMA, "data=2,tensor=4", "mesh axes of the program are data=2,model=4"),
        (LLAMA, "model=4,data=2", "mesh axes of the program are data=2,model=4"),
        (
            on_meshes('"data"=2, "model"=4], device_ids=[0,4,1,5,2,6,3,7'),
            "data=4,model=4",
            "an explicit device order",
        ),
        (
            on_meshes('"data"=2, "model"=4', '"all"=8'),
            "data=4,model=4",
            "another mesh, all=8, with 8 devices",
        ),
        (TILES, "data=4,model=4", "sharded in tiles over 8 devices"),
        (MANUAL, "data=4,model=4", "axis data is manual"),
        ((FIXTURES / "mlp.mlir").read_bytes(), "data=4", "neither a mesh nor shardings"),
        (
            gzip.decompress((FIXTURES / "llama_fsdp_tp_local_N8.mlir.gz").read_bytes()),
            "data=2,model=4",
            "partitioned already",
        ),
    ],
)
def test_what_does_not_fit_the_mesh_is_refused_with_the_reason(program: bytes, axes: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        partition(program, axes=axes)


def test_the_axes_of_any_mesh_of_the_program_have_other_sizes() -> None:
    text = partition(on_meshes('"data"=2, "model"=4', '"model"=4, "data"=2'), axes="data=4,model=4")
    assert "num_partitions=16" in text
    assert "f32[4,16]" in text


def test_one_device_runs_all_of_the_program() -> None:
    one = capture_program(LLAMA, "llama", mesh=Mesh.of("data=1,model=1"), diagnostics=Diagnostics()).workload
    whole = hespas.read(FIXTURES / "llama_fsdp_tp_global_N8.mlir.gz")
    assert isinstance(whole, Workload)
    assert one.num_ranks == 1
    assert len(one.classes[0].collectives) == 0
    assert products(one) == pytest.approx(products(whole))


def test_what_a_device_runs_is_a_program_of_a_device_even_if_nothing_is_exchanged() -> None:
    found = Diagnostics()
    program = on_meshes('"data"=8').replace(
        b"dot_general %x, %x, contracting_dims = [1] x [0]", b"add %x, %x"
    )
    program = program.replace(b"(tensor<16x16xf32>, tensor<16x16xf32>) -> ", b"")
    workload = capture_program(program, "m", diagnostics=found).workload
    assert workload.num_ranks == 8
    assert not found.counts()
    assert WHOLE_JOB not in workload.metadata
    assert workload.metadata[PROGRAM_BYTES] == "128 128 0"


def test_replicas_beside_partitions_are_refused() -> None:
    replicated = TILES.replace(b"num_replicas = 1", b"num_replicas = 2")
    with pytest.raises(UnsupportedError, match="for 2 replicas"):
        partition(replicated)


@pytest.mark.parametrize(
    "program", [LLAMA[:5000], b"module", LLAMA.replace(b"stablehlo.add", b"stablehlo.ad")]
)
def test_damaged_programs_are_malformed(program: bytes) -> None:
    with pytest.raises(FormatError):
        partition(program)


def test_what_xla_refuses_says_so_and_how_to_go_on() -> None:
    asking = b"""    %2 = stablehlo.partition_id : tensor<ui32>
    %3 = stablehlo.convert %2 : (tensor<ui32>) -> tensor<bf16>
    %4 = stablehlo.broadcast_in_dim %3, dims = [] : (tensor<bf16>) -> tensor<8x8xbf16>
    return %4"""
    unpartitionable = TILES.replace(b"    return %1", asking)
    with pytest.raises(UnsupportedError, match="PartitionId instruction is not supported") as caught:
        partition(unpartitionable)
    assert "shard_map" in (caught.value.hint or "")


def test_gspmd_does_not_read_annotations_of_shardy() -> None:
    with pytest.raises(UsageError, match="which GSPMD does not read"):
        partition(LLAMA, partitioner="gspmd")


def test_a_program_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(UnsupportedError, match=r"does not finish within 0\.001 s"):
        partition(LLAMA, timeout_s=0.001)


def test_a_crash_is_told_with_the_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(name: str, *_: str) -> list[str]:
        says = "import os, sys; print('F0000 x.cc:7] Check failed: a == b', file=sys.stderr, flush=True)"
        return [sys.executable, "-c", f"{says}; os.abort()"]

    monkeypatch.setattr(module, "isolated_python", crash)
    with pytest.raises(UnsupportedError, match=r"crashes with SIGABRT: F0000 x\.cc:7\] Check failed: a == b"):
        partition(LLAMA)


def test_annotated_programs_are_converted_with_a_mesh(tmp_path: Path) -> None:
    done = hespas.convert(
        FIXTURES / "llama_fsdp_tp_global_N8.mlir.gz", tmp_path / "traces", mesh={"data": 2, "model": 4}
    )
    assert done.source_format == "stablehlo"
    account = done.conservation
    assert account is not None
    assert account.after.collectives == account.before.collectives > 0
    assert len(list((tmp_path / "traces").glob("*.et"))) == 8
    report = hespas.check(tmp_path / "traces", profile="astra-sim")
    assert not [each for each in report.violations if each.severity is Severity.ERROR]


def test_a_trace_has_no_mesh_to_be_partitioned_over(tmp_path: Path) -> None:
    with pytest.raises(HespasError, match="has no shardings to partition by"):
        hespas.convert(FIXTURES.parent / "hlo" / "mlp.hlo.txt", tmp_path / "x.json", mesh="data=4")


def calls(depth: int, last: str) -> bytes:
    """A program whose functions call the next one twice each."""
    kind = "tensor<8x8xf32>"
    head = TILES.decode().partition("  func.func")[0]
    split = 'mhlo.sharding = "{devices=[8,1]<=[8]}"'
    text = f"""{head}  func.func public @main(%x: {kind} {{{split}}}) -> {kind} {{
    %0 = func.call @f0(%x) : ({kind}) -> {kind}
    return %0 : {kind}
  }}
"""
    for number in range(depth):
        callee = f"f{number + 1}" if number + 1 < depth else last
        text += f"""  func.func private @f{number}(%x: {kind}) -> {kind} {{
    %0 = func.call @{callee}(%x) : ({kind}) -> {kind}
    %1 = func.call @{callee}(%0) : ({kind}) -> {kind}
    return %1 : {kind}
  }}
"""
    text += f"""  func.func private @end(%x: {kind}) -> {kind} {{
    %0 = stablehlo.abs %x : {kind}
    return %0 : {kind}
  }}
}}
"""
    return text.encode()


def test_calls_of_calls_are_partitioned() -> None:
    assert "f32[1,8]" in partition(calls(4, "end"))


@pytest.mark.parametrize(
    ("program", "kind", "told"),
    [
        (calls(40, "end"), UnsupportedError, "@main has"),
        (calls(3, "f0"), FormatError, "calls itself"),
        (calls(1, "f0"), FormatError, "calls itself"),
        (TILES.replace(b"{devices=[4,1,2]", b"{devices=[4,1,2"), FormatError, "is not a sharding"),
        (TILES.replace(b"partitions = 8", b"partitions = -8"), FormatError, "not a number of devices"),
        (
            TILES.replace(b"partitions = 8", b"partitions = 2147483647"),
            UsageError,
            "limit of 16,777,216",
        ),
        (TILES.replace(b"replicas = 1", b"replicas = 2"), UnsupportedError, "2 replicas"),
        (
            TILES.replace(b"stablehlo.transpose %x, dims = [1, 0]", b'"odd.transpose"(%x)'),
            UnsupportedError,
            "odd.transpose is not a StableHLO operation",
        ),
    ],
)
def test_what_xla_would_drop_or_never_be_done_with_is_told(
    program: bytes, kind: type[HespasError], told: str
) -> None:
    with pytest.raises(kind, match=told):
        partition(program)


def test_what_the_partitioner_made_is_not_taken_for_the_whole_job() -> None:
    alone = TILES.partition(b"    %0 =")[0].replace(b"[4,1,2]<=[8] last_tile_dim_replicate", b"[8,1]<=[8]")
    found = Diagnostics()
    body = b"    %0 = stablehlo.abs %x : tensor<8x16xbf16>\n    return %0 : tensor<8x16xbf16>\n  }\n}\n"
    done = capture_program(
        alone.replace(b"-> tensor<8x8xbf16>", b"-> tensor<8x16xbf16>") + body, "alone", diagnostics=found
    )
    assert not [each for each in found if each.severity is Severity.WARNING]
    assert "bf16[1,16]" in done.partitioned
