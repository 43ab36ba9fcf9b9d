"""The format as the registry sees it: sniffing, device counts, protos, broken and hostile input."""

from __future__ import annotations

import gzip
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hespas.converters import load_format, sniff
from hespas.converters.format import Head, ReadOptions
from hespas.converters.hlo import FORMAT, scan
from hespas.graph import Diagnostics, OpGraph, Workload
from hespas.graph.errors import FormatError, HespasError, MissingExtraError, UnsupportedError

FIXTURES = Path(__file__).parents[3] / "fixtures"
SMALL = FIXTURES / "hlo" / "scan_nested.hlo.txt"
PROTO = FIXTURES / "binary" / "llama_fsdp_tp_global_N8.hlo.pb.gz"
PROTO_AS_TEXT = FIXTURES / "hlo" / "llama_fsdp_tp_global_N8.hlo.txt.gz"

ONE = """HloModule m{}
ENTRY e {{
  x = f32[8]{{0}} parameter(0)
  y = f32[8]{{0}} all-reduce(x), to_apply=add{}
}}
"""
ADD = "add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = f32[] add(a, b)\n}\n"


def _read(path: Path, options: ReadOptions | None = None) -> tuple[Workload, Diagnostics]:
    diagnostics = Diagnostics()
    assert FORMAT.read is not None
    value = FORMAT.read(path, options or ReadOptions(), diagnostics)
    assert isinstance(value, Workload)
    return value, diagnostics


def _written(folder: Path, text: str | bytes, name: str = "m.hlo") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def _all_reduce(header: str = "", attributes: str = "") -> str:
    head, _, rest = ONE.format(header, attributes).partition("\n")
    return f"{head}\n{ADD}{rest}"


@pytest.mark.parametrize(
    ("data", "score"),
    [
        (b"HloModule jit_f, is_scheduled=true\n", 100),
        (b"\n/* made by x */ // y\n  HloModule m\n", 100),
        (b"HloModuleX", 0),
        (b"module @jit_f {\n", 0),
        (b"{}", 0),
        (b"", 0),
        (b"\x0a\x05jit_f\x12\x06main.1\x1a\x0a\x0a\x06main.1", 80),
        (b"\x0a\x05jit_f\x12\x06main.1\x1a\x02\x08\x01", 0),
        (b"\x0a\x05jit\xfff\x12\x06main.1\x1a\x0a\x0a\x06main.1", 0),
        (b"\x0a\xff\xff\xff\xff\xff\xff", 0),
        (b"ML\xefR\x01", 0),
    ],
)
def test_sniffing_by_content(data: bytes, score: int) -> None:
    assert FORMAT.sniff is not None
    assert FORMAT.sniff(Head(Path("x"), data, ())) == score


def test_the_registry_tells_hlo_from_other_files(tmp_path: Path) -> None:
    assert sniff(SMALL) is load_format("hlo")
    assert sniff(PROTO) is load_format("hlo")
    packed = _written(tmp_path, gzip.compress(SMALL.read_bytes()), "no_suffix")
    assert sniff(packed).name == "hlo"
    assert len(_read(packed)[0].classes[0]) == len(_read(SMALL)[0].classes[0])


