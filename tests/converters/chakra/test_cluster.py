"""Rank files written by the workers of a cluster: equal files, also if a worker is killed."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hespas
from hespas.converters import WriteOptions
from hespas.converters.chakra import cluster
from hespas.graph import CollectiveKind, GraphBuilder, NodeKind, OpClass, StridedGroups, Workload
from hespas.graph.errors import MissingExtraError, UsageError

RANKS = 2048


def job() -> Workload:
    """Two classes with a collective, of 32 files each."""
    made: list[Any] = []
    for number in range(2):
        b = GraphBuilder(f"c{number}")
        row = b.strings.add("op")
        last = b.add_node(name_id=row, op_id=row, op_class=OpClass.CONTRACTION, flops=1.0 + number)
        node = b.add_node(
            name_id=row, op_id=row, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE, data_deps=[last]
        )
        groups = b.group_set(StridedGroups.from_mesh([RANKS // 2, 2], [1]))
        b.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=groups, comm_bytes=64)
        made.append(b.build())
    rank_class = np.repeat(np.arange(2, dtype=np.int32), RANKS // 2)
    return Workload(name="job", classes=tuple(made), rank_class=rank_class)


def tree(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}


def test_without_the_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(cluster, "import_module", absent)
    options = WriteOptions(cluster="tcp://127.0.0.1:1")
    with pytest.raises(MissingExtraError, match="'cluster'") as caught:
        hespas.write(job(), tmp_path / "out", format="chakra", options=options)
    assert caught.value.hint == "pip install 'hespas[cluster]'"
    assert list(tmp_path.iterdir()) == []


needs_distributed = pytest.mark.skipif(
    find_spec("distributed") is None, reason="distributed is not installed"
)


@needs_distributed
@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_loses_nothing_and_writes_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import import_module

    distributed: Any = import_module("distributed")
    hespas.write(job(), tmp_path / "alone", format="chakra", options=WriteOptions(name="job"))
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as local:
        victims: list[int] = []

        def progress(done: int, total: int) -> None:
            assert 0 < done <= total
            if not victims:
                victims.append(local.workers[0].pid)
                os.kill(victims[0], signal.SIGKILL)

        options = WriteOptions(name="job", cluster=local.scheduler_address, progress=progress)
        hespas.write(job(), tmp_path / "killed", format="chakra", options=options)
        assert victims
        assert tree(tmp_path / "killed") == tree(tmp_path / "alone")
        parts = [WriteOptions(name="job", cluster=local.scheduler_address, shard=(i, 2)) for i in (1, 2)]
        for part in parts:
            hespas.write(job(), tmp_path / "shares", format="chakra", options=part)
        assert tree(tmp_path / "shares") == tree(tmp_path / "alone")
        monkeypatch.setattr(cluster, "__version__", "another")
        with pytest.raises(UsageError, match="the client has another"):
            hespas.write(job(), tmp_path / "out", format="chakra", options=replace(options, progress=None))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["alone", "killed", "shares"]


@needs_distributed
def test_an_address_without_a_scheduler_is_told(tmp_path: Path) -> None:
    for address, told in (
        ("nonsense://127.0.0.1", "expected the address of a dask scheduler"),
        ("tcp://127.0.0.1:1", "no scheduler answers"),
    ):
        with pytest.raises(UsageError, match=told):
            hespas.write(job(), tmp_path / "out", format="chakra", options=WriteOptions(cluster=address))
    assert list(tmp_path.iterdir()) == []
