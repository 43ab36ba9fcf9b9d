"""Truncated, damaged and nonsensical traces: an error of Hespas or a graph, in little time."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import cast

import pytest

from hespas.converters.format import ReadOptions
from hespas.converters.pytorch import FORMAT, FORMAT_ET, FORMAT_KINETO
from hespas.files.sandbox import bounded_memory
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, HespasError
from tests.converters.pytorch.test_pytorch_linked import (
    CALLS,
    DEVICE,
    GLOO_EVENTS,
    HOST,
    OPERATIONS,
    gloo_nodes,
)
from tests.converters.pytorch.traces import (
    Json,
    groups_node,
    kernel,
    read_et,
    recorded,
    tensor,
    write_et,
    write_kineto,
)

WAIT: Json = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 90}
SYNC: Json = {
    **kernel("Stream Wait Event", 33, 0, 91, WAIT, stream=9),
    "cat": "cuda_sync",
}


def survives(path: Path) -> bool:
    """Return True if a file or folder is read. Only errors of Hespas are allowed."""
    form = FORMAT if path.is_dir() else FORMAT_KINETO if "kineto" in path.name else FORMAT_ET
    assert form.read is not None
    try:
        form.read(path, ReadOptions(), Diagnostics())
    except HespasError:
        return False
    return True


@pytest.fixture(params=["device", "host"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A pair with one of everything."""
    folder = tmp_path / "job"
    folder.mkdir()
    on_device = request.param == "device"
    trace = write_et(folder / "a.et.json", OPERATIONS if on_device else gloo_nodes(waits=True))
    events = [*HOST, *CALLS, *DEVICE, SYNC] if on_device else GLOO_EVENTS
    header: Json = {
        "distributedInfo": {"rank": 0, "world_size": 4, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    }
    return trace, write_kineto(folder / "a.kineto.json", events, **header)


def test_the_pair_itself_is_read(files: tuple[Path, Path]) -> None:
    assert all(map(survives, (*files, files[0].parent)))


@pytest.mark.parametrize("which", [0, 1])
def test_no_truncation_is_read_or_crashes(which: int, files: tuple[Path, Path]) -> None:
    path = files[which]
    data = path.read_bytes()
    for length in range(1, len(data) - 1, 37):
        path.write_bytes(data[:length])
        assert not survives(path), length
    path.write_bytes(gzip.compress(data)[:-12])
    assert not survives(path)


@pytest.mark.parametrize("which", [0, 1])
def test_flipped_bytes_do_not_crash(which: int, files: tuple[Path, Path]) -> None:
    path, chance = files[which], random.Random(which)
    data = path.read_bytes()
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(chance.randrange(1, 6)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        survives(path)
        survives(path.parent)


def leaves(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the paths of all values in a document."""
    if isinstance(value, dict):
        inner = cast("Json", value).items()
        return [path, *(found for key, item in inner for found in leaves(item, (*path, key)))]
    if isinstance(value, list):
        items = enumerate(cast("list[object]", value))
        return [path, *(found for key, item in items for found in leaves(item, (*path, key)))]
    return [path]


ODD: list[object] = [
    *(None, True, -1, 0, 1 << 62, 1 << 70, -(1 << 63), 1e308, "", "x", "\ud800"),
    *(json.loads(text) for text in ("[]", "{}", "[[]]", "[[[]]]")),
]


@pytest.mark.parametrize("which", [0, 1])
def test_values_of_other_types_do_not_crash(which: int, files: tuple[Path, Path]) -> None:
    path, chance = files[which], random.Random(which)
    text = path.read_text()
    places = [place for place in leaves(json.loads(text)) if place]
    for _ in range(80):
        document = json.loads(text)
        *way, last = chance.choice(places)
        inner = document
        for key in way:
            inner = inner[key]
        inner[last] = chance.choice(ODD)
        path.write_text(json.dumps(document))
        survives(path)
        survives(path.parent)


def test_deep_nesting_is_an_error_of_ours(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    head = '{"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 1, "name": "a", "inputs": {"values": '
    (tmp_path / "a.json").write_text(f"{head}{deep}}}}}]}}")
    with pytest.raises(FormatError):
        read_et(tmp_path / "a.json")


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'{"nodes": [' + b" " * (80 << 20)))
    with pytest.raises(FormatError, match="decompresses to more"):
        read_et(tmp_path / "a.json.gz")


_FLOATS = (tensor(1, 64, 2),)


def _sums(count: int, *, stride: int) -> list[Json]:
    """Collectives over groups of half a million ranks each, every one said in a few bytes."""
    return [
        recorded(
            number, (1, number), _FLOATS, _FLOATS,
            {
                "collective_name": "allreduce", "dtype": "Float", "in_msg_nelems": 8, "out_msg_nelems": 8,
                "pg_name": str(number), "pg_size": 1 << 19, "global_rank_start": number,
                "global_rank_stride": stride,
            },
        )
        for number in range(10, 10 + count)
    ]  # fmt: skip


def test_groups_that_are_said_in_a_few_bytes_take_few(tmp_path: Path) -> None:
    path = write_et(tmp_path / "a.et.json", _sums(300, stride=1))
    with bounded_memory(1 << 30):
        graph, _ = read_et(path)
    assert [groups.group_size for groups in graph.group_sets] == [1 << 19] * 300
    assert [groups.members(0)[0] for groups in graph.group_sets] == [*range(10, 310)]


def test_groups_of_too_many_members_are_refused(tmp_path: Path) -> None:
    path = write_et(tmp_path / "a.et.json", _sums(300, stride=2))
    with bounded_memory(1 << 30), pytest.raises(FormatError, match="8,388,608 members") as caught:
        read_et(path)
    assert caught.value.path == str(path)
    assert caught.value.hint


def test_a_rank_of_two_billion_takes_no_memory(tmp_path: Path) -> None:
    listed = groups_node({"pg_name": "0", "ranks": [0, (1 << 31) - 1], "group_size": 2, "group_count": 1})
    facts: Json = {"collective_name": "allreduce", "dtype": "Float", "in_msg_nelems": 8, "pg_name": "0"}
    path = write_et(tmp_path / "a.et.json", [listed, recorded(12, (11, 4), _FLOATS, _FLOATS, facts)])
    with bounded_memory(1 << 30):
        survives(path)
