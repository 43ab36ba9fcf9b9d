"""A clean copy of a trace of PyTorch's profiler: every whole event as it was written, and JSON that any tool
reads. What had to be mended is what the reader mends.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from hespas.converters.chrome_events import EventStream, TraceEvent, event_times
from hespas.converters.format import ReadOptions, WriteOptions
from hespas.files.streams import open_output
from hespas.graph import Diagnostics

__all__ = ["copy_kineto"]

_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NO_TIME = msgspec.Raw(b"0")


def copy_kineto(
    source: Path, destination: Path, reading: ReadOptions, writing: WriteOptions, diagnostics: Diagnostics
) -> None:
    """Write the events of ``source`` that are whole, once each, with what stands around their list.

    Events of all kinds are kept, also those that a profile has no place for. A duration that nobody knows is
    written as 0. Raises what the reader raises, and ``OutputError`` where the disk refuses.
    """
    stream = EventStream(source, reading.max_bytes, recover=reading.recover)
    copy = _Copy(stream, str(source))
    packed = (writing.name or destination.name).endswith(".gz")
    with open_output(destination, packed=packed) as output:
        output.write(b'{"traceEvents": [\n')
        separator = b""
        for block in copy.blocks():
            output.write(separator + block)
            separator = b",\n"
        output.write(b"\n]" + _behind(stream.header))
    findings = diagnostics.about(str(source), "kineto")
    findings.info("copied", "events were copied as they were written", copy.written)
    findings.info("copied-once", "events that stood in the file twice were copied once", copy.repeated)
    findings.info("no-events", "places of the list held no event and were not copied", copy.empty)


def _behind(header: bytes) -> bytes:
    """What follows the list of events: the other fields of the document."""
    fields = {key: raw for key, raw in _FIELDS.decode(header).items() if key != "traceEvents"}
    text = msgspec.json.encode(fields)
    return (b",\n" + text[1:] if fields else b"}") + b"\n"


class _Copy:
    """The texts of events, block by block; ``seen`` are those of work that takes time, which is done once."""

    def __init__(self, stream: EventStream, path: str) -> None:
        self.written = self.repeated = self.empty = 0
        self._stream = stream
        self._path = path
        self._seen: set[bytes] = set()

    def blocks(self) -> Iterator[bytes]:
        """Texts of events, joined; none of a block without any."""
        before = 0
        for events, array in self._stream.blocks():
            texts = list(map(bytes, _RAWS.decode(array)))
            self._without_overflows(events, array, texts, before)
            before += len(events)
            kept = [text for event, text in zip(events, texts, strict=True) if self._is_new(event, text)]
            self.written += len(kept)
            if kept:
                yield b",\n".join(kept)

    def _is_new(self, event: TraceEvent, text: bytes) -> bool:
        if text == b"{}":
            self.empty += 1
            return False
        if event.ph != "X" or not event.dur or event.args in (b"{}", b"null"):
            return True
        if text in self._seen:
            self.repeated += 1
            return False
        self._seen.add(text)
        return True

    def _without_overflows(
        self, events: list[TraceEvent], array: bytes, texts: list[bytes], before: int
    ) -> None:
        timed = [place for place, event in enumerate(events) if event.ph == "X" and event.ts is not None]
        times = event_times(events, array, timed, path=self._path, before=before)
        rows: list[int] = times.overflowed.tolist()
        for row in rows:
            texts[timed[row]] = msgspec.json.encode(_FIELDS.decode(texts[timed[row]]) | {"dur": _NO_TIME})