def test_reading_text_imports_neither_jax_nor_jaxlib() -> None:
    script = (
        "import sys, pathlib, hespas.converters.hlo as h\n"
        "from hespas.converters.format import ReadOptions\n"
        "from hespas.graph import Diagnostics\n"
        f"h.FORMAT.read(pathlib.Path({str(SMALL)!r}), ReadOptions(), Diagnostics())\n"
        "heavy = {'jax', 'jaxlib', 'pandas', 'pyarrow'}\n"
        "sys.exit(any(name.split('.')[0] in heavy for name in sys.modules))\n"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr.decode()


def _figures(graph: OpGraph) -> dict[str, tuple[float, float, float, tuple[int, ...]]]:
    return {
        graph.node_name(node): (
            float(graph.flops[node]),
            float(graph.bytes_moved[node]),
            float(graph.executions[node]),
            tuple(graph.data_deps.row(node).tolist()),
        )
        for node in range(len(graph))
    }


def test_proto_and_text_of_a_module_are_the_same_graph() -> None:
    pytest.importorskip("jaxlib")
    proto, found = _read(PROTO)
    text, found_in_text = _read(PROTO_AS_TEXT)
    products = gzip.decompress(PROTO_AS_TEXT.read_bytes()).count(b" dot(")
    assert found.counts() == {"hlo.inferred-devices": 1, "hlo.widened-product": products}
    assert found_in_text.counts() == {"hlo.widened-product": products}
    assert proto.num_ranks == text.num_ranks == 8
    assert _figures(proto.classes[0]) == _figures(text.classes[0])
    assert proto.classes[0].group_sets == text.classes[0].group_sets


def test_the_wrapped_form_that_dumps_hold(tmp_path: Path) -> None:
    """``--xla_dump_hlo_as_proto`` writes an ``HloProto``, whose first field is the module."""
    pytest.importorskip("jaxlib")
    whole = gzip.decompress(PROTO.read_bytes())
    length = bytes([len(whole) & 0x7F | 0x80, len(whole) >> 7 & 0x7F | 0x80, len(whole) >> 14])
    wrapped = _written(tmp_path, b"\x0a" + length + whole + b"\x1a\x02\x08\x01", "m.hlo.pb")
    assert sniff(wrapped).name == "hlo"
    assert _figures(_read(wrapped)[0].classes[0]) == _figures(_read(PROTO)[0].classes[0])


def test_a_proto_without_jaxlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"no module named {name}")

    monkeypatch.setattr(scan, "import_module", missing)
    with pytest.raises(MissingExtraError) as caught:
        _read(PROTO)
    assert "stablehlo" in str(caught.value)
    assert scan.TESTED_JAXLIB in str(caught.value)


def test_a_broken_proto_is_a_format_error(tmp_path: Path) -> None:
    pytest.importorskip("jaxlib")
    whole = gzip.decompress(PROTO.read_bytes())
    draw = random.Random(7)
    for cut in sorted(draw.randrange(40, len(whole) - 1) for _ in range(12)):
        with pytest.raises(FormatError) as caught:
            _read(_written(tmp_path, whole[:cut], "cut.pb"))
        assert caught.value.path is not None
        assert caught.value.position is not None
        assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("header", "attributes", "devices", "expected"),
    [
        ("", "", None, (1, "hlo.unknown-devices")),
        ("", "", 4, (4, "")),
        ("", ", channel_id=1", 4, (4, "")),
        (", num_partitions=8", ", channel_id=1", None, (8, "")),
        (", replica_count=2, num_partitions=4", "", None, (8, "")),
        (", replica_count=2", "", 2, (2, "")),
        (", replica_count=2", "", 16, (2, "hlo.num-devices")),
    ],
)
def test_the_number_of_devices(
    tmp_path: Path,
    header: str,
    attributes: str,
    devices: int | None,
    expected: tuple[int, str],
) -> None:
    path = _written(tmp_path, _all_reduce(header, attributes))
    workload, found = _read(path, ReadOptions(num_devices=devices))
    assert (workload.num_ranks, ", ".join(found.counts())) == expected
    groups = workload.classes[0].group_sets[0]
    whole = "channel_id" in attributes or "num_partitions" not in header
    assert groups.is_world(expected[0]) == whole


@pytest.mark.parametrize(
    ("groups", "ranks"),
    [
        ("{{0,1},{2,5}}", 6),
        ("[4,2]<=[2,4]T(1,0)", 8),
        ("mesh['a'=2,'b'=8] {'b'}", 16),
        ("{}", 1),
    ],
)
def test_unstated_devices_are_those_the_collectives_name(tmp_path: Path, groups: str, ranks: int) -> None:
    attributes = f", channel_id=1, use_global_device_ids=true, replica_groups={groups}"
    workload, found = _read(_written(tmp_path, _all_reduce("", attributes)))
    assert workload.num_ranks == ranks
    assert found.counts().get("hlo.inferred-devices", 0) == int(ranks > 1)


