"""Conversion of graphs, profiles, estimates and timelines to pandas tables.

Texts are decoded, codes replaced by names, ragged rows by lists. pandas is imported when a table is made. A
table has one Python object per text and list: it is meant for inspection, not for computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import DTYPES, DYNAMIC, RaggedArray, StringTable
from hespas.graph.errors import UsageError
from hespas.graph.opgraph import CollectiveKind, NodeKind, OpClass, OpGraph, Resource
from hespas.graph.profile import Profile
from hespas.graph.timeline import Estimate, Timeline
from hespas.graph.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["to_pandas"]

_Columns = dict[str, "NDArray[np.generic] | pd.Categorical[str]"]
_Objects = NDArray[np.object_]


def to_pandas(
    value: OpGraph | Workload | Profile | Estimate | Timeline, graph: OpGraph | None = None
) -> pd.DataFrame:
    """Return one row per node, event or span; the index is its number.

    The table of a workload has the nodes of all classes, indexed by class and node, with the number of ranks
    of each class. ``graph`` adds the description of its nodes to an estimate or a timeline. Raises
    ``UsageError`` if an estimate has another number of nodes than ``graph``, or a timeline refers to nodes
    that it does not have.
    """
    match value:
        case OpGraph():
            return _table(_graph_columns(value), "node")
        case Workload():
            import pandas as pd

            frames = {
                index: to_pandas(graph).assign(ranks=int((value.rank_class == index).sum()))
                for index, graph in enumerate(value.classes)
            }
            return pd.concat(frames, names=["rank_class"])
        case Profile():
            return _table(_profile_columns(value), "event")
        case Estimate():
            return _table(_estimate_columns(value, graph), "node")
        case Timeline():
            return _timeline(value, graph)


def _table(columns: _Columns, index: str) -> pd.DataFrame:
    import pandas as pd

    # pandas would store texts as Arrow strings, which cannot hold lone surrogates
    series = {
        name: pd.Series(column, dtype=object) if column.dtype == np.object_ else column
        for name, column in columns.items()
    }
    frame = pd.DataFrame(series)
    frame.index.name = index
    return frame


def _named(codes: NDArray[np.integer], names: list[str]) -> pd.Categorical[str]:
    """Return a column of codes as a categorical column of names; -1 becomes missing."""
    import pandas as pd

    return pd.Categorical.from_codes(codes.astype(np.int64), categories=pd.Index(names))


def _members(codes: NDArray[np.integer], kind: type[IntEnum]) -> pd.Categorical[str]:
    return _named(codes, [member.name.lower() for member in kind])


def _texts(strings: StringTable, rows: NDArray[np.integer]) -> _Objects:
    """Return the text of each row; equal texts are one object. Decodes only the rows in use."""
    distinct, index = np.unique(rows, return_inverse=True)
    return _objects([strings[row] for row in distinct.tolist()])[index]


def _objects(items: Sequence[object]) -> _Objects:
    return np.fromiter(items, np.object_, len(items))


def _type_lists(rows: RaggedArray, texts: Sequence[str]) -> _Objects:
    return _objects([[texts[index] for index in row] for row in rows.to_lists()])


def _graph_columns(graph: OpGraph) -> _Columns:
    strings, types = graph.strings, list[str]()
    for row in range(len(graph.types)):
        element = graph.types.dtype_of(row)
        extents = ",".join("?" if extent == DYNAMIC else str(extent) for extent in graph.types.shape(row))
        types.append(f"{'?' if element is None else element.name}[{extents}]")
    dtype_names = [entry.name for entry in DTYPES]
    # Kind, bytes and group size of communication: missing and NaN for other nodes.
    collectives, p2p, nodes = graph.collectives, graph.p2p, len(graph)
    kind = np.full(nodes, -1, np.int64)
    kind[collectives.node] = collectives.kind
    comm_bytes = np.full(nodes, np.nan)
    comm_bytes[p2p.node] = p2p.comm_bytes
    comm_bytes[collectives.node] = collectives.comm_bytes
    sizes = np.array([*(groups.group_size for groups in graph.group_sets), -1], np.int64)
    group_size = np.full(nodes, -1, np.int64)
    group_size[collectives.node] = sizes[collectives.group_set]
    return {
        "id": graph.id,
        "name": _texts(strings, graph.name_id),
        "op": _texts(strings, graph.op_id),
        "kind": _members(graph.kind, NodeKind),
        "op_class": _members(graph.op_class, OpClass),
        "flops": graph.flops,
        "useful_flops": graph.useful_flops,
        "transcendentals": graph.transcendentals,
        "bytes_read": graph.bytes_read,
        "bytes_written": graph.bytes_written,
        "duration_ns": graph.duration_ns,
        "executions": graph.executions,
        "rate_dtype": _named(graph.rate_dtype, dtype_names),
        "operands": _type_lists(graph.operands, types),
        "results": _type_lists(graph.results, types),
        "data_deps": _objects(graph.data_deps.to_lists()),
        "control_deps": _objects(graph.control_deps.to_lists()),
        "collective": _members(kind, CollectiveKind),
        "comm_bytes": comm_bytes,
        "group_size": group_size,
        "resource": _members(graph.resource, Resource),
        "stream": graph.stream,
        "region": graph.region,
        "source": _texts(strings, graph.source_id),
        "framework_op": _texts(strings, graph.framework_id),
    }


def _profile_columns(profile: Profile) -> _Columns:
    strings = profile.strings
    return {
        "op": _texts(strings, profile.op_id),
        "module": _texts(strings, profile.module_id),
        "op_class": _members(profile.op_class, OpClass),
        "kernel": _texts(strings, profile.kernel_id),
        "category": _texts(strings, profile.category_id),
        "shapes": _texts(strings, profile.shapes_id),
        "dtype": _texts(strings, profile.dtype_id),
        "device": _named(profile.device_index, list(profile.devices)),
        "rank": profile.rank,
        "stream": profile.stream,
        "run": profile.run,
        "start_ns": profile.start_ns,
        "duration_ns": profile.duration_ns,
        "bytes_moved": profile.bytes_moved,
        "host_event": profile.host_event,
        "launch_start_ns": profile.launch_start_ns,
        "launch_end_ns": profile.launch_end_ns,
        "grid": _texts(strings, profile.grid_id),
        "batch": _texts(strings, profile.batch_id),
        "repeats": profile.repeats,
        "spread_ns": profile.spread_ns,
    }


def _estimate_columns(estimate: Estimate, graph: OpGraph | None) -> _Columns:
    if graph is not None and len(graph) != len(estimate):
        raise UsageError(
            f"the estimate has {len(estimate)} nodes, graph {graph.name!r} has {len(graph)}",
            hint="pass the graph that was estimated",
        )
    described = {} if graph is None else _node_columns(graph, np.arange(len(graph)))
    return {
        **described,
        "duration_ns": estimate.duration_ns,
        "low_ns": estimate.low_ns,
        "high_ns": estimate.high_ns,
        "estimator": _named(estimate.estimator, list(estimate.estimators)),
        "bound": _named(estimate.bound, list(estimate.bounds)),
        "basis": _named(estimate.basis, list(estimate.bases)),
    }


def _timeline(timeline: Timeline, graph: OpGraph | None) -> pd.DataFrame:
    """Return one row per span; spans of loops have no node columns."""
    nodes = timeline.node
    if graph is not None and len(nodes) and int(nodes.max()) >= len(graph):
        raise UsageError(
            f"the timeline has node {int(nodes.max())}, graph {graph.name!r} has {len(graph)} nodes",
            hint="pass the graph that was simulated",
        )
    frame = _table(
        {
            "node": nodes,
            "rank": timeline.rank,
            "resource": _named(timeline.resource, list(timeline.resources)),
            "start_ns": timeline.start_ns,
            "end_ns": timeline.end_ns,
            "duration_ns": timeline.end_ns - timeline.start_ns,
            "critical": timeline.critical,
            "cause": timeline.cause,
            "by_resource": timeline.by_resource,
            "region": timeline.region,
            "trips": timeline.trips,
        },
        "span",
    )
    if graph is None:
        return frame
    spans = np.flatnonzero(nodes >= 0)
    described = _table(_node_columns(graph, nodes[spans]), "span")
    described.index = frame.index[spans]
    return frame.join(described)


def _node_columns(graph: OpGraph, nodes: NDArray[np.integer]) -> _Columns:
    return {
        "id": graph.id[nodes],
        "name": _texts(graph.strings, graph.name_id[nodes]),
        "op": _texts(graph.strings, graph.op_id[nodes]),
        "kind": _members(graph.kind[nodes], NodeKind),
        "op_class": _members(graph.op_class[nodes], OpClass),
        "flops": graph.flops[nodes],
        "bytes_read": graph.bytes_read[nodes],
        "bytes_written": graph.bytes_written[nodes],
        "executions": graph.executions[nodes],
    }
