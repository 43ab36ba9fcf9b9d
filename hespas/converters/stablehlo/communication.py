"""Reader of collectives and point-to-point operations: device groups, pairs and payloads from attributes.

Groups keep the kind of ids that the program uses (replicas or partitions) until the numbers of replicas and
partitions are known. Then :func:`hespas.converters.replica_groups.normalise_groups` converts them to global
device ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from hespas.converters.replica_groups import (
    MAX_DEVICES,
    IdMode,
    dense_groups,
    group_mode,
    highest_id,
    mesh_groups,
)
from hespas.converters.stablehlo.mlir import (
    Bindings,
    MlirAttribute,
    MlirOperation,
    int_array,
    is_true,
    place_of,
    quoted,
    string_in,
)
from hespas.converters.stablehlo.types import TypeInfo
from hespas.costs.payloads import COLLECTIVE_KINDS, payload
from hespas.graph import CollectiveKind, GroupSet, NodeKind
from hespas.graph.errors import FormatError, UsageError
from hespas.graph.mesh import Mesh

if TYPE_CHECKING:
    from jaxlib.mlir._mlir_libs._sdy import MeshAttr, MeshAxisAttr
    from jaxlib.mlir._mlir_libs._stablehlo import AxisRefAttr, SubAxisInfoAttr

__all__ = [
    "COMMUNICATION",
    "Communication",
    "CommunicationReader",
    "DeviceMesh",
    "ProgramCollective",
    "ProgramMessage",
    "read_mesh",
]

COMMUNICATION: frozenset[str] = frozenset({*COLLECTIVE_KINDS, "collective_permute", "send", "recv"})
"""Canonical names of operations that communicate with other devices."""

_COMMUNICATION_ATTRIBUTES = (
    "replica_groups",
    "source_target_pairs",
    "channel_handle",
    "use_global_device_ids",
    "is_host_transfer",
)
_PairList = tuple[tuple[int, int], ...]


class ProgramCollective(NamedTuple):
    """Collective of a StableHLO program. ``groups`` have the ids in the program, and ``mode`` is the meaning
    of these ids. ``groups`` None means one group of all devices.
    """

    kind: CollectiveKind
    groups: GroupSet | None
    mode: IdMode
    channel: int
    reduction: str
    operand_bytes: float
    result_bytes: float

    def comm_bytes(self, group_size: int) -> float:
        """Return the size of the collective as Chakra traces define it [bytes]."""
        return payload(self.kind, self.operand_bytes, self.result_bytes, group_size).comm_bytes


class ProgramMessage(NamedTuple):
    """Permute, send or receive with the ids that the program states. ``pairs`` are (source, target); None
    means that the peer is not stated.

    ``mode`` is the meaning of these ids. None means partitions, or replicas if there is one partition, as XLA
    interprets ``send`` and ``recv``.
    """

    kind: NodeKind
    pairs: _PairList | None
    mode: IdMode | None
    tag: int
    comm_bytes: float
    is_host: bool = False


Communication = ProgramCollective | ProgramMessage


class DeviceMesh(NamedTuple):
    """Mesh of a program. ``device_ids`` are its devices (empty: 0, 1, 2, ...)."""

    mesh: Mesh
    device_ids: tuple[int, ...] = ()


class CommunicationReader:
    """Reader of the communications of one module; equal group attributes are decoded once."""

    def __init__(self, bindings: Bindings, meshes: Mapping[str, DeviceMesh]) -> None:
        self._bindings = bindings
        self._meshes = meshes
        self._groups: dict[MlirAttribute, GroupSet | None] = {}
        self._rows_by_key: dict[tuple[object, ...], int] = {}
        self.rows: list[Communication] = []

    def row(
        self,
        canonical: str,
        op: MlirOperation,
        operands: tuple[TypeInfo, ...],
        results: tuple[TypeInfo, ...],
        reduction: str,
    ) -> int:
        """Return the index in ``rows`` of the communication of an operation. Operations with equal
        communication have the same row. ``canonical`` is the operation's name in the cost table.

        Raises ``FormatError`` for contradictory attributes.
        """
        attributes = tuple([op.attributes.get(name) for name in _COMMUNICATION_ATTRIBUTES])
        key = (canonical, attributes, operands, results, reduction)
        row = self._rows_by_key.get(key)
        if row is not None:
            return row
        sizes = [
            sum(tensor.bytes for info in infos for tensor in info.tensors) for infos in (operands, results)
        ]
        try:
            communication = self._read(canonical, op, sizes[0], sizes[1], reduction)
            if isinstance(communication, ProgramMessage):
                highest = max((rank for pair in communication.pairs or () for rank in pair), default=0)
            else:
                highest = highest_id(communication.groups)
            if highest >= MAX_DEVICES:
                raise ValueError(
                    f"device id {highest:,} is out of range (at most {MAX_DEVICES:,} devices are read)"
                )
        except ValueError as error:
            raise FormatError(
                f"{op.name}: {error}",
                position=place_of(str(op.location)),
                hint="correct the groups or pairs of this operation",
            ) from error
        self.rows.append(communication)
        row = self._rows_by_key[key] = len(self.rows) - 1
        return row

    def _read(
        self, canonical: str, op: MlirOperation, operand_bytes: float, result_bytes: float, reduction: str
    ) -> Communication:
        handle = op.attributes.get("channel_handle")
        if handle is None:
            channel = 0
        else:
            channel = int(self._bindings.dialect_of(op.name).ChannelHandle(handle).handle)
        tag = channel if channel > 0 else -1
        if canonical in {"send", "recv"}:
            kind, size = (
                (NodeKind.SEND, operand_bytes) if canonical == "send" else (NodeKind.RECV, result_bytes)
            )
            return ProgramMessage(kind, self._pairs(op), None, tag, size, is_true(op, "is_host_transfer"))
        use_global = is_true(op, "use_global_device_ids")
        mode = group_mode(canonical, channel, use_global_device_ids=use_global)
        if canonical == "collective_permute":
            return ProgramMessage(NodeKind.PERMUTE, self._pairs(op) or (), mode, tag, operand_bytes)
        attribute = op.attributes.get("replica_groups")
        groups: GroupSet | None = None
        if attribute is not None:
            is_mesh = bool(self._bindings.stablehlo.ReplicaGroupMeshAxesAttr.isinstance(attribute))
            if attribute not in self._groups:
                self._groups[attribute] = (
                    self._mesh_axes(attribute) if is_mesh else dense_groups(int_array(attribute))
                )
            groups = self._groups[attribute]
            if is_mesh:
                mode = IdMode.FLATTENED_IDS
        return ProgramCollective(
            COLLECTIVE_KINDS[canonical], groups, mode, tag, reduction, operand_bytes, result_bytes
        )

    def _pairs(self, op: MlirOperation) -> _PairList | None:
        attribute = op.attributes.get("source_target_pairs")
        if attribute is None:
            return None
        rows = int_array(attribute)
        if rows.size == 0:
            return None
        if rows.ndim != 2 or rows.shape[1] != 2:
            raise ValueError(f"source_target_pairs has shape {rows.shape}, not (pairs, 2)")
        return tuple((int(source), int(target)) for source, target in rows.tolist())

    def _mesh_axes(self, attribute: MlirAttribute) -> GroupSet:
        """Return the groups of a ``replica_group_mesh_axes`` attribute. The attribute lists mesh axes; the
        devices of a group differ only along these axes.
        """
        dialect = self._bindings.stablehlo
        decoded = dialect.ReplicaGroupMeshAxesAttr(attribute)
        is_inline = not str(decoded.mesh).startswith("@")
        found = read_mesh(decoded.mesh, dialect) if is_inline else self._meshes.get(string_in(decoded.mesh))
        if found is None:
            raise ValueError(f"the module has no mesh {quoted(str(decoded.mesh))}")
        mesh, device_ids = found
        axes: list[tuple[int, int, int]] = []
        for axis in cast("Sequence[MlirAttribute]", decoded.axes):
            reference = cast("AxisRefAttr", dialect.AxisRefAttr(axis))
            if reference.name not in mesh.names:
                raise ValueError(f"the mesh has no axis {reference.name!r}")
            position = mesh.names.index(reference.name)
            part = reference.sub_axis_info
            sub = None if part is None else cast("SubAxisInfoAttr", dialect.SubAxisInfoAttr(part))
            pre, size = (1, mesh.sizes[position]) if sub is None else (sub.pre_size, sub.size)
            axes.append((position, pre, size))
        return mesh_groups(mesh.sizes, axes, np.array(device_ids, np.int64) if device_ids else None)


def read_mesh(attribute: MlirAttribute, dialect: ModuleType) -> DeviceMesh:
    """Return the mesh of a ``#sdy.mesh`` or ``#stablehlo.mesh`` attribute. Raises ``FormatError``."""
    decoded = cast("MeshAttr", dialect.MeshAttr(attribute))
    axes = [cast("MeshAxisAttr", dialect.MeshAxisAttr(axis)) for axis in decoded.axes]
    listed = cast("object", decoded.device_ids)  # None in StableHLO's dialect without explicit ids
    ids = () if listed is None else tuple(np.array(listed).astype(np.int64).reshape(-1).tolist())
    try:
        return DeviceMesh(Mesh(tuple(axis.name for axis in axes), tuple(axis.size for axis in axes)), ids)
    except UsageError as error:
        raise FormatError(error.message, hint="correct the axes of the mesh") from error
