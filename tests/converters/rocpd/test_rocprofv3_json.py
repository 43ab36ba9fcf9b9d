"""rocprofv3's JSON: a real recording to the nanosecond, lists cut anywhere, and damage."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.make import rocprof
from hespas.converters import sniff
from hespas.converters.format import ReadOptions
from hespas.converters.rocpd import FORMAT_JSON, document
from hespas.converters.rocpd.document import array_elements
from hespas.graph import Diagnostics, Profile
from hespas.graph.errors import FormatError, HespasError

DATA = Path(__file__).parents[3].parent / "shared" / "data"
REAL = DATA / "profiles" / "mi350x_rocprofv3_908_results.json.gz"
absent = pytest.mark.skipif(not REAL.is_file(), reason="../shared/data is not here")


def read(path: Path) -> tuple[Profile, Diagnostics]:
    diagnostics = Diagnostics()
    assert FORMAT_JSON.read is not None
    profile = FORMAT_JSON.read(path, ReadOptions(), diagnostics)
    assert isinstance(profile, Profile)
    return profile, diagnostics


@absent
def test_a_real_recording_is_kept_to_the_nanosecond() -> None:
    assert sniff(REAL).name == "rocprofv3"
    tool = json.loads(gzip.decompress(REAL.read_bytes()))["rocprofiler-sdk-tool"][0]
    names = {symbol["kernel_id"]: symbol["formatted_kernel_name"] for symbol in tool["kernel_symbols"]}
    records = sorted(tool["buffer_records"]["kernel_dispatch"], key=lambda each: each["start_timestamp"])
    times = np.array([(each["start_timestamp"], each["end_timestamp"]) for each in records])
    profile, diagnostics = read(REAL)
    assert len(profile) == len(records) == 43_915
    assert int(profile.duration_ns.sum()) == int((times[:, 1] - times[:, 0]).sum()) == 4_441_741_378
    assert (profile.duration_ns == times[:, 1] - times[:, 0]).all()
    assert (profile.start_ns == times[:, 0] - times[0, 0]).all()
    assert [profile.strings[row] for row in profile.kernel_id.tolist()] == [
        names[each["dispatch_info"]["kernel_id"]] for each in records
    ]
    assert profile.stream.tolist() == [each["stream_id"]["handle"] for each in records]
    assert profile.device == "AMD Instinct MI350X"
    assert set(profile.rank.tolist()) == {0}
    nccl = [names[each["dispatch_info"]["kernel_id"]].startswith("nccl") for each in records]
    assert profile.comms.event.tolist() == np.flatnonzero(nccl).tolist()
    assert diagnostics.counts()["rocprofv3.unlinked"] == 43_915
    hidden = (tool["metadata"]["node"]["hostname"], tool["metadata"]["config"]["output_path"])
    assert not [text for text in (*profile.strings, *profile.metadata.values()) if text in hidden]


records = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab"\\[]{},: \n', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(alphabet='"\\,]', max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.lists(records, max_size=12), st.integers(1, 9), st.booleans())
def test_a_list_cut_anywhere_is_the_list(values: list[object], block: int, spaced: bool) -> None:
    text = json.dumps(values, indent=1 if spaced else None).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "_BLOCK_BYTES", block)
        decoder = msgspec.json.Decoder(list[object])
        parts = list(array_elements(msgspec.Raw(b" " + text + b" "), decoder, "here", "$.list"))
    assert [value for part in parts for value in part] == values


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"rocprofiler-sdk-tool":{}}',
        '{"rocprofiler-sdk-tool":[5]}',
        '{"rocprofiler-sdk-tool":[{}]}',
        '{"rocprofiler-sdk-tool":[{"buffer_records":{}}]}',
        '{"rocprofiler-sdk-tool":[{"buffer_records":{"kernel_dispatch":{}}}]}',
        '{"rocprofiler-sdk-tool":[{"buffer_records":{"kernel_dispatch":[{}]}}]}',
        '{"rocprofiler-sdk-tool":[{"buffer_records":{"kernel_dispatch":[{"start_timestamp":1e300}]}}]}',
        '{"rocprofiler-sdk-tool":' + "[" * 100_000,
    ],
)
def test_what_is_no_recording_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FormatError):
        read(tmp_path / "a.json")


def test_numbers_beyond_64_bits_are_unknown_and_times_beyond_them_refused(tmp_path: Path) -> None:
    whole, path = rocprof.DOCUMENT.read_text(), tmp_path / "a.json"
    path.write_text(whole.replace('"internal":4,', f'"internal":{1 << 64},'))
    assert len(read(path)[0]) == len(rocprof.expected())
    path.write_text(whole.replace('"start_timestamp":7', '"start_timestamp":7777777', 1))
    with pytest.raises(FormatError, match="malformed record"):
        read(path)


def test_text_that_is_not_utf8_is_replaced(tmp_path: Path) -> None:
    data = rocprof.DOCUMENT.read_bytes().replace(b"aten::addmm", b"aten::\xff\xfeadd")
    (tmp_path / "a.json").write_bytes(data)
    profile, _ = read(tmp_path / "a.json")
    assert "aten::\ufffd\ufffdadd" in {profile.strings[row] for row in profile.op_id.tolist()}


def test_a_list_of_many_small_things_is_refused(tmp_path: Path) -> None:
    many = ",".join(['{"id":{}}'] * 70_000)
    (tmp_path / "a.json").write_text(
        f'{{"rocprofiler-sdk-tool":[{{"agents":[{many}],"buffer_records":{{}}}}]}}'
    )
    with pytest.raises(FormatError, match=r"agents: more than 65,536 elements"):
        read(tmp_path / "a.json")


def test_damaged_documents_are_errors_of_ours_or_read(tmp_path: Path) -> None:
    data, dice, path = rocprof.DOCUMENT.read_bytes(), random.Random(5), tmp_path / "a.json"
    for trial in range(300):
        changed = bytearray(data[: dice.randrange(len(data))] if trial % 2 else data)
        for _ in range(dice.choice((0, 1, 5))):
            changed[dice.randrange(len(changed))] = dice.choice(b'"{}[],:0-9e\\\xff\x00')
        path.write_bytes(bytes(changed))
        try:
            read(path)
        except HespasError:
            continue
