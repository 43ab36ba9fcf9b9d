"""Clean copies of damaged traces: complete events are unchanged, and any JSON reader accepts the file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import hespas
from hespas.cli.convert import app
from hespas.graph.errors import FormatError, UsageError
from tests.converters.pytorch.traces import Json, host, kernel, launch

_DAMAGES = ("twice", "overflow", "null args", "null event", "control", "escape", "nan")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def _events() -> list[Json]:
    python: Json = {
        "ph": "X",
        "cat": "python_function",
        "name": "f.py(3): f",
        "pid": 9,
        "tid": 9,
        "ts": 0,
        "dur": 99,
    }
    arrow: Json = {"ph": "s", "id": 1, "pid": 9, "tid": 9, "ts": 3, "cat": "ac2g", "name": "ac2g"}
    return [
        python,
        arrow,
        host("aten::mm", 0, 9, args={"Input Dims": [[4, 8], [8, 2]], "Input type": ["float", "float"]}),
        launch(1, 1),
        kernel("gemm", 10, 30, 1),
        kernel("tail", 50, 5, 2),
    ]


def _document(events: list[Json]) -> str:
    return json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "t.json"})


def _damaged(damage: str) -> bytes:
    events = _events()
    match damage:
        case "twice":
            events.append(events[4])
        case "overflow":
            events.append(kernel("never ended", 60, 0) | {"dur": 18446744073709551.0})
        case "null args":
            events[0]["args"] = None
        case _:
            pass
    text = _document(events)
    match damage:
        case "null event":
            text = text.replace('{"ph": "s"', 'null, {"ph": "s"')
        case "control":
            text = text.replace("gemm", "ge\x01mm")
        case "escape":
            text = text.replace("f.py(3)", "C:\\path\\f.py(3)")
        case "nan":
            text = text.replace('"correlation": 2', '"correlation": 2, "est. occupancy": NaN')
        case _:
            pass
    return text.encode()


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_clean_copy_says_the_same_and_is_json(damage: str, tmp_path: Path) -> None:
    broken, fixed = tmp_path / "broken.json", tmp_path / "fixed.json"
    broken.write_bytes(_damaged(damage))
    done = hespas.convert(broken, fixed)
    assert done.target_format == "kineto"
    assert done.events is not None
    assert done.events.before == done.events.after
    copied = json.loads(fixed.read_bytes(), strict=True)
    assert copied["traceName"] == "t.json"
    assert [event["ph"] for event in copied["traceEvents"]].count("s") == 1
    assert sum(event["cat"] == "python_function" for event in copied["traceEvents"]) == 1
    again = hespas.convert(fixed, tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_bytes()) == copied
    told = set(again.diagnostics.counts()) & {
        f"kineto.{code}" for code in ("repeated", "overflowed-duration")
    }
    assert not told


def test_a_sound_trace_is_copied_event_by_event(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(_document(_events()).encode()))
    hespas.convert(tmp_path / "a.json.gz", tmp_path / "b.pt.trace.json.gz")
    copied = json.loads(gzip.decompress((tmp_path / "b.pt.trace.json.gz").read_bytes()))
    assert copied["traceEvents"] == _events()


@settings(max_examples=40)
@given(part=st.floats(0.05, 0.99))
def test_what_stands_before_a_cut_is_copied(part: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cut")
    whole = _document(_events() * 1).encode()
    first = whole.index(b"[") + 1
    cut = whole[: first + int(part * (len(whole) - first))]
    (folder / "broken.json").write_bytes(cut)
    kept = [event for event in _events() if json.dumps(event).encode() in cut]
    if not any(event.get("cat") in {"cpu_op", "kernel"} for event in kept):
        with pytest.raises(FormatError, match="neither device events nor host"):
            hespas.convert(folder / "broken.json", folder / "fixed.json", recover=True)
        return
    done = hespas.convert(folder / "broken.json", folder / "fixed.json", recover=True)
    assert json.loads((folder / "fixed.json").read_bytes())["traceEvents"] == kept
    assert done.diagnostics.counts()["kineto.cut"] == 1


_HEADERS = {
    "a key": (b'"schemaVersion"', b'"schema\xffVersion"', "invalid-utf8"),
    "a text": (b'"t.json"', b'"t\xff.json"', "invalid-utf8"),
    "a control character": (b'"t.json"', b'"t\x01.json"', "control-character"),
    "no number": (b'"schemaVersion": 1', b'"schemaVersion": NaN', "no-number"),
    "no JSON": (b'"schemaVersion": 1', b'"schemaVersion": tru', "broken-header"),
}


@pytest.mark.parametrize("cut", [0, 90])
@pytest.mark.parametrize("damage", _HEADERS)
def test_a_damaged_header_is_mended(damage: str, cut: int, tmp_path: Path) -> None:
    broken, fixed = tmp_path / "broken.json", tmp_path / "fixed.json"
    whole, hurt, code = _HEADERS[damage]
    document = json.dumps({"schemaVersion": 1, "traceName": "t.json", "traceEvents": _events()}).encode()
    assert whole in document
    damaged = document.replace(whole, hurt)
    broken.write_bytes(damaged[: len(damaged) - cut])
    done = hespas.convert(broken, fixed, recover=True)
    copied = json.loads(fixed.read_bytes().decode("utf-8"))
    assert len(copied["traceEvents"]) == len(_events()) - (cut > 0)
    told = done.diagnostics.counts()
    assert told[f"kineto.{code}"] == 1
    assert told.get("kineto.cut", 0) == (cut > 0)


def test_a_text_that_is_skipped_is_mended_too(tmp_path: Path) -> None:
    broken, fixed = tmp_path / "broken.json", tmp_path / "fixed.json"
    events = [*_events(), kernel("more", 70, 5, 3, {"note": "??"})]
    broken.write_bytes(_document(events).encode().replace(b"??", b"\xff\xfe"))
    done = hespas.convert(broken, fixed)
    assert json.loads(fixed.read_bytes().decode("utf-8"))["traceEvents"][-1]["args"]["note"] == "\ufffd" * 2
    assert done.diagnostics.counts()["kineto.invalid-utf8"] == 1


def test_what_is_broken_behind_the_events_is_no_early_end(tmp_path: Path) -> None:
    broken, fixed = tmp_path / "broken.json", tmp_path / "fixed.json"
    broken.write_bytes(_document(_events()).encode().replace(b'"t.json"', b"t.json"))
    with pytest.raises(FormatError, match="not JSON"):
        hespas.convert(broken, fixed)
    told = hespas.convert(broken, fixed, recover=True).diagnostics.counts()
    assert told["kineto.broken-header"] == 1
    assert "kineto.cut" not in told
    assert json.loads(fixed.read_bytes())["traceEvents"] == _events()


def test_a_cut_trace_is_refused_until_it_is_to_be_recovered(tmp_path: Path) -> None:
    broken, fixed = tmp_path / "broken.json", tmp_path / "fixed.json"
    broken.write_bytes(_document(_events()).encode()[:-150])
    refused = _run(str(broken), str(fixed))
    assert refused.exit_code == 3
    assert "--recover keeps the 5 events before the cut" in refused.stderr
    assert not fixed.exists()
    done = _run(str(broken), str(fixed), "--recover")
    assert done.exit_code == 0
    assert "bytes after the last whole event" in done.stderr
    assert "(kineto) -> " in done.output
    assert _run(str(broken), str(fixed), "--recover").exit_code == 2
    assert _run(str(fixed), str(fixed), "--overwrite").exit_code == 0


def test_only_a_trace_of_the_profiler_is_copied_as_one(tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text(
        '{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 2, "pid": 1}]}'
    )
    assert hespas.convert(tmp_path / "v.json", tmp_path / "w.json").target_format == "chrome-trace"
    with pytest.raises(UsageError, match="can be read, not written"):
        hespas.convert(tmp_path / "v.json", tmp_path / "w2.json", target_format="kineto")
    (tmp_path / "k.json").write_text(_document(_events()))
    assert hespas.convert(tmp_path / "k.json", tmp_path / "k.chrome.json").target_format == "chrome-trace"
    seen = hespas.convert(tmp_path / "k.json", tmp_path / "k2.json", target_format="chrome-trace")
    assert seen.target_format == "chrome-trace"


def test_a_trace_that_does_not_say_its_rank_is_told(tmp_path: Path) -> None:
    document = json.loads(_document(_events())) | {"distributedInfo": {"backend": "nccl", "world_size": 8}}
    (tmp_path / "k.json").write_text(json.dumps(document))
    done = hespas.convert(tmp_path / "k.json", tmp_path / "k2.json")
    assert done.diagnostics.counts()["kineto.missing-rank"] == 1
