"""Written programs run: originals and rewritten programs give equal outputs, replays do all their work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hespas.converters import load_format
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.converters.stablehlo.mlir import load_bindings
from hespas.converters.stablehlo.program import ProgramForm, in_form
from hespas.converters.stablehlo.reader import read_program
from hespas.graph import CollectiveKind, Diagnostics, NodeKind, OpGraph, Workload
from hespas.graph.passes import FoldFree, UnrollLoops
from tests.converters.stablehlo.replays import FIXTURES, read_any, without_program, write_bytes
from tests.converters.stablehlo.steps import Steps
from tests.limits import SAFETY_S

pytest.importorskip("jax")

PROGRAMS = sorted((FIXTURES / "stablehlo").glob("*.mlir*"))
WAITS = {"hand_host.mlir": "its infeed waits for a host that sends"}
RANDOM = {
    "hand_bounded.mlir": "what stands behind the bounds is what was in memory",
    "hand_movement.mlir": "stablehlo.rng draws other numbers each time",
}
NOT_ON_CPU = {
    "custom_call_unknown.mlir": "a library call nobody has",
    "dot_int4.mlir": "XLA:CPU refuses the layout it makes of i4 operands",
    "dynamic_mlp.mlir": "XLA has no unbounded dynamic dimensions",
    "hand_chlo.mlir": "XLA:CPU has no ragged-dot",
    "hand_collective_modes.mlir": "2 replicas of 4 partitions: XLA has to partition it first",
    "hand_collectives.mlir": "XLA:CPU has no collective-broadcast",
    "hand_custom_calls.mlir": "library calls of GPUs",
    "hand_dots.mlir": "XLA:CPU refuses the layout it makes of i4 operands",
    "hand_dynamic.mlir": "XLA has no unbounded dynamic dimensions",
    "hand_legacy.mlir": "XLA does not translate unary_einsum",
    "hand_mhlo.mlir": "XLA:CPU stumbles over the dot in an mhlo fusion",
    "hand_quantized.mlir": "XLA does not translate uniform_quantize",
    "quantised_mlp.mlir": "XLA does not translate quantised types",
    "ternary_network.mlir": "XLA does not translate quantised types",
    "linear_algebra_cuda.mlir": "library calls of GPUs",
    "llama_fsdp_tp_local_N8.mlir.gz": "one device's share of 8 partitions: XLA only runs what it partitioned",
}
"""Programs that XLA:CPU does not run, as they are, and why."""
REPLAYS_NOT_ON_CPU = {
    "dot_int4.mlir": NOT_ON_CPU["dot_int4.mlir"],
    "hand_collectives.mlir": NOT_ON_CPU["hand_collectives.mlir"],
    "hand_dots.mlir": NOT_ON_CPU["hand_dots.mlir"],
    "hand_quantized.mlir": NOT_ON_CPU["dot_int4.mlir"],
    "ternary_network.mlir": NOT_ON_CPU["dot_int4.mlir"],
}


class Answer(msgspec.Struct):
    """Result of one program."""

    error: str = ""
    outputs: list[list[str]] = msgspec.field(default_factory=list[list[str]])
    flops: float = 0.0
    kept: dict[str, int] = msgspec.field(default_factory=dict[str, int])


def run(files: Sequence[Path], devices: int) -> list[Answer]:
    """The answers of ``run_on_cpu``."""
    script = Path(__file__).parent / "run_on_cpu.py"
    done = subprocess.run(
        [sys.executable, str(script), str(devices)],
        input=msgspec.json.encode([str(path) for path in files]),
        capture_output=True,
        check=False,
        timeout=SAFETY_S,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return msgspec.json.decode(done.stdout, type=list[Answer])


def _read(path: Path) -> Workload:
    return read_any(path, "stablehlo")


def _devices(path: Path) -> int:
    return _read(path).num_ranks


@pytest.mark.parametrize("devices", [1, 8])
def test_original_and_rewritten_programs_give_equal_outputs(devices: int, tmp_path: Path) -> None:
    """Rewritten through bytecode, so that the text is not the same bytes anyway."""
    chosen = [path for path in PROGRAMS if path.name not in WAITS and _devices(path) == devices]
    rewritten: list[Path] = []
    for path in chosen:
        bytecode, _ = write_bytes(_read(path), tmp_path / f"{path.name}.mlirbc")
        text = in_form(bytecode, ProgramForm.BYTECODE, ProgramForm.TEXT, "", load_bindings())
        rewritten.append(tmp_path / path.name.removesuffix(".gz"))
        rewritten[-1].write_bytes(text)
    answers = run([*chosen, *rewritten], devices)
    ran = 0
    for path, one, two in zip(chosen, answers[: len(chosen)], answers[len(chosen) :], strict=True):
        assert bool(one.error) == bool(two.error) == (path.name in NOT_ON_CPU), (path.name, one.error)
        if path.name not in RANDOM:
            assert one.outputs == two.outputs, path.name
        ran += not one.error
    assert ran >= {1: 25, 8: 4}[devices]


# --- replays


def _known_flops(graph: OpGraph) -> float:
    """FLOPs of the flat graph."""
    flat = UnrollLoops(unknown_trips=1)(graph, Diagnostics()) if len(graph.regions) else graph
    return float(np.nansum(np.where(np.isnan(flat.useful_flops), flat.flops, flat.useful_flops)))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("form", ["stablehlo", "hlo"])
def test_replays_run_and_lose_no_work(form: str, devices: int, tmp_path: Path) -> None:
    pattern = "*.mlir*" if form == "stablehlo" else "*.hlo.txt*"
    paths = sorted((FIXTURES / form).glob(pattern))
    chosen = [(path, workload) for path in paths if (workload := read_any(path, form)).num_ranks == devices]
    written = [tmp_path / f"{path.name}.mlir" for path, _ in chosen]
    for (_, workload), replay in zip(chosen, written, strict=True):
        write_bytes(without_program(workload), replay)
    for (path, workload), answer in zip(chosen, run(written, devices), strict=True):
        assert bool(answer.error) == (path.name in REPLAYS_NOT_ON_CPU), (path.name, answer.error)
        if answer.error:
            continue
        assert all(len(arrays) == devices for arrays in answer.outputs)
        # XLA may do work twice where that saves memory, but leaves none out.
        assert answer.flops >= 0.985 * _known_flops(workload.classes[0]), path.name


def _alike(*, waits: bool) -> tuple[Workload, Workload]:
    """Four operations, and on eight devices four collectives or messages of a kind, that differ in name."""
    one, eight = Steps(), Steps()
    deps = [one.op("sqrt", shape=(32, 32))] if waits else []  # XLA repeats what is cheap in each fusion
    for number in range(4):
        one.op(f"aten::op{number}", deps=deps, shape=(32, 32), flops=5.0 * 32 * 32)
        one.op(f"call{number}", deps=deps, flops=1e5)
    deps = [eight.op("abs", shape=(1024,))] if waits else []
    for number in range(4):
        name, channel = f"op{number}", 10 * number + 1
        eight.collective(CollectiveKind.ALL_REDUCE, deps=deps, shape=(1024,), name=name, channel=channel)
        eight.collective(CollectiveKind.ALL_REDUCE, deps=deps, shape=(1024,), name=name)
        eight.collective(CollectiveKind.ALL_GATHER, deps=deps, size=4096.0, name=name)
        eight.message(NodeKind.PERMUTE, [(0, 1), (1, 2)], deps=deps, size=4096.0, name=name, tag=number)
    return Workload.spmd(one.graph(), 1), Workload.spmd(eight.graph(), 8)


@pytest.mark.parametrize("waits", [False, True])
def test_operations_that_differ_in_name_only_are_all_done(waits: bool, tmp_path: Path) -> None:
    one, eight = _alike(waits=waits)
    write_bytes(one, tmp_path / "one.mlir")
    write_bytes(eight, tmp_path / "eight.mlir")
    (answer,) = run([tmp_path / "one.mlir"], 1)
    assert answer.error == ""
    assert answer.flops == pytest.approx(_known_flops(one.classes[0]), rel=0.01)
    (answer,) = run([tmp_path / "eight.mlir"], 8)
    assert answer.error == ""
    assert answer.kept["all-gather"] == answer.kept["collective-permute"] == 4
    # XLA:CPU sends several all-reduces as one of several operands; their sums are its FLOPs.
    assert answer.flops >= 8 * 1024


def test_the_trace_of_a_llama_step_runs_on_eight_devices(tmp_path: Path) -> None:
    source = read_any(FIXTURES / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz", "stablehlo")
    fold, unroll = FoldFree(), UnrollLoops()
    flat = unroll(fold(source.classes[0], Diagnostics()), Diagnostics())
    write = load_format("chakra").write
    assert write is not None
    trace, found = Workload.spmd(flat, source.num_ranks), Diagnostics()
    write(trace, tmp_path / "llama", WriteOptions(name="llama", directory=True), found)
    workload = read_any(tmp_path / "llama", "chakra")
    text, _ = write_bytes(workload, tmp_path / "replay.mlir")
    (answer,) = run([tmp_path / "replay.mlir"], 8)
    assert answer.error == ""
    assert answer.outputs
    graph = workload.classes[0]
    # Fusions of XLA:CPU do some element-wise work twice, which its analysis of the compiled program counts.
    assert answer.flops == pytest.approx(_known_flops(graph), rel=0.03)
    assert answer.kept["dot"] == len(graph.contractions)
    again = read_program(text, "replay.mlir", ReadOptions(), Diagnostics()).classes[0]
    for kind, name in ((CollectiveKind.ALL_GATHER, "all-gather"), (CollectiveKind.ALL_TO_ALL, "all-to-all")):
        assert answer.kept[name] == int((again.collectives.kind == kind).sum())
