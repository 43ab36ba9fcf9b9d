"""Compiler process: tests with fake compilers, and with the real ones if the extras are installed."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hespas.captures.aot import compile_for, compiler, figures_of, missing_compiler, workload_of_compiled
from hespas.captures.aot.target import Target
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, MissingExtraError, UnsupportedError, UsageError

ROOT = Path(__file__).parents[3]
MESH = "data=2,model=4"
PROGRAM = "module {}"


def fixture(name: str) -> bytes:
    data = (ROOT / "fixtures" / "stablehlo" / name).read_bytes()
    return gzip.decompress(data) if name.endswith(".gz") else data


def needs(platform: str) -> pytest.MarkDecorator:
    target = Target.of("tpu:v5e:2x4" if platform == "tpu" else "gpu:h100:8")
    why = missing_compiler(target)
    return pytest.mark.skipif(bool(why), reason=f"the extra {target.extra}: {why}")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of Python that are run in the place of the compiler."""
    lines: list[str] = []

    def command(module: str, *arguments: str) -> Sequence[str]:
        assert module == "hespas.captures.aot.child"
        assert not arguments
        return [sys.executable, "-I", "-c", "\n".join(lines)]

    def nothing(target: Target) -> str:
        assert target
        return ""

    def version(name: str) -> str:
        return f"of {name}"

    monkeypatch.setattr(compiler, "isolated_python", command)
    monkeypatch.setattr(compiler, "missing_compiler", nothing)
    monkeypatch.setattr(compiler, "version", version)
    return lines


def test_mesh_and_target_have_the_same_devices() -> None:
    with pytest.raises(UsageError, match="has 16 devices, mesh data=2,model=4 has 8"):
        compile_for(PROGRAM, "gpu:h100:16", MESH, diagnostics=Diagnostics())


def test_a_compiler_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(target: Target) -> str:
        return f"nothing for {target.platform}"

    monkeypatch.setattr(compiler, "missing_compiler", missing)
    with pytest.raises(
        MissingExtraError, match=r"compiling for tpu:v5e:2x4.*jax-tpu.*nothing for tpu"
    ) as told:
        compile_for(PROGRAM, "tpu:v5e:2x4", MESH, diagnostics=Diagnostics())
    assert "hespas[jax-tpu]" in str(told.value.hint)


def test_the_job_and_the_program_reach_the_compiler(stand_in: list[str]) -> None:
    stand_in += [
        "import json, sys",
        "job = json.loads(sys.stdin.readline())",
        "assert job['mesh'] == [2, 4] and job['topology'] == '1x1x8' and 'core_count: 132' in job['config']",
        "hlo = 'HloModule m' if sys.stdin.read() == 'module {}' else ''",
        "costs = {'flops': 5.0, 'optimal_seconds': -0.5}",
        "print(json.dumps({'memory': {'peak': 7}, 'costs': costs, 'notes': ['so'], 'cpu_s': 2.0}))",
        "print(hlo, end='')",
    ]
    found = Diagnostics()
    made = compile_for(PROGRAM, "gpu:h100:8", MESH, diagnostics=found)
    assert (made.hlo, made.memory, made.cpu_s) == ("HloModule m", {"peak": 7}, 2.0)
    assert made.compiler == "jax-cuda13-plugin of jax-cuda13-plugin"
    # A negative time stands for no estimate.
    assert made.costs == {"flops": 5.0}
    assert [each.code for each in found] == ["aot.mesh-order", "aot.no-estimate"]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import os; os.abort()", "crashes with SIGABRT"),
        (
            "import os, sys; print('F1 x.cc:9] Check failed: a == b\\n  @ 0x1', file=sys.stderr); os.abort()",
            "SIGABRT: F1 x.cc:9] Check failed: a == b",
        ),
        ("raise SystemExit(3)", "ends with status 3"),
        ("import time; time.sleep(60)", "takes longer than 1 s"),
        ('print(\'{"refused": "no room\\\\n at x.py"}\')', "refuses it: no room"),
    ],
)
def test_however_it_ends_the_message_says_what_to_do(stand_in: list[str], script: str, told: str) -> None:
    stand_in.append(script)
    with pytest.raises(UnsupportedError) as failed:
        compile_for(PROGRAM, "gpu:h100:8", MESH, diagnostics=Diagnostics(), timeout_s=1.0)
    assert told in str(failed.value)
    assert "the compiler for gpu:h100:8" in str(failed.value)
    assert "name another target" in str(failed.value.hint)