def test_fewer_devices_than_the_groups_name_is_an_error(tmp_path: Path) -> None:
    text = _all_reduce("", ", channel_id=1, use_global_device_ids=true, replica_groups=[1,8]<=[8]")
    with pytest.raises(FormatError, match="at most 4 devices") as caught:
        _read(_written(tmp_path, text), ReadOptions(num_devices=4))
    assert caught.value.hint is not None
    assert "`num_devices`" in caught.value.hint


@pytest.mark.parametrize("header", [", num_partitions=0", ", replica_count=x", ", num_partitions=-4"])
def test_device_counts_that_are_none(tmp_path: Path, header: str) -> None:
    with pytest.raises(FormatError, match=header.partition("=")[0].strip(", ")):
        _read(_written(tmp_path, _all_reduce(header)))


def test_absurd_device_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="1,000,000,000,000 devices"):
        _read(_written(tmp_path, _all_reduce(", replica_count=1000000, num_partitions=1000000")))


def test_locations_can_be_left_out() -> None:
    with_source = _read(FIXTURES / "hlo" / "mlp.hlo.txt")[0].classes[0]
    without = _read(FIXTURES / "hlo" / "mlp.hlo.txt", ReadOptions(locations=False))[0].classes[0]
    assert with_source.source_id.any()
    assert not without.source_id.any()
    assert without.framework_id.any()


