"""Memory snapshots: their allocations and frees equal the memory that the simulation reports."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hespas
from hespas.api import SimulationResult
from hespas.graph.errors import OutputError, UnsupportedError, UsageError
from hespas.simulator.memory.snapshot import FreeParts
from tests.processes import run_command

ROOT = Path(__file__).parents[3]
_PROGRAMS = sorted(
    path
    for folder in ("hlo", "stablehlo")
    for path in (ROOT / "fixtures" / folder).iterdir()
    if path.suffix in {".txt", ".mlir"} and path.stat().st_size < 40_000
)
_READ_BY_THE_VIEWER = frozenset({
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINUNICODE", "EMPTY_DICT",
    "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LONG1", "LONG_BINGET", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE",
    "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
})  # fmt: skip
"""Operations that ``unpickle`` of PyTorch's ``MemoryViz.js`` implements."""


def _simulated(source: Path, folder: Path) -> tuple[SimulationResult, dict[str, Any]]:
    target = folder / "memory.pickle"
    done = hespas.simulate(source, "H100-SXM", memory_snapshot=target)
    content = target.read_bytes()
    used = {operation.name for operation, _, _ in pickletools.genops(content)}
    assert used <= _READ_BY_THE_VIEWER
    return done, pickle.loads(content)


@pytest.mark.parametrize("source", _PROGRAMS, ids=lambda path: path.name)
def test_events_add_up_to_the_memory_in_use(tmp_path: Path, source: Path) -> None:
    try:
        done, snapshot = _simulated(source, tmp_path)
    except UnsupportedError:
        pytest.skip("no rank class states its results")
    assert len(snapshot["device_traces"]) == len(done.memory) == len(snapshot["segments"])
    for memory, trace, segment in zip(
        done.memory, snapshot["device_traces"], snapshot["segments"], strict=True
    ):
        live: dict[int, int] = {}
        highest = 0
        for event in trace:
            start, size = event["addr"], event["size"]
            if event["action"] == "alloc":
                assert all(start + size <= other or other + more <= start for other, more in live.items())
                live[start] = size
                highest = max(highest, sum(live.values()))
            elif event["action"] == "free_completed":
                assert live.pop(start) == size
            assert segment["address"] <= start
            assert start + size <= segment["address"] + segment["total_size"]
        assert highest == pytest.approx(memory.use.peak_bytes, abs=len(trace))
        blocks = segment["blocks"]
        kept = {block["address"]: block["size"] for block in blocks if block["state"] == "active_allocated"}
        assert kept == live
        assert sum(block["size"] for block in blocks) == segment["total_size"]
        times = [event["time_us"] for event in trace if "time_us" in event]
        assert times == sorted(times)


def test_frames_name_the_operation_its_source_and_its_scope(tmp_path: Path) -> None:
    _, snapshot = _simulated(ROOT / "fixtures" / "stablehlo" / "mlp.mlir", tmp_path)
    frames = [event["frames"] for event in snapshot["device_traces"][0]]
    product = next(pair for pair in frames if pair[0]["name"] == "dot_general.0")
    assert (product[0]["filename"], product[0]["line"]) == ("fixtures/make/dense.py", 28)
    assert product[1]["name"] == "jit(mlp)/dot_general"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=60))
def test_buffers_never_overlap(steps: list[tuple[bool, int]]) -> None:
    """A byte has one owner, and the segment is as large as its highest byte."""
    parts, live = FreeParts(), dict[int, int]()
    owned = np.zeros(4096, bool)
    for frees, size in steps:
        if frees and live:
            offset = sorted(live)[size % len(live)]
            parts.give(offset, live[offset])
            owned[offset : offset + live.pop(offset)] = False
        else:
            offset = parts.take(size)
            assert not owned[offset : offset + size].any()
            owned[offset : offset + size] = True
            live[offset] = size
            assert offset + size <= parts.top
    assert sum(size for size, _ in parts.by_size) == parts.top - sum(live.values())


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    source, target = ROOT / "fixtures" / "stablehlo" / "mlp.mlir", tmp_path / "memory.pickle"
    hespas.simulate(source, "H100-SXM", memory_snapshot=target)
    with pytest.raises(OutputError, match="exists"):
        hespas.simulate(source, "H100-SXM", memory_snapshot=target)
    profile = ROOT / "fixtures" / "profiles" / "ffn_train_rank0of2.pt.trace.json.gz"
    with pytest.raises(UnsupportedError, match="no memory snapshot"):
        hespas.simulate(profile, memory_snapshot=tmp_path / "other.pickle")
    assert not (tmp_path / "other.pickle").exists()
    with pytest.raises(UsageError, match="a memory snapshot is a pickle"):
        hespas.simulate(source, "H100-SXM", memory_snapshot=tmp_path / "memory.pickle.gz")
    other = tmp_path / "notes.pickle"
    other.write_text("notes")
    with pytest.raises(OutputError, match="is not a pickle"):
        hespas.simulate(source, "H100-SXM", memory_snapshot=other, overwrite=True)
    assert other.read_text() == "notes"
    page = tmp_path / "page.pickle"
    done = run_command("hespas", "simulate", source, "--memory-snapshot", page, "--html", page)
    assert (done.returncode, page.exists()) == (2, False)
    assert "names the same file as" in done.stderr
