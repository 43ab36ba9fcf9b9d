"""One trace per class of ranks that run the same nodes, and the map that says for whom each stands."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np

from hespas.converters.chakra.job_traces import Account, JobTraces, Runs
from hespas.converters.chakra.rank_files import RankFolder
from hespas.converters.chakra.rank_map import (
    FILE_NAME,
    ClassDocument,
    RankMapDocument,
    groups_document,
    way_document,
)
from hespas.converters.chakra.rank_values import RankValues
from hespas.converters.chakra.wire import Longs
from hespas.files.documents import encode_json
from hespas.graph import ABSENT, GroupSet, NodeKind, OpGraph, Permutation
from hespas.graph.columns import SmallIntArray

__all__ = ["write_classes"]

_Row = TypeVar("_Row", bound=Hashable)


def write_classes(job: JobTraces, ranks: Longs, folder: RankFolder) -> Account:
    """One file per class, of the lowest of its ranks, and ``rank_map.json``. Costs one encoding per class.

    Raises ``OSError`` where the system refuses.
    """
    account = Account()
    representative = np.full(job.workload.num_ranks, ABSENT, np.int64)
    classes = _Classes(job, folder)
    for runs, members in job.alike(ranks):
        representative[members] = classes.first(runs, members)
        account.add(runs, len(members))
    document = RankMapDocument(
        num_ranks=job.workload.num_ranks,
        representative=representative.tolist(),
        classes=[classes.documents[rank] for rank in sorted(classes.documents)],
        group_sets=[groups_document(groups) for groups in classes.group_sets],
        permutations=[way_document(way) for way in classes.permutations],
    )
    (folder.path / FILE_NAME).write_bytes(encode_json(document) + b"\n")
    return account


class _Classes:
    """The classes written so far, and the tables that they index."""

    def __init__(self, job: JobTraces, folder: RankFolder) -> None:
        self._job, self._folder = job, folder
        self._first: dict[tuple[int, bytes], int] = {}
        self.documents: dict[int, ClassDocument] = {}
        self.group_sets: dict[GroupSet, int] = {}
        self.permutations: dict[Permutation, int] = {}

    def first(self, runs: Runs, members: Longs) -> int:
        """The rank that stands for others, whose file is written when it is met."""
        key = (runs.of_class, runs.pattern)
        if key in self._first:
            return self._first[key]
        rank = self._first[key] = int(members[0])
        graph = runs.writer.graph
        variables = RankValues.of(graph, members[:1], self._job.groups, {}).variables(0)
        self._folder.put_pieces(rank, lambda: runs.writer.pieces(variables))
        collective = graph.kind == NodeKind.COLLECTIVE
        message = (graph.kind == NodeKind.SEND) | (graph.kind == NodeKind.RECV)
        sets = _of_nodes(graph, graph.collectives.node, graph.collectives.group_set)[collective]
        ways = _of_nodes(graph, graph.p2p.node, graph.p2p.permutation)[message]
        self.documents[rank] = ClassDocument(
            rank=rank,
            collectives=_numbered(sets, graph.group_sets, self.group_sets),
            messages=_numbered(ways, graph.permutations, self.permutations),
        )
        return rank


def _of_nodes(graph: OpGraph, nodes: SmallIntArray, rows: SmallIntArray) -> Longs:
    """The row of each node, -1 for none."""
    column = np.full(len(graph), -1, np.int64)
    column[nodes] = rows
    return column


def _numbered(rows: Longs, table: Sequence[_Row], known: dict[_Row, int]) -> list[int]:
    """Rows of a graph's own table as those of the job's, which grows in the order of use."""
    numbers = np.full(len(table) + 1, -1, np.int64)  # the last one is that of -1
    used: list[int] = rows[rows >= 0].tolist()
    for row in dict.fromkeys(used):
        numbers[row] = known.setdefault(table[row], len(known))
    found: list[int] = numbers[rows].tolist()
    return found