FILES = sorted((FIXTURES / "hlo").glob("*"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.partition(".")[0])
def test_truncated_files_never_read_as_whole(path: Path, tmp_path: Path) -> None:
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    draw = random.Random(path.name)
    for cut in {draw.randrange(len(text.rstrip()) - 1) for _ in range(50)}:
        with pytest.raises(FormatError) as caught:
            _read(_written(tmp_path, text[:cut]))
        assert caught.value.path is not None
        assert caught.value.hint is not None


def test_damaged_files_raise_our_errors_only(tmp_path: Path) -> None:
    """Bytes changed, removed and doubled at random: a graph or a typed error, never a crash."""
    draw = random.Random(11)
    source = bytearray((FIXTURES / "hlo" / "hand_control.hlo.txt").read_bytes())
    refused: list[HespasError] = []
    for _ in range(300):
        damaged = bytearray(source)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(damaged))
            kind = draw.randrange(3)
            if kind == 0:
                damaged[at] = draw.choice(b'{}()[],="%0 \n<')
            elif kind == 1:
                del damaged[at : at + draw.randrange(1, 30)]
            else:
                damaged[at:at] = damaged[at : at + draw.randrange(1, 30)]
        try:
            _read(_written(tmp_path, bytes(damaged)))
        except HespasError as error:
            refused.append(error)
    assert len(refused) > 100
    assert all(error.path is not None for error in refused)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe" * 50,
        b"HloModule \xff\xfe",
        b"\x00" * 100,
        b"HloModule m\nENTRY e {\n  x = f32[] par\x00ameter(0)",
    ],
)
def test_junk(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        _read(_written(tmp_path, data))
    assert caught.value.position is not None
    assert caught.value.hint is not None


def _chain(length: int) -> str:
    lines = "".join(f"  a{i + 1} = f32[8]{{0}} add(a{i}, a{i})\n" for i in range(length))
    return f"HloModule m\nENTRY e {{\n  a0 = f32[8]{{0}} parameter(0)\n{lines}}}\n"


def _calls(levels: int) -> str:
    head = "HloModule m\nc0 {\n  p = f32[] parameter(0)\n}\n"
    call = "  {} = f32[] call({}), to_apply=c{}\n"
    start = " {{\n  p = f32[] parameter(0)\n"
    bodies = "".join(
        f"c{level + 1}{start.format()}{call.format('q', 'p', level)}{call.format('r', 'q', level)}}}\n"
        for level in range(levels)
    )
    return f"{head}{bodies}ENTRY e {{\n  p = f32[] parameter(0)\n{call.format('q', 'p', levels)}}}\n"


def _fusions(levels: int) -> str:
    head = "HloModule m\nc0 {\n  p = f32[] parameter(0)\n  ROOT n = f32[] negate(p)\n}\n"
    bodies = "".join(
        f"c{level + 1} {{\n  p = f32[] parameter(0)\n  q = f32[] fusion(p), calls=c{level}\n}}\n"
        for level in range(levels)
    )
    return f"{head}{bodies}ENTRY e {{\n  p = f32[] parameter(0)\n  q = f32[] fusion(p), calls=c{levels}\n}}\n"


HEAD = "HloModule m\nENTRY e {\n  x = f32[8] parameter(0)"
DEEP = 200_000


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        pytest.param(_chain(30_000), 30_001, id="long chain"),
        pytest.param(_fusions(3_000), 2, id="fusions in fusions"),
        pytest.param(f"{HEAD}, a={'{' * DEEP}{'}' * DEEP}\n}}", 1, id="deep braces"),
        pytest.param(f"{HEAD}, a={'/**/' * DEEP}\n}}", 0, id="comments only"),
        pytest.param(f"{HEAD}\n{'/**/' * DEEP}}}", 1, id="many comments"),
        pytest.param(f"{HEAD}, a={'{' * DEEP}", 0, id="braces that never close"),
        pytest.param(f"{HEAD}\n  t = {'(' * DEEP}f32[]{')' * DEEP} parameter(1)\n}}", 0, id="deep tuple"),
        pytest.param(f'{HEAD}, a="{chr(92) * DEEP}', 0, id="string that never ends"),
        pytest.param(f"{HEAD}, metadata={{{'op_name=' * DEEP}}}\n}}", 1, id="fields without values"),
        pytest.param(f"HloModule m, input_output_alias={{{'{0}: (0,' * DEEP}}}", 0, id="aliases cut short"),
        pytest.param(f"{HEAD}\n  y = f32[8] custom-call({','.join('x' * DEEP)})\n}}", 2, id="many operands"),
        pytest.param(_calls(60), 0, id="calls that double"),
        pytest.param(f"{HEAD}\n  y = f32[{'9' * 5000}] negate(x)\n}}", 0, id="an extent of 5,000 digits"),
        pytest.param(f"{HEAD}\n  y = f32[{'1000000,' * 20}1] negate(x)\n}}", 0, id="too many elements"),
    ],
)  # fmt: skip
def test_hostile_text_is_read_in_linear_time_or_refused(tmp_path: Path, text: str, nodes: int) -> None:
    """None of these finishes within a test run where a step is quadratic, or at all where one recurses."""
    path = _written(tmp_path, text)
    if nodes:
        assert len(_read(path)[0].classes[0]) == nodes
        return
    with pytest.raises((FormatError, UnsupportedError)):
        _read(path)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "mark.hlo"
    path.write_text("\ufeffHloModule m\nENTRY e {\n  ROOT x = f32[2] parameter(0)\n}\n", encoding="utf-8")
    assert len(_read(path)[0].classes[0]) == 1


def test_a_damaged_proto_is_refused_in_silence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jaxlib")
    data = b"\x0a\x01m\x12\x01e\x1a\x03\x0a\x01e" + b"\xff" * 40
    (tmp_path / "damaged.pb").write_bytes(data)
    with pytest.raises(FormatError, match="serialised HloModuleProto"):
        _read(tmp_path / "damaged.pb")
    os.write(2, b"still open")
    assert capfd.readouterr().err == "still open"