def test_a_program_that_is_partitioned_already_is_told_so(stand_in: list[str]) -> None:
    stand_in.append('print(\'{"refused": "PartitionId instruction is not supported"}\')')
    with pytest.raises(UnsupportedError) as failed:
        compile_for(PROGRAM, "gpu:h100:8", MESH, diagnostics=Diagnostics())
    assert "partitioned already" in str(failed.value.hint)


@needs("gpu")
def test_the_compiler_for_gpus_schedules_the_whole_step() -> None:
    found = Diagnostics()
    made = compile_for(fixture("llama_fsdp_tp_global_N8.mlir.gz"), "gpu:h100:8", MESH, diagnostics=found)
    assert made.memory["peak"] > made.memory["argument"] > 0
    assert made.costs == {}
    workload = workload_of_compiled(made, found)
    assert (workload.num_ranks, workload.metadata["compiled_for"]) == (8, "gpu:h100:8")
    assert workload.metadata["is_scheduled"] == "true"
    figures = figures_of(workload)
    # Products as the specification has them for one device of eight (reference of the fixture).
    assert figures.product_flops == 1_912_602_624
    assert figures.asynchronous > 0
    assert sum(figures.collectives.values()) >= 10
    assert not [each for each in found if each.code.startswith("hlo.unknown")]


@needs("gpu")
def test_what_another_platform_has_is_refused_with_the_way_round() -> None:
    with pytest.raises(UnsupportedError, match="lapack") as failed:
        compile_for(fixture("linear_algebra.mlir"), "gpu:h100:1", "data=1", diagnostics=Diagnostics())
    assert "lower it for this one" in str(failed.value.hint)


@needs("tpu")
def test_the_compiler_for_tpus_schedules_the_whole_step() -> None:
    found = Diagnostics()
    made = compile_for(fixture("llama_fsdp_tp_global_N8.mlir.gz"), "tpu:v5e:2x4", MESH, diagnostics=found)
    workload = workload_of_compiled(made, found)
    figures = figures_of(workload)
    assert figures.product_flops == 1_912_602_624
    assert figures.asynchronous > 0
    assert not [each for each in found if each.code.startswith("hlo.unknown")]


@needs("gpu")
@pytest.mark.parametrize(
    ("mesh", "target"), [("data=2,model=2", "gpu:h100:4"), ("data=4,model=2", "gpu:h100:8")]
)
def test_a_program_for_another_mesh_is_refused(mesh: str, target: str) -> None:
    program = fixture("llama_fsdp_tp_global_N8.mlir.gz")
    with pytest.raises(UsageError, match="the mesh of the program is data=2,model=4") as refused:
        compile_for(program, target, mesh, diagnostics=Diagnostics())
    assert f"but the target mesh is {mesh}" in str(refused.value)


@needs("gpu")
def test_tiles_are_for_a_number_of_devices() -> None:
    tiled = 'tensor<16x32xf32> {mhlo.sharding = "{devices=[2,4]<=[8]}"}'
    program = f"""module attributes {{mhlo.num_partitions = 8 : i32}} {{
        func.func public @main(%x: {tiled}) -> ({tiled}) {{
            %0 = stablehlo.tanh %x : tensor<16x32xf32>
            return %0 : tensor<16x32xf32>
        }}
    }}"""
    made = compile_for(program, "gpu:h100:8", MESH, diagnostics=Diagnostics())
    workload = workload_of_compiled(made, Diagnostics())
    assert workload.classes[0].transcendentals.sum() == 16 * 32 / 8
    with pytest.raises(UnsupportedError, match="the program is for 8 devices, the mesh has 4"):
        compile_for(program, "gpu:h100:4", "data=4", diagnostics=Diagnostics())


@needs("gpu")
@pytest.mark.parametrize("program", [b"", b"nonsense", b"module {"])
def test_what_is_no_program_is_told_so(program: bytes) -> None:
    with pytest.raises(FormatError):
        compile_for(program, "gpu:h100:8", MESH, diagnostics=Diagnostics())
