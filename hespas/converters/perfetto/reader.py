"""A Perfetto trace as a profile: slices of device tracks and stages of GPUs are its events.

A track is a device's where its name, or that of what it stands under, says so (``GPU``, ``stream``,
``queue``, ...) and its process is not called ``host``; the other tracks are host operations. Where no track
says it is a device, all are taken for one. Times are ns of the trace's clock.
"""

from __future__ import annotations

from pathlib import Path

from hespas.converters.format import ReadOptions
from hespas.converters.perfetto.clocks import Clocks
from hespas.converters.perfetto.events import EventColumns
from hespas.converters.perfetto.packets import Packet, Sequence, packets, text
from hespas.converters.perfetto.places import Descriptions
from hespas.converters.perfetto.profile import TraceFacts, profile_of
from hespas.converters.perfetto.wire import BYTES, VARINT, WireError, fields, signed
from hespas.files.source import read_bytes
from hespas.graph import Diagnostics, Profile
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.schemas.perfetto.tables import AttributeField, PacketField, ThreadField

__all__ = ["read_perfetto"]

_ATTRIBUTE = 1
_EVERY = 1 << 14


def read_perfetto(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Profile:
    """Read a trace. Raises ``FormatError`` with the byte of what makes no sense, ``UnsupportedError`` for
    packets compressed with zstd. Memory is that of the file and of its columns.
    """
    data = read_bytes(path, options.max_bytes)
    reader = _Reader()
    try:
        for count, packet in enumerate(packets(data)):
            reader.take(packet)
            if options.progress and not count % _EVERY:
                options.progress(packet.start, len(data))
    except WireError as error:
        raise FormatError(
            f"no Perfetto trace: {error}", path=str(path), position=f"byte {error.position}",
            hint="was the recording interrupted? record it again",
        ) from error  # fmt: skip
    except UnsupportedError as error:
        error.path = str(path)
        raise
    facts = TraceFacts(path, reader.columns, reader.descriptions, reader.attributes)
    reader.report(diagnostics, str(path))
    return profile_of(facts, diagnostics)


class _Reader:
    """Sorts packets by what they hold."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.columns = EventColumns(self.clocks)
        self.descriptions = Descriptions()
        self.attributes: dict[str, str] = {}
        self.lost = 0
        self._sequences: dict[int, Sequence] = {}

    def take(self, packet: Packet) -> None:
        """Use one packet."""
        number = packet.number(PacketField.TRUSTED_PACKET_SEQUENCE_ID)
        sequence = self._sequences.get(number)
        if sequence is None:
            sequence = self._sequences[number] = Sequence(number)
        usable = sequence.take(packet)
        for kind, start, end in packet.messages:
            match kind:
                case PacketField.CLOCK_SNAPSHOT:
                    self.clocks.snapshot(number, packet.data, start, end)
                case PacketField.TRACK_EVENT | PacketField.GPU_RENDER_STAGE_EVENT if not usable:
                    self.lost += 1
                case PacketField.TRACK_EVENT:
                    self.columns.track_event(packet, sequence, start, end)
                case PacketField.GPU_RENDER_STAGE_EVENT:
                    self.columns.stage(packet, sequence, start, end)
                case PacketField.TRACE_ATTRIBUTES:
                    self._attributes(packet.data, start, end)
                case PacketField.THREAD_DESCRIPTOR:
                    self._reference(sequence, packet.data, start, end)
                case _:
                    self.descriptions.add(kind, packet.data, start, end)

    @staticmethod
    def _reference(sequence: Sequence, data: bytes, start: int, end: int) -> None:
        """The time from which older traces count."""
        for number, wire, value, _ in fields(data, start, end):
            if number == ThreadField.REFERENCE_TIMESTAMP_US and wire == VARINT:
                sequence.delta_us = signed(value)

    def _attributes(self, data: bytes, start: int, end: int) -> None:
        for number, wire, value, after in fields(data, start, end):
            if number != _ATTRIBUTE or wire != BYTES:
                continue
            key, told = "", ""
            for inner, kind, place, behind in fields(data, value, after):
                if inner == AttributeField.KEY and kind == BYTES:
                    key = text(data, place, behind)
                elif inner == AttributeField.STRING_VALUE and kind == BYTES:
                    told = text(data, place, behind)
            self.attributes[key] = told

    def report(self, diagnostics: Diagnostics, path: str) -> None:
        """Say what could not be used."""
        diagnostics.warning(
            "perfetto.lost-packets", path,
            "events refer to packets that the recorder dropped, and are left out",
            count=self.lost,
        )  # fmt: skip
        diagnostics.warning(
            "perfetto.unresolved-name", path, "texts that events refer to are not in the trace, and empty",
            count=self.columns.unresolved,
        )  # fmt: skip
        diagnostics.warning(
            "perfetto.unknown-clock", path,
            "times are of clocks that no snapshot mentions, and are taken for the trace's own",
            count=self.clocks.unknown,
        )  # fmt: skip
        diagnostics.info(
            "perfetto.other-events", path, "counters and other events without duration are left out",
            count=self.columns.other,
        )  # fmt: skip
