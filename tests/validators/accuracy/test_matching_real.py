"""Recordings of JAX with the compiled StableHLO: all device time is matched to operations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas import api
from hespas.graph import Diagnostics, OpClass, Profile, Workload
from hespas.validators.accuracy.coverage import RULES, coverage_of
from hespas.validators.accuracy.matching import match_program

DATA = Path(__file__).parents[3].parent / "shared" / "data" / "workloads"
pytestmark = pytest.mark.skipif(not DATA.exists(), reason="the shared data are not here")


def _read(name: str) -> tuple[Profile, Workload]:
    pytest.importorskip("jaxlib")
    profile, program = api.read(DATA / f"{name}.xplane.pb"), api.read(DATA / f"{name}.stablehlo.mlir.gz")
    assert isinstance(profile, Profile)
    assert isinstance(program, Workload)
    return profile, program


@pytest.mark.parametrize(("name", "instructions"), [("llama1", 205), ("llama_n4", 257)])
def test_all_instructions_find_their_operations(name: str, instructions: int) -> None:
    profile, program = _read(name)
    [graph] = program.classes
    diagnostics = Diagnostics()
    found = match_program(graph, profile, diagnostics)
    coverage = coverage_of(graph, profile, found)
    assert len(found.keys) == instructions
    assert all(key.nodes for key in found.keys)
    assert {RULES[key.rule] for key in found.keys} == {"op-name"}
    assert (coverage.time_share, coverage.count_share) == (1.0, 1.0)
    assert coverage.compared_time_ns <= coverage.matched_time_ns == float(profile.duration_ns.sum())
    assert coverage.unmatched_events == ()
    assert coverage.inferred_time_ns < 0.01 * coverage.time_ns
    assert coverage.matched_nodes > 0.9 * coverage.nodes
    assert not list(diagnostics)


def test_every_product_of_the_compiled_program_carries_out_one_of_the_source() -> None:
    """Also where XLA gave it the name of the transpose that it folded into it."""
    profile, program = _read("llama1")
    [graph] = program.classes
    found = match_program(graph, profile, Diagnostics())
    products = [key for key in found.keys if key.op.startswith("dot")]
    assert len(products) > 10
    is_product = graph.op_class == int(OpClass.CONTRACTION)
    assert all(is_product[list(key.nodes)].any() for key in products)
    assert (found.node_group[is_product] >= 0).all()


def test_against_the_compiled_program_every_instruction_is_itself() -> None:
    profile, _ = _read("llama1")
    compiled = api.read(DATA / "llama1.opt.hlo.txt.gz")
    assert isinstance(compiled, Workload)
    [graph] = compiled.classes
    found = match_program(graph, profile, Diagnostics())
    assert {RULES[key.rule] for key in found.keys} == {"instruction"}
    assert all([graph.node_name(node) for node in key.nodes] == [key.op] for key in found.keys)
    assert coverage_of(graph, profile, found).compared_time_ns == float(profile.duration_ns.sum())


def test_ranks_of_one_program_share_groups() -> None:
    profile, program = _read("llama_n4")
    assert set(np.unique(profile.rank).tolist()) == {0, 1, 2, 3}
    found = match_program(program.classes[0], profile, Diagnostics())
    by_rank = [set(found.event_group[profile.rank == rank].tolist()) for rank in range(4)]
    assert by_rank[0] == by_rank[1] == by_rank[2] == by_rank[3]
