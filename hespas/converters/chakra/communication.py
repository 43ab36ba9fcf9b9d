"""Collectives and messages of a trace as tables of the hub."""

from __future__ import annotations

import numpy as np

from hespas.converters.chakra.attribute_reader import AttributeReader
from hespas.converters.chakra.contract import COMM_TO_COLLECTIVE
from hespas.converters.chakra.peers import Peers
from hespas.converters.chakra.spans import Bools
from hespas.graph import CollectiveKind, CollectiveTable, NodeKind, P2pTable, StringTableBuilder
from hespas.graph.columns import FloatArray, IntArray

__all__ = ["collective_table", "p2p_table"]

_LARGEST_NUMBER = (1 << 63) - 1


def collective_table(reader: AttributeReader, peers: Peers, strings: StringTableBuilder) -> CollectiveTable:
    """One row per collective node; who takes part is in ``peers``."""
    is_collective = reader.kind == NodeKind.COLLECTIVE
    nodes = np.flatnonzero(is_collective)
    kind = np.full(len(reader.columns), CollectiveKind.UNKNOWN, np.uint8)
    stated = reader.integers("comm_type", is_collective, 0, max(COMM_TO_COLLECTIVE))
    meaning = np.array(
        [COMM_TO_COLLECTIVE[number] for number in range(max(COMM_TO_COLLECTIVE) + 1)], np.uint8
    )
    kind[stated.node] = meaning[stated.value]
    reader.modelled[peers.group_rows] = True
    return CollectiveTable(
        node=nodes.astype(np.int32),
        kind=kind[nodes],
        group_set=peers.group_set.astype(np.int32),
        comm_bytes=_sizes(reader, "comm_size", is_collective)[nodes],
        operand_bytes=_sizes(reader, "comm_operand_bytes", is_collective)[nodes],
        result_bytes=_sizes(reader, "comm_result_bytes", is_collective)[nodes],
        channel=_numbers(reader, "channel", is_collective)[nodes],
        reduction=reader.texts("reduction", strings, is_collective)[nodes],
    )


def p2p_table(reader: AttributeReader, peers: Peers) -> P2pTable:
    """One row per message node; whom it goes to is in ``peers``."""
    is_message = (reader.kind == NodeKind.SEND) | (reader.kind == NodeKind.RECV)
    nodes = np.flatnonzero(is_message)
    reader.modelled[peers.peer_rows] = True
    return P2pTable(
        node=nodes.astype(np.int32),
        permutation=peers.permutation.astype(np.int32),
        comm_bytes=_sizes(reader, "comm_size", is_message)[nodes],
        tag=_numbers(reader, "comm_tag", is_message)[nodes],
        host=np.zeros(len(nodes), np.bool_),
    )


def _sizes(reader: AttributeReader, name: str, nodes: Bools) -> FloatArray:
    """Bytes by node, NaN where not stated."""
    return reader.take(reader.find(name, nodes=nodes))


def _numbers(reader: AttributeReader, name: str, nodes: Bools) -> IntArray:
    """Numbers by node, -1 where not stated."""
    found = reader.integers(name, nodes, 0, _LARGEST_NUMBER)
    column = np.full(len(reader.columns), -1, np.int64)
    column[found.node] = found.value
    return column
