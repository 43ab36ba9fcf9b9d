"""Collectives and point-to-point operations: attributes to groups, pairs and payloads.

Groups stay as the program states them, with their mode, until the whole module is read and the number of
replicas and partitions is known; then :func:`hespas.converters.replica_groups.normalise_groups` makes them
global.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NamedTuple, Protocol, cast

import numpy as np

from hespas.converters.replica_groups import (
    MAX_DEVICES,
    IdMode,
    dense_groups,
    group_mode,
    highest_id,
    mesh_groups,
)
from hespas.converters.stablehlo.bindings import Bindings
from hespas.converters.stablehlo.mlir import (
    Attribute,
    Operation,
    int_array,
    is_true,
    place_of,
    quoted,
    string_in,
)
from hespas.converters.stablehlo.types import TypeInfo
from hespas.costs import COLLECTIVE_KINDS, payload
from hespas.graph import CollectiveKind, GroupSet, NodeKind
from hespas.graph.errors import FormatError

__all__ = ["EXCHANGES", "Collective", "Exchange", "ExchangeReader", "Mesh", "Message", "read_mesh"]

EXCHANGES: frozenset[str] = frozenset({*COLLECTIVE_KINDS, "collective_permute", "send", "recv"})
"""Canonical names of operations that talk to other devices."""

_STATED = (
    "replica_groups",
    "source_target_pairs",
    "channel_handle",
    "use_global_device_ids",
    "is_host_transfer",
)
_Pairs = tuple[tuple[int, int], ...]


class Collective(NamedTuple):
    """One collective as stated. ``groups`` None: one group of everybody."""

    kind: CollectiveKind
    groups: GroupSet | None
    mode: IdMode
    channel: int
    reduction: str
    operand_bytes: float
    result_bytes: float

    def comm_bytes(self, group_size: int) -> float:
        """The size a Chakra trace states."""
        return payload(self.kind, self.operand_bytes, self.result_bytes, group_size).comm_bytes


class Message(NamedTuple):
    """One permute, send or receive as stated. ``pairs`` None: the peer is not stated.

    ``mode`` None: ids of whatever there are several of, as XLA reads the pairs of ``send`` and ``recv``.
    """

    kind: NodeKind
    pairs: _Pairs | None
    mode: IdMode | None
    tag: int
    comm_bytes: float
    is_host: bool = False


Exchange = Collective | Message


class Mesh(NamedTuple):
    """Named axes with their extents, and the devices where they are not 0, 1, 2, ...."""

    axes: tuple[tuple[str, int], ...]
    device_ids: tuple[int, ...] = ()


class _Axis(Protocol):
    name: str
    size: int


class _MeshAttribute(Protocol):
    axes: Sequence[Attribute]
    device_ids: Sequence[int] | Attribute | None


class _SubAxis(Protocol):
    pre_size: int
    size: int


class _AxisReference(Protocol):
    name: str
    sub_axis_info: Attribute | None


class ExchangeReader:
    """Decodes exchanges of one module; equal group attributes are decoded once."""

    def __init__(self, bindings: Bindings, meshes: Mapping[str, Mesh], path: str) -> None:
        self._bindings = bindings
        self._meshes = meshes
        self._path = path
        self._groups: dict[Attribute, GroupSet | None] = {}
        self._known: dict[tuple[object, ...], int] = {}
        self.rows: list[Exchange] = []

    def row(
        self,
        canonical: str,
        op: Operation,
        operands: tuple[TypeInfo, ...],
        results: tuple[TypeInfo, ...],
        reduction: str,
    ) -> int:
        """The row in ``rows`` of the exchange an operation makes; equal ones share a row.

        Raises ``FormatError`` for contradictory attributes.
        """
        stated = tuple([op.attributes.get(name) for name in _STATED])
        key = (canonical, stated, operands, results, reduction)
        row = self._known.get(key)
        if row is not None:
            return row
        sizes = [
            sum(tensor.bytes for info in infos for tensor in info.tensors) for infos in (operands, results)
        ]
        try:
            exchange = self._read(canonical, op, sizes[0], sizes[1], reduction)
            _check_ids(exchange)
        except ValueError as error:
            raise FormatError(
                f"{op.name}: {error}",
                path=self._path,
                position=place_of(str(op.location)),
                hint="correct the groups or pairs of this operation",
            ) from error
        self.rows.append(exchange)
        row = self._known[key] = len(self.rows) - 1
        return row

    def _read(
        self, canonical: str, op: Operation, operand_bytes: float, result_bytes: float, reduction: str
    ) -> Exchange:
        channel = self._channel(op)
        if canonical in {"send", "recv"}:
            return self._message(canonical, op, operand_bytes, result_bytes, channel)
        use_global = is_true(op, "use_global_device_ids")
        mode = group_mode(canonical, channel, use_global_device_ids=use_global)
        if canonical == "collective_permute":
            pairs = self._pairs(op)
            return Message(NodeKind.PERMUTE, pairs or (), mode, channel if channel > 0 else -1, operand_bytes)
        attribute = op.attributes.get("replica_groups")
        if attribute is not None and self._is_mesh(attribute):
            mode = IdMode.FLATTENED_IDS
        return Collective(
            COLLECTIVE_KINDS[canonical],
            None if attribute is None else self._decoded(attribute),
            mode,
            channel if channel > 0 else -1,
            reduction,
            operand_bytes,
            result_bytes,
        )

    def _message(
        self, canonical: str, op: Operation, operand_bytes: float, result_bytes: float, channel: int
    ) -> Message:
        is_send = canonical == "send"
        return Message(
            NodeKind.SEND if is_send else NodeKind.RECV,
            self._pairs(op),
            None,
            channel if channel > 0 else -1,
            operand_bytes if is_send else result_bytes,
            is_true(op, "is_host_transfer"),
        )

    def _pairs(self, op: Operation) -> _Pairs | None:
        attribute = op.attributes.get("source_target_pairs")
        if attribute is None:
            return None
        rows = int_array(attribute)
        if rows.size == 0:
            return None
        if rows.ndim != 2 or rows.shape[1] != 2:
            raise ValueError(f"source_target_pairs has shape {rows.shape}, not (pairs, 2)")
        return tuple((int(source), int(target)) for source, target in rows.tolist())

    def _channel(self, op: Operation) -> int:
        attribute = op.attributes.get("channel_handle")
        if attribute is None:
            return 0
        return int(self._bindings.dialect_of(op.name).ChannelHandle(attribute).handle)

    def _is_mesh(self, attribute: Attribute) -> bool:
        return bool(self._bindings.stablehlo.ReplicaGroupMeshAxesAttr.isinstance(attribute))

    def _decoded(self, attribute: Attribute) -> GroupSet | None:
        if attribute not in self._groups:
            is_mesh = self._is_mesh(attribute)
            self._groups[attribute] = (
                self._mesh_axes(attribute) if is_mesh else dense_groups(int_array(attribute))
            )
        return self._groups[attribute]

    def _mesh_axes(self, attribute: Attribute) -> GroupSet:
        """``replica_group_mesh_axes``: a mesh, inline or of the module, and the axes a group varies over."""
        dialect = self._bindings.stablehlo
        stated = dialect.ReplicaGroupMeshAxesAttr(attribute)
        is_inline = not str(stated.mesh).startswith("@")
        mesh = read_mesh(stated.mesh, dialect) if is_inline else self._meshes.get(string_in(stated.mesh))
        if mesh is None:
            raise ValueError(f"the module has no mesh {quoted(str(stated.mesh))}")
        names = [name for name, _ in mesh.axes]
        axes: list[tuple[int, int, int]] = []
        for each in cast("Sequence[Attribute]", stated.axes):
            reference = cast("_AxisReference", dialect.AxisRefAttr(each))
            if reference.name not in names:
                raise ValueError(f"the mesh has no axis {reference.name!r}")
            place = names.index(reference.name)
            part = reference.sub_axis_info
            sub = None if part is None else cast("_SubAxis", dialect.SubAxisInfoAttr(part))
            pre, size = (1, mesh.axes[place][1]) if sub is None else (sub.pre_size, sub.size)
            axes.append((place, pre, size))
        ids = np.array(mesh.device_ids, np.int64) if mesh.device_ids else None
        return mesh_groups([extent for _, extent in mesh.axes], axes, ids)


def _check_ids(exchange: Exchange) -> None:
    """Ids decide how many devices there are where the module does not say."""
    if isinstance(exchange, Message):
        highest = max((rank for pair in exchange.pairs or () for rank in pair), default=0)
    else:
        highest = highest_id(exchange.groups)
    if highest >= MAX_DEVICES:
        raise ValueError(f"device id {highest:,} is out of range (at most {MAX_DEVICES:,} devices are read)")


def read_mesh(attribute: Attribute, dialect: ModuleType) -> Mesh:
    """A ``#sdy.mesh`` or ``#stablehlo.mesh`` attribute."""
    stated = cast("_MeshAttribute", dialect.MeshAttr(attribute))
    axes = [cast("_Axis", dialect.MeshAxisAttr(axis)) for axis in stated.axes]
    listed = stated.device_ids
    ids = () if listed is None else tuple(np.array(listed).astype(np.int64).reshape(-1).tolist())
    return Mesh(tuple((axis.name, axis.size) for axis in axes), ids)
