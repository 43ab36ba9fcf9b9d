"""Collectives, permutations and point-to-point messages of HLO: groups in global device ids, payloads,
links.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hespas.converters.hlo.attributes import backend_config, frontend_pairs, int_rows, integer, is_true, names
from hespas.converters.hlo.emit import Emitter
from hespas.converters.hlo.groups import Mesh, header_meshes, parse_groups
from hespas.converters.hlo.module import Computation
from hespas.converters.hlo.program import Program, base_opcode
from hespas.converters.replica_groups import IdMode, group_mode, left_out, normalise_groups, normalise_pairs
from hespas.costs import COLLECTIVE_KINDS, canonical_name, payload
from hespas.graph import NodeKind, Permutation, Severity
from hespas.graph.errors import FormatError

__all__ = ["Communication", "communication_kind"]

_Result = TypeVar("_Result")
_KINDS: dict[str, NodeKind] = {
    "collective-permute": NodeKind.PERMUTE,
    "send": NodeKind.SEND,
    "recv": NodeKind.RECV,
}
_DEVICES_HINT = "state the number of devices the program was compiled for with --num-devices"


def communication_kind(opcode: str) -> NodeKind | None:
    """The node kind of an operation that talks to other devices, None for any other and for ``-done``."""
    base, suffix = base_opcode(opcode)
    if suffix not in {"", "-start"}:
        return None
    if base in _KINDS:
        return _KINDS[base]
    return NodeKind.COLLECTIVE if canonical_name(base) in COLLECTIVE_KINDS else None


@dataclass(frozen=True, slots=True)
class _Group:
    """One resolved ``replica_groups`` of a collective."""

    row: int
    size: int


class Communication:
    """Writes the collective and point-to-point rows of nodes; each distinct group spelling is resolved
    once.
    """

    def __init__(self, emitter: Emitter, num_replicas: int, num_partitions: int) -> None:
        """Set up for a program of ``num_replicas`` x ``num_partitions`` devices."""
        self.emitter = emitter
        self.num_replicas = num_replicas
        self.num_partitions = num_partitions
        self._groups: dict[tuple[str | None, IdMode], _Group] = {}
        self._meshes: dict[str, Mesh] | None = None

    @property
    def num_devices(self) -> int:
        """Devices of the program."""
        return self.num_replicas * self.num_partitions

    def annotate(
        self, node: int, place: tuple[Computation, int], operand_rows: tuple[int, ...], result_row: int
    ) -> None:
        """Add the side-table row of a communicating node made from the instruction at ``place``."""
        base, _ = base_opcode(place[0].opcodes[place[1]])
        if base in {"send", "recv"}:
            self._message(node, place, operand_rows, result_row)
        elif base == "collective-permute":
            self._permute(node, place, operand_rows)
        else:
            self._collective(node, place, operand_rows, result_row)
        if backend_config(place[0].attributes[place[1]]).synchronous:
            self.emitter.findings.add(
                "hlo.synchronous-collective",
                base,
                place,
                "asynchronous in form only: nothing overlaps with it",
                Severity.INFO,
            )

    def _collective(
        self, node: int, place: tuple[Computation, int], operand_rows: tuple[int, ...], result_row: int
    ) -> None:
        computation, index = place
        attributes = computation.attributes[index]
        base, _ = base_opcode(computation.opcodes[index])
        name = canonical_name(base)
        kind = COLLECTIVE_KINDS[name]
        channel = self._channel(place)
        flattened = is_true(attributes.get("use_global_device_ids"))
        mode = self._checked(place, lambda: group_mode(name, channel, use_global_device_ids=flattened))
        group = self._group(place, attributes.get("replica_groups"), mode)
        program = self.emitter.program
        operand_bytes, result_bytes = _total(program, operand_rows), _total(program, (result_row,))
        sizes = payload(kind, operand_bytes, result_bytes, group.size)
        self.emitter.builder.add_collective(
            node,
            kind,
            group_set=group.row,
            comm_bytes=sizes.comm_bytes,
            operand_bytes=operand_bytes,
            result_bytes=result_bytes,
            channel=channel,
            reduction=self._reduction(place),
        )
        if sizes.is_bound:
            self.emitter.findings.add(
                "hlo.bounded-collective",
                base,
                place,
                "sizes are run-time values; the result buffer bounds them",
            )

    def _reduction(self, place: tuple[Computation, int]) -> str:
        named = names(place[0].attributes[place[1]].get("to_apply"))
        body = self.emitter.program.bodies.get(named[0]) if named else None
        return body.name if body is not None else ""

    def _group(self, place: tuple[Computation, int], text: str | None, mode: IdMode) -> _Group:
        key = (text, mode)
        found = self._groups.get(key)
        if found is not None:
            return found
        devices, meshes = self.num_devices, self._header_meshes(place)
        written = self._checked(place, lambda: parse_groups(text, devices, meshes))
        groups = self._checked(
            place, lambda: normalise_groups(written, mode, self.num_replicas, self.num_partitions)
        )
        idle = left_out(groups, devices)
        if idle:
            self.emitter.findings.add(
                "hlo.devices-left-out",
                "",
                place,
                f"{idle} of {devices} devices are in no group of this collective",
            )
        found = _Group(self.emitter.builder.group_set(groups), groups.group_size)
        self._groups[key] = found
        return found

    def _header_meshes(self, place: tuple[Computation, int]) -> dict[str, Mesh]:
        if self._meshes is None:
            header = self.emitter.program.module.attributes
            self._meshes = self._checked(place, lambda: header_meshes(header))
        return self._meshes

    def _permute(self, node: int, place: tuple[Computation, int], operand_rows: tuple[int, ...]) -> None:
        computation, index = place
        channel = self._channel(place)
        mode = group_mode("collective_permute", channel, use_global_device_ids=False)
        pairs = self._pairs(place, computation.attributes[index].get("source_target_pairs"), mode)
        self.emitter.builder.add_p2p(
            node,
            permutation=-1 if pairs is None else self.emitter.builder.permutation(pairs),
            comm_bytes=_total(self.emitter.program, operand_rows),
            tag=channel,
        )

    def _message(
        self, node: int, place: tuple[Computation, int], operand_rows: tuple[int, ...], result_row: int
    ) -> None:
        """``send`` (data, token) and ``recv`` (token): the message is the first operand, or the result."""
        computation, index = place
        attributes = computation.attributes[index]
        program = self.emitter.program
        is_send = computation.opcodes[index].startswith("send")
        if is_send and not operand_rows:
            raise program.error(computation, index, "expected the data it sends")
        row = operand_rows[0] if is_send else result_row
        host = is_true(attributes.get("is_host_transfer"))
        mode = IdMode.CROSS_PARTITION if self.num_partitions > 1 else IdMode.CROSS_REPLICA
        pairs = None if host else self._pairs(place, frontend_pairs(attributes), mode)
        if pairs is None and not host:
            self.emitter.findings.add(
                "hlo.unknown-peer", "", place, "the program does not say who the peer is"
            )
        self.emitter.builder.add_p2p(
            node,
            permutation=-1 if pairs is None else self.emitter.builder.permutation(pairs),
            comm_bytes=_total(program, (row,)),
            tag=self._channel(place),
            host=host,
        )

    def _pairs(self, place: tuple[Computation, int], text: str | None, mode: IdMode) -> Permutation | None:
        if text is None:
            return None

        def resolve() -> Permutation:
            rows = int_rows(text)
            if any(len(row) != 2 for row in rows):
                raise ValueError(f"expected pairs such as {{{{0,1}},{{1,2}}}}, found {text[:60]!r}")
            pairs = [(row[0], row[1]) for row in rows]
            return normalise_pairs(pairs, mode, self.num_replicas, self.num_partitions)

        return self._checked(place, resolve)

    def _channel(self, place: tuple[Computation, int]) -> int:
        text = place[0].attributes[place[1]].get("channel_id")
        return -1 if text is None else self._checked(place, lambda: integer(text))

    def _checked(self, place: tuple[Computation, int], make: Callable[[], _Result]) -> _Result:
        """What ``make`` returns; its ``ValueError`` becomes an error that names the instruction."""
        try:
            return make()
        except ValueError as error:
            raise self._error(place, str(error)) from error

    def _error(self, place: tuple[Computation, int], message: str) -> FormatError:
        stated = {"num_partitions", "replica_count"} & set(self.emitter.program.module.attributes)
        return self.emitter.program.error(*place, message, None if stated else _DEVICES_HINT)


def _total(program: Program, rows: tuple[int, ...]) -> float:
    """Bytes of all arrays; tokens count nothing."""
    return sum(tensor.bytes for row in rows for tensor in program.tensors(row))
