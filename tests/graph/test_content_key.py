"""Checksums of values: equal content, and nothing else, is equal."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hespas
from hespas.graph import Workload
from hespas.graph.equality import content_key

MLP = Path(__file__).parents[2] / "fixtures" / "op_graph" / "mlp.json"


def mlp() -> Workload:
    value = hespas.read(MLP)
    assert isinstance(value, Workload)
    return value


def test_the_same_file_has_the_same_key_in_another_process() -> None:
    program = (
        "import sys, hespas; from hespas.graph.equality import content_key; "
        "print(content_key(hespas.read(sys.argv[1])))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, str(MLP)], capture_output=True, check=True, text=True
    )
    assert said.stdout.strip() == content_key(mlp())


def test_any_column_and_any_name_counts() -> None:
    workload = mlp()
    graph = workload.classes[0]
    costs = graph.flops.copy()
    costs[-1] += 1
    others = (
        replace(workload, classes=(replace(graph, flops=costs),)),
        replace(workload, name="other"),
        replace(workload, metadata={**workload.metadata, "more": "1"}),
        replace(workload, rank_class=np.zeros(2, np.int32)),
    )
    keys = {content_key(workload), *map(content_key, others)}
    assert len(keys) == 5


def test_what_stands_where_counts() -> None:
    pairs = [(("ab", "c"), ("a", "bc")), ((1, 1.0), (1.0, 1)), ((("a",), "b"), (("a", "b"),))]
    for one, other in pairs:
        assert content_key(*one) != content_key(*other)
    assert content_key({"a": 1, "b": 2}) == content_key({"b": 2, "a": 1})


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="values of type object have no checksum"):
        content_key(object())
