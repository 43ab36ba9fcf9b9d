"""Events read block by block are the events of the file, wherever a block ends and whatever names hold."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.converters.chrome_events import EventStream, event_times, likely_cut
from hespas.files.documents import array_cut
from hespas.graph.errors import FormatError

_NAMES = st.text(st.sampled_from('ab{}[],:"\\ \n\té\U0001f600'), max_size=12)
_ARGS = st.dictionaries(_NAMES, st.one_of(_NAMES, st.integers(), st.lists(st.dictionaries(_NAMES, _NAMES))))
_EVENTS = st.lists(st.fixed_dictionaries({"ph": st.just("X"), "name": _NAMES, "args": _ARGS}), max_size=8)


def read(path: Path, block_bytes: int) -> tuple[list[str], bytes]:
    stream = EventStream(path, 1 << 30, block_bytes)
    names = [event.name for events, _ in stream.blocks() for event in events]
    return names, stream.header


@settings(max_examples=20)
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
    assert +stream.repairs == {"invalid-utf8": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"traceEvents": [{"name": "a"}, {"na', "not closed"),
        (b'{"traceEvents": [{"name": "a"}', "not closed"),
        (b'{"traceEvents": [{"name": "a"}, 7]}', "not a trace event"),
        (b'{"events": []}', "has no list 'traceEvents'"),
        (b'[{"name": "a"}] x', "text after the list"),
        (gzip.compress(b'{"traceEvents": [{"name": "a"}]}', mtime=0)[:-9], "ends early"),
        (b"\x1f\x8b junk that is no gzip", "cannot be read"),
        (b"", "has no list"),
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
    start_ns = np.concatenate([part.start_ns for part in columns])
    duration_ns = np.concatenate([part.duration_ns for part in columns])
    assert start_ns.tolist() == [1661203462598738125, 4354796305926358, 17500, 3000, 0, 1000000]
    assert duration_ns.tolist() == [1] * len(times)
    assert event_times(*blocks[0], [3]).start_ns.tolist() == [3000]


@given(st.lists(st.integers(0, (1 << 62) // 1000), min_size=1, max_size=20))
def test_any_time_in_whole_nanoseconds_is_exact(values_ns: list[int]) -> None:
    from hespas.converters.chrome_events import TraceEvent, nanoseconds

    texts = [f"{value // 1000}.{value % 1000:03d}" for value in values_ns]
    assert nanoseconds([text.encode() for text in texts]).tolist() == values_ns
    events = [TraceEvent(ts=float(text), dur=0) for text in texts]
    array = b"[" + b",".join(b'{"ts":%s,"dur":0}' % text.encode() for text in texts) + b"]"
    start_ns = event_times(events, array, range(len(events))).start_ns
    assert np.array_equal(start_ns, values_ns)


def _times(path: Path, text: str) -> tuple[list[int], list[int]]:
    path.write_text(text)
    stream = EventStream(path, 1 << 30, 64)
    starts: list[int] = []
    durations: list[int] = []
    before = 0
    for found, array in stream.blocks():
        times = event_times(found, array, range(len(found)), path=str(path), before=before)
        before += len(found)
        starts += times.start_ns.tolist()
        durations += times.duration_ns.tolist()
        durations[-len(found) :] = [
            -1 if row in times.overflowed else each for row, each in enumerate(durations[-len(found) :])
        ]
    return starts, durations


@pytest.mark.parametrize(
    "dur", ["null", "1.8446744073709552e16", '"18446744073709551.615"', "9223372036854775807", '"1e5000"']
)
def test_a_duration_that_overflowed_is_unknown(dur: str, tmp_path: Path) -> None:
    sound = '{"ph": "X", "ts": 1, "dur": 1}'
    text = f'[{sound}, {sound}, {{"name": "gemm", "ts": 1661203462598738.125, "dur": {dur}}}]'
    assert _times(tmp_path / "t.json", text) == ([1000, 1000, 1661203462598738125], [1000, 1000, -1])


@pytest.mark.parametrize(
    "time", ['"1e999999999"', '"1e99999999"', '"-1e5000"', '"9.3e15"', '"' + "9" * 5000 + '.000"']
)
def test_a_time_beyond_64_bits_is_refused_with_its_event_and_field(time: str, tmp_path: Path) -> None:
    sound = '{"ph": "X", "ts": 1, "dur": 1}'
    with pytest.raises(FormatError, match=r"64 bits|no time") as caught:
        _times(tmp_path / "t.json", f'[{sound}, {sound}, {{"name": "gemm", "ts": {time}, "dur": 1}}]')
    assert caught.value.position == "event 3, field 'ts'"
    assert "gemm" in caught.value.message


@pytest.mark.parametrize(("dur", "shown"), [('"\u00e9"', "is not a time"), ('"-Infinity"', "-Infinity")])
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


def test_start_and_duration_that_each_fit_and_do_not_end(tmp_path: Path) -> None:
    largest = (1 << 63) // 1000 - 1
    assert _times(tmp_path / "t.json", f'[{{"ts": {largest}, "dur": {largest}}}]') == ([largest * 1000], [-1])
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
    with pytest.raises(FormatError, match="occurs twice") as caught:
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
    assert stream.repairs["invalid-utf8"] >= 1
    assert json.loads(stream.header)["note"] == "\ufffd"


def _mended(
    tmp_path: Path, content: bytes, *, recover: bool = False, block: int = 64
) -> tuple[list[str], dict[str, int]]:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    stream = EventStream(path, 1 << 20, block, recover=recover)
    names = [event.name for events, _ in stream.blocks() for event in events]
    return names, dict(+stream.repairs)


@pytest.mark.parametrize(
    ("event", "name", "repairs"),
    [
        (b'{"name": "a\n\x01"}', "a\n\x01", {"control-character": 2}),
        (b'{"name": "C:\\path\\q\\\\"}', "C:\\path\\q\\", {"invalid-escape": 2}),
        (b'{"name": "NaN", "args": {"a": NaN, "b": [-Infinity, "Infinity"]}}', "NaN", {"no-number": 2}),
        (b'{"name": null, "ts": 1}', "", {"odd-field": 1}),
        (b'{"name": "b", "cat": 5, "pid": [1]}', "b", {"odd-field": 1}),
        (b'{"name": "b", "args": null}', "b", {}),
        (b"null", "", {}),
    ],
)
@pytest.mark.parametrize("block", [8, 64, 1 << 20])
def test_what_json_does_not_allow_is_read_and_counted(
    event: bytes, name: str, repairs: dict[str, int], block: int, tmp_path: Path
) -> None:
    content = b'{"traceEvents": [{"name": "x"},\n' + event + b', {"name": "y"}], "of": "it"}'
    assert _mended(tmp_path, content, block=block) == (["x", name, "y"], repairs)


@pytest.mark.parametrize("block", [8, 64, 1 << 20])
def test_a_cut_file_is_recovered_to_the_byte(block: int, tmp_path: Path) -> None:
    whole = b'{"of": 1, "traceEvents": [{"name": "a"}, {"name": "b{,\\""}, {"name": "c"}], "o": {"x": 2}}'
    first = whole.index(b"[") + 1
    for cut in range(first, len(whole)):
        names, repairs = _mended(tmp_path, whole[:cut], recover=True, block=block)
        kept = whole[:cut].count(b'"}')
        assert names == ["a", 'b{,"', "c"][:kept]
        behind = whole.rfind(b'"}', 0, cut) + 2 if kept else first
        assert set(repairs) == {"cut"}
        if cut <= whole.index(b"]"):
            assert repairs["cut"] == max(len(whole[behind:cut].lstrip(b", ")), 1)


def test_a_cut_gzip_is_recovered(tmp_path: Path) -> None:
    events = b", ".join(b'{"name": "%d", "ts": %d}' % (number, number * 7919) for number in range(20_000))
    packed = gzip.compress(b'{"traceEvents": [' + events + b"]}", mtime=0)
    names, repairs = _mended(tmp_path, packed[: len(packed) // 2], recover=True, block=1 << 16)
    assert 5_000 < len(names) < 15_000
    assert names == [str(number) for number in range(len(names))]
    assert set(repairs) == {"cut"}
    with pytest.raises(FormatError, match="ends early") as caught:
        _mended(tmp_path, packed[: len(packed) // 2], block=1 << 16)
    assert "`recover` keeps the" in (caught.value.hint or "")


@pytest.mark.parametrize("block", [16, 1 << 20])
def test_what_makes_no_sense_is_left_out_to_recover_the_rest(block: int, tmp_path: Path) -> None:
    content = b'{"traceEvents": [{"name": "a"} {"name": "b"}, {"name" "c"}, 7, {"name": "d"}]}'
    with pytest.raises(FormatError, match="not a trace event"):
        _mended(tmp_path, content, block=block)
    names, repairs = _mended(tmp_path, content, recover=True, block=block)
    assert names == ["a", "b", "d"]
    assert repairs == {"broken-event": 2}
