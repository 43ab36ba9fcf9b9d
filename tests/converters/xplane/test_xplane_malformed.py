"""Truncated, damaged and hostile traces: rejected with a position, in little time and memory."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest

from hespas.converters.format import Format, ReadOptions
from hespas.converters.xplane import FORMAT, FORMAT_JSON
from hespas.converters.xplane.wire import Bytes, split
from hespas.files.wire import WireError
from hespas.graph import Diagnostics, Profile
from hespas.graph.errors import FormatError, HespasError

PROFILES = Path(__file__).parents[3] / "fixtures" / "profiles"
GPU = (PROFILES / "h100_streams.xplane.pb").read_bytes()
TPU = (PROFILES / "tpu_v4_megacore.xplane.pb").read_bytes()
TPU_JSON = gzip.decompress((PROFILES / "tpu_v4_megacore.trace.json.gz").read_bytes())


def attempt(data: bytes, path: Path, form: Format = FORMAT, *, recover: bool = False) -> Profile | None:
    path.write_bytes(data)
    assert form.read is not None
    try:
        value = form.read(path, ReadOptions(recover=recover), Diagnostics())
    except HespasError:
        return None
    assert isinstance(value, Profile)
    return value


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def whole(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


@pytest.mark.parametrize("recover", [False, True])
@pytest.mark.parametrize("field", [2, 3])  # offset, duration
def test_a_time_that_has_no_opposite_is_refused(field: int, recover: bool, tmp_path: Path) -> None:
    times = whole(field, 1 << 63) + whole(5 - field, 7)
    events = message(4, whole(1, 1) + times)
    line = whole(1, 1) + message(2, b"python") + whole(3, 5) + events + message(4, whole(1, 1))
    named = message(4, whole(1, 1) + message(2, whole(1, 1) + message(2, b"call")))
    space = message(1, message(2, b"/host:CPU") + message(3, line) + named)
    (tmp_path / "t.xplane.pb").write_bytes(space)
    assert FORMAT.read is not None
    with pytest.raises(FormatError, match="more than 26 days") as caught:
        FORMAT.read(tmp_path / "t.xplane.pb", ReadOptions(recover=recover), Diagnostics())
    assert "byte" in (caught.value.position or "")


@pytest.mark.parametrize("data", [GPU, TPU], ids=["gpu", "tpu"])
def test_a_cut_is_refused_unless_it_is_between_planes(data: bytes, tmp_path: Path) -> None:
    step = 9
    read = [size for size in range(1, len(data), step) if attempt(data[:size], tmp_path / "cut.pb")]
    assert len(read) < 4, "only where a plane or a text of the space ends"


def test_cut_json_is_refused(tmp_path: Path) -> None:
    for size in range(1, len(TPU_JSON) - 2, 37):
        assert attempt(TPU_JSON[:size], tmp_path / "cut.json", FORMAT_JSON) is None


@pytest.mark.parametrize(
    ("data", "form"), [(GPU, FORMAT), (TPU, FORMAT), (TPU_JSON, FORMAT_JSON)], ids=["gpu", "tpu", "json"]
)
def test_damaged_bytes_never_surprise(data: bytes, form: Format, tmp_path: Path) -> None:
    chance = random.Random(7)
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 8))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        attempt(bytes(damaged), tmp_path / "damaged", form)


def test_random_bytes_never_surprise(tmp_path: Path) -> None:
    chance = random.Random(8)
    for size in (1, 2, 3, 10, 100, 1000):
        for _ in range(30):
            attempt(chance.randbytes(size), tmp_path / "random")
            attempt(message(1, chance.randbytes(size)), tmp_path / "random")


def test_whole_planes_before_a_cut_can_be_had(tmp_path: Path) -> None:
    path = tmp_path / "cut.xplane.pb"
    assert attempt(TPU[:-100], path) is None
    profile = attempt(TPU[:-100], path, recover=True)
    assert profile is not None
    assert len(profile) == 18
    assert not [name for name in profile.attachments if name.startswith("hlo/")], "its plane was the last"


def test_the_byte_of_the_fault_is_told(tmp_path: Path) -> None:
    path = tmp_path / "cut.xplane.pb"
    path.write_bytes(message(1, whole(1, 2) + varint(3 << 3 | 2) + varint(900)))
    assert FORMAT.read is not None
    with pytest.raises(FormatError, match="reaches beyond") as caught:
        FORMAT.read(path, ReadOptions(), Diagnostics())
    assert caught.value.position == "byte 4"


def test_nothing_recorded_is_told(tmp_path: Path) -> None:
    path = tmp_path / "empty.xplane.pb"
    path.write_bytes(message(1, message(2, b"/host:CPU")))
    assert FORMAT.read is not None
    with pytest.raises(FormatError, match="neither device events nor host operations"):
        FORMAT.read(path, ReadOptions(), Diagnostics())


@pytest.mark.parametrize("where", ["timestamp", "offset", "duration"])
def test_times_that_do_not_fit_are_refused(where: str, tmp_path: Path) -> None:
    huge = (1 << 63) - 1
    far = whole(3, huge) if where == "timestamp" else b""
    event = whole(1, 1) + whole({"offset": 2, "duration": 3}.get(where, 2), huge if not far else 5)
    lines = message(3, whole(3, 1) + message(4, whole(1, 1))) + message(3, far + message(4, event))
    assert attempt(message(1, message(2, b"/host:CPU") + lines), tmp_path / "far.pb") is None


@pytest.mark.parametrize("many", [2_000, 20_000])
def test_many_tiny_messages_of_every_kind(many: int, tmp_path: Path) -> None:
    """Read maps, stats, lines and events by the thousand, each in linear time."""
    kinds = b"".join(message(4, whole(1, key) + message(2, message(2, b"k"))) for key in range(many))
    stats = message(5, whole(1, 1) + message(2, message(2, b"hlo_op")))
    stat = message(4, whole(1, 1) + message(5, b"op"))
    events = b"".join(
        message(4, whole(1, key) + whole(2, many - key) + whole(3, 3 * key)) for key in range(many)
    )
    busy = message(4, whole(1, 1) + stat * many)
    lines = message(3, message(2, b"t") + events + busy) + message(3, b"") * many
    path = tmp_path / "many.pb"
    profile = attempt(message(1, message(2, b"/host:CPU") + lines + kinds + stats), path)
    assert profile is not None
    assert len(profile) == 1
    assert len(profile.host) == many
    planes = b"".join(
        message(
            1,
            message(2, b"/device:TPU:%d" % key)
            + message(3, message(2, b"XLA Ops") + message(4, whole(1, 1))),
        )
        for key in range(many // 10)
    )
    profile = attempt(planes, path)
    assert profile is not None
    assert len(profile) == many // 10


def test_deep_nesting_in_time_is_no_recursion(tmp_path: Path) -> None:
    depth = 50_000
    events = b"".join(
        message(4, whole(1, 1) + whole(2, at) + whole(3, 2 * (depth - at))) for at in range(depth)
    )
    line = message(3, message(2, b"XLA Ops") + events)
    profile = attempt(message(1, message(2, b"/device:TPU:0") + line), tmp_path / "deep.pb")
    assert profile is not None
    assert float(profile.duration_ns.sum()) == pytest.approx(2 * depth / 1000), "the outermost span"


def test_a_gzip_bomb_is_refused(tmp_path: Path) -> None:
    assert attempt(gzip.compress(bytes(100 << 20)), tmp_path / "bomb.gz") is None


# --- the wire format


def fields_of(data: bytes, starts: list[int], sizes: list[int]) -> list[tuple[int, int, bool, int]]:
    found = split(Bytes(data), np.array(starts, np.int64), np.array(sizes, np.int64))
    columns = (found.owner, found.number, found.is_bytes, found.value)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_messages_in_step_and_one_by_one_have_the_same_fields() -> None:
    chance = random.Random(3)
    parts: list[bytes] = []
    for _ in range(300):
        made = b"".join(
            chance.choice(
                (
                    whole(chance.randrange(1, 3000), chance.randrange(1 << chance.randrange(1, 65))),
                    message(chance.randrange(1, 20), chance.randbytes(chance.randrange(200))),
                    varint(7 << 3 | 1) + chance.randbytes(8),
                    varint(8 << 3 | 5) + chance.randbytes(4),
                )
            )
            for _ in range(chance.randrange(12))
        )
        parts.append(made)
    data = b"".join(parts)
    sizes = [len(part) for part in parts]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    together = fields_of(data, starts, sizes)
    single = [
        (place, *rest)
        for place, (start, size) in enumerate(zip(starts, sizes, strict=True))
        for _, *rest in fields_of(data, [start], [size])
    ]
    assert together == single


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00",
        b"\x0b",
        b"\x0c",
        b"\x0f",
        b"\x80" * 11,
        b"\x08" + b"\xff" * 11,
        b"\x09\x01",
        b"\x0d\x01",
        b"\x0a\x05x",
    ],
    ids=["field 0", "group", "end of group", "wire 7", "tag", "number", "fixed64", "fixed32", "bytes"],
)
@pytest.mark.parametrize("copies", [1, 200])
def test_what_is_no_message_is_told_with_its_byte(data: bytes, copies: int) -> None:
    starts = [len(data) * place for place in range(copies)]
    with pytest.raises(WireError) as caught:
        fields_of(data * copies, starts, [len(data)] * copies)
    assert caught.value.position < len(data)


@pytest.mark.parametrize(("field", "value"), [("ts", "1e999999999"), ("dur", "Infinity")])
def test_the_event_of_a_json_trace_with_a_bad_time_is_named(
    field: str, value: object, tmp_path: Path
) -> None:
    document = json.loads(TPU_JSON)
    events: list[dict[str, object]] = document["traceEvents"]
    number = max(place for place, event in enumerate(events) if event.get("ph") == "X")
    events[number][field] = value
    path = tmp_path / "t.trace.json"
    path.write_text(json.dumps(document))
    assert FORMAT_JSON.read is not None
    with pytest.raises(FormatError) as caught:
        FORMAT_JSON.read(path, ReadOptions(), Diagnostics())
    assert caught.value.position == f"event {number + 1}, field {field!r}"
    assert repr(events[number]["name"]) in caught.value.message
