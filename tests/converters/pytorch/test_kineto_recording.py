"""A recording of PyTorch by a script with known content: read, converted and compared."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fixtures.make import kineto
from hespas import api
from hespas.cli import convert, main, validate
from hespas.graph import Profile

RECORDING = kineto.RECORDING


@pytest.fixture(scope="module")
def profile() -> Profile:
    found = api.read(RECORDING)
    assert isinstance(found, Profile)
    return found


def test_the_recording_is_what_its_script_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "RECORDING", tmp_path / RECORDING.name)
    kineto.main()
    again = (tmp_path / RECORDING.name).read_bytes()
    assert gzip.decompress(again) == gzip.decompress(RECORDING.read_bytes())


def test_every_event_of_the_device_is_kept_with_its_operator(profile: Profile, tmp_path: Path) -> None:
    expected = sorted(kineto.expected(), key=lambda each: (each.stream, each.start_us))
    done = CliRunner().invoke(convert.app, [str(RECORDING), str(tmp_path / "t.csv")])
    assert done.exit_code == 0, done.output
    table = api.read(tmp_path / "t.csv")
    assert isinstance(table, Profile)
    for found in (profile, table):
        order = np.lexsort((found.start_ns, found.stream))
        assert found.duration_ns[order].tolist() == [round(each.duration_us * 1e3) for each in expected]
        assert found.stream[order].tolist() == [each.stream for each in expected]
        starts = found.start_ns[order]
        wanted = np.array([round(each.start_us * 1e3) for each in expected])
        assert np.array_equal(starts - starts[0], wanted - wanted[0])
        names = [found.strings[row] if row >= 0 else "" for row in found.op_id[order].tolist()]
        assert names == [each.operator for each in expected]


def test_the_share_that_has_a_host_operation_is_said() -> None:
    kernels = kineto.expected()
    share = sum(each.duration_us for each in kernels if each.linked) / sum(
        each.duration_us for each in kernels
    )
    assert 0.8 < share < 1
    done = CliRunner().invoke(main.app, ["view", str(RECORDING)])
    assert f"{share:.1%} linked to host operations" in done.stdout, done.output


def test_what_an_estimator_says_is_compared_with_it(tmp_path: Path) -> None:
    words = ["accuracy", "--measured", str(RECORDING), "--hardware", "H100-SXM"]
    done = CliRunner().invoke(validate.app, [*words, "--json", str(tmp_path / "a.json")])
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "a.json").read_text())
    rows = {
        (row["estimator"], row["op_class"]): row for row in document["summary"] if row["level"] == "shape"
    }
    linked = [each for each in kineto.expected() if each.linked]
    products = {each.shapes for each in linked if each.operator == "aten::mm"}
    assert rows["composite", "contraction"]["n"] == len(products)
    assert rows["composite", "collective"]["n"] == 1
    assert rows["composite", "contraction"]["mape"] < 0.5
    [end] = [row for row in document["end_to_end"] if row["estimator"] == "composite"]
    assert end["measured_ns"] == pytest.approx(sum(each.duration_us for each in linked) * 1e3)
