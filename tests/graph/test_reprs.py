"""One-line representations of values, with any content."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from hespas import api
from hespas.graph import Workload
from hespas.graph.errors import short_repr

FIXTURE = Path(__file__).parents[2] / "fixtures" / "stablehlo" / "llama_fsdp_tp_local_N8.mlir.gz"


def test_values_have_short_reprs() -> None:
    workload = api.read(FIXTURE)
    assert isinstance(workload, Workload)
    ops = sum(map(len, workload.classes))
    assert repr(workload) == f"<Workload {workload.name}: {workload.num_ranks} ranks, 1 class, {ops:,} ops>"
    done = api.simulate(workload, "H100-SXM")
    graph = workload.classes[0]
    for value in (workload, graph, graph.strings, done.timeline):
        assert 0 < len(repr(value)) <= 200
    assert f"{len(graph):,} ops" in repr(graph)
    estimated = api.estimate(workload, "H100-SXM").estimates[0]
    assert repr(estimated).startswith("<Estimate by ")
    assert "H100-SXM" in repr(estimated)


def test_a_name_of_an_input_makes_no_long_or_broken_line() -> None:
    workload = api.read(FIXTURE)
    assert isinstance(workload, Workload)
    shown = repr(replace(workload, name="\x1b[2J\n" * 10_000, rank_class=np.zeros(1, np.int32)))
    assert len(shown) <= 200
    assert shown.isprintable()
    assert "1 rank, 1 class" in shown


def test_what_is_told_is_cut_to_a_line() -> None:
    assert short_repr(1, "", "x" * 500) == "<int: " + "x" * 193 + ">"
