"""Events read block by block are the events of the file, wherever a block ends and whatever names hold."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hespas.converters.chrome_events import EventStream, event_times, likely_cut
from hespas.files.json_text import array_cut
from hespas.graph.errors import FormatError

_NAMES = st.text(st.sampled_from('ab{}[],:"\\ \n\té\U0001f600'), max_size=12)
_ARGS = st.dictionaries(_NAMES, st.one_of(_NAMES, st.integers(), st.lists(st.dictionaries(_NAMES, _NAMES))))
_EVENTS = st.lists(st.fixed_dictionaries({"ph": st.just("X"), "name": _NAMES, "args": _ARGS}), max_size=8)


def read(path: Path, block_bytes: int) -> tuple[list[str], bytes]:
    stream = EventStream(path, 1 << 30, block_bytes)
    names = [event.name for events, _ in stream.blocks() for event in events]
    return names, stream.header


@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=60,
)
@given(events=_EVENTS, indent=st.sampled_from([None, 1]), block=st.integers(1, 400), bare=st.booleans())
def test_events_do_not_depend_on_where_blocks_end(
    events: list[dict[str, object]], indent: int | None, block: int, bare: bool, tmp_path: Path
) -> None:
    document: object = events if bare else {"schemaVersion": 1, "traceEvents": events, "traceName": "a]}"}
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document, indent=indent), encoding="utf-8")
    names, header = read(path, block)
    assert names == [event["name"] for event in events]
    rest = json.loads(header)
    assert rest == ({} if bare else {"schemaVersion": 1, "traceEvents": [], "traceName": "a]}"})


@given(st.lists(st.dictionaries(_NAMES, _NAMES, max_size=3), min_size=1, max_size=5))
def test_brackets_in_strings_are_no_brackets(elements: list[dict[str, str]]) -> None:
    text = json.dumps(elements)[1:].encode()
    found = array_cut(text + b", 5]}")
    assert found.closed == len(text) - 1
    assert json.loads(b"[" + text[: found.behind] + b"]") == elements


def test_a_block_may_end_between_an_event_and_its_comma(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('[{"name": "a"}, {"name": "b"}]')
    for block in range(1, 31):
        assert read(path, block)[0] == ["a", "b"]


def test_a_likely_cut_stands_before_a_separator() -> None:
    assert likely_cut(b'{"a": 1} , {"b": {') == 8
    assert likely_cut(b'{"a": 1}') == 0
    assert likely_cut(b"") == 0


def test_a_gzipped_trace_and_one_with_broken_text(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [{"name": "a\xff"}, {"name": "b"}]}'))
    stream = EventStream(path, 1 << 30)
    assert [event.name for events, _ in stream.blocks() for event in events] == ["a\ufffd", "b"]
    assert stream.repaired_blocks == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"traceEvents": [{"name": "a"}, {"na', "not closed"),
        (b'{"traceEvents": [{"name": "a"}', "not closed"),
        (b'{"traceEvents": [{"name": 5}]}', "no trace event"),
        (b'{"traceEvents": [{"name": "a"}, 7]}', "no trace event"),
        (b'{"events": []}', "there is no list 'traceEvents'"),
        (b'[{"name": "a"}] x', "text behind the list"),
        (gzip.compress(b'{"traceEvents": [{"name": "a"}]}', mtime=0)[:-9], "ends early"),
        (b"\x1f\x8b junk that is no gzip", "cannot be read"),
        (b"", "there is no list"),
    ],
)
def test_what_is_no_trace_is_refused_with_a_position(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=message) as caught:
        read(path, 1 << 20)
    assert str(caught.value.position).startswith("byte ")
    assert caught.value.hint


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (80 << 20)))
    with pytest.raises(FormatError, match="decompresses to more than"):
        read(path, 8 << 20)


def test_times_keep_their_nanoseconds_at_epoch_scale(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    times = ["1661203462598738.125", "4354796305926.358", '"17.5"', "3", "0.0005", "1e3"]
    events = ", ".join(f'{{"ph": "X", "ts": {time}, "dur": 0.001}}' for time in times)
    path.write_text(f'{{"traceEvents": [{events}]}}')
    blocks = list(EventStream(path, 1 << 30).blocks())
    columns = [event_times(found, array, range(len(found))) for found, array in blocks]
    start_ns, duration_ns = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    assert start_ns.tolist() == [1661203462598738125, 4354796305926358, 17500, 3000, 0, 1000000]
    assert duration_ns.tolist() == [1] * len(times)
    few, _ = event_times(*blocks[0], [3])
    assert few.tolist() == [3000]


@given(st.lists(st.integers(0, (1 << 62) // 1000), min_size=1, max_size=20))
def test_any_time_in_whole_nanoseconds_is_exact(values_ns: list[int]) -> None:
    from hespas.converters.chrome_events import TraceEvent, nanoseconds

    texts = [f"{value // 1000}.{value % 1000:03d}" for value in values_ns]
    assert nanoseconds([text.encode() for text in texts]).tolist() == values_ns
    events = [TraceEvent(ts=float(text), dur=0) for text in texts]
    array = b"[" + b",".join(b'{"ts":%s,"dur":0}' % text.encode() for text in texts) + b"]"
    start_ns, _ = event_times(events, array, range(len(events)))
    assert np.array_equal(start_ns, values_ns)


def _times(path: Path, text: str) -> tuple[list[int], list[int]]:
    path.write_text(text)
    stream = EventStream(path, 1 << 30, 64)
    starts: list[int] = []
    durations: list[int] = []
    before = 0
    for found, array in stream.blocks():
        start_ns, duration_ns = event_times(found, array, range(len(found)), path=str(path), before=before)
        before += len(found)
        starts += start_ns.tolist()
        durations += duration_ns.tolist()
    return starts, durations


@pytest.mark.parametrize(
    "time", ['"1e999999999"', '"1e99999999"', '"-1e5000"', '"9e15"', '"' + "9" * 5000 + '.000"']
)
def test_a_time_beyond_64_bits_is_refused_with_its_event_and_field(time: str, tmp_path: Path) -> None:
    sound = '{"ph": "X", "ts": 1, "dur": 1}'
    with pytest.raises(FormatError, match=r"64 bits|no time") as caught:
        _times(tmp_path / "t.json", f'[{sound}, {sound}, {{"name": "gemm", "ts": {time}, "dur": 1e15}}]')
    assert caught.value.position in {"event 3, field 'ts'", "event 3, field 'dur'"}
    assert "gemm" in caught.value.message


@pytest.mark.parametrize(
    ("dur", "shown"), [("null", "null is no time"), ('"\u00e9"', "is no time"), ('"-Infinity"', "-Infinity")]
)
def test_a_bad_duration_is_told_as_one(dur: str, shown: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=shown) as caught:
        _times(
            tmp_path / "t.json",
            f'[{{"name": "a", "ts": 5, "dur": 1}}, {{"name": "gemm", "ts": 5, "dur": {dur}}}]',
        )
    assert caught.value.position == "event 2, field 'dur'"
    assert "b'" not in caught.value.message


def test_an_infinite_time_warns_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="Infinity"):  # warnings are errors here
        _times(tmp_path / "t.json", '[{"name": "gemm", "ts": "Infinity", "dur": "Infinity"}]')


def test_start_and_duration_that_each_fit_and_do_not_end_are_refused(tmp_path: Path) -> None:
    largest = (1 << 63) // 1000 - 1
    with pytest.raises(FormatError, match="ends too late") as caught:
        _times(tmp_path / "t.json", f'[{{"name": "gemm", "ts": {largest}, "dur": {largest}}}]')
    assert caught.value.position == "event 1, field 'dur'"
    assert _times(tmp_path / "t.json", f'[{{"ts": -{largest}, "dur": {largest}}}]')[1] == [largest * 1000]


@pytest.mark.parametrize(
    "text",
    [
        '{"traceEvents": [], "a": [], "traceEvents": [{"name": "x"}]}',
        '{"traceEvents": [{"name": "x"}], "traceEvents": []}',
        '{"traceEvents": [{"name": "x"}], "traceEvents" : null}',
        '{"meta": {"traceEvents": []}, "traceEvents": [{"name": "x"}]}',
    ],
)
def test_a_second_list_of_events_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(FormatError, match="stands twice") as caught:
        read(path, 1 << 20)
    at = int((caught.value.position or "").removeprefix("byte "))
    assert text[at:].startswith('"traceEvents"')


def test_the_name_of_the_list_elsewhere_is_no_second_list(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    document = {"note": '"traceEvents": [', "traceEvents": [{"name": "x"}], "o": {"traceEvents": 1}}
    path.write_text(json.dumps(document))
    assert read(path, 1 << 20)[0] == ["x"]


@pytest.mark.parametrize("block", [40, 1 << 20])
def test_half_a_surrogate_pair_is_replaced_and_counted(block: int, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    names = ["a\ud800", "\udc00\ud83d\ude00", "\\ud800", "plain", "\ud800\\", "\U0001f600"]
    path.write_text(json.dumps({"traceEvents": [{"name": each} for each in names], "note": "\udfff"}))
    stream = EventStream(path, 1 << 30, block)
    found = [event.name for events, _ in stream.blocks() for event in events]
    assert found == ["a\ufffd", "\ufffd\U0001f600", "\\ud800", "plain", "\ufffd\\", "\U0001f600"]
    assert stream.repaired_blocks >= 1
    assert json.loads(stream.header)["note"] == "\ufffd"
