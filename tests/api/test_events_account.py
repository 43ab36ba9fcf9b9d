"""Account of a converted profile: the events that the written file contains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
from typer.testing import CliRunner

from hespas import api
from hespas.cli import convert

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "fixtures" / "profiles" / "h100_streams.xplane.pb"
SCHEMA = ROOT / "hespas" / "schemas" / "convert.schema.json"


@pytest.mark.parametrize("name", ["x.csv", "x.trace.json", "x.pftrace"])
def test_device_time_is_conserved_and_what_is_not_kept_is_counted(tmp_path: Path, name: str) -> None:
    done = api.convert(PROFILE, tmp_path / name)
    account = done.events
    assert account is not None
    assert done.conservation is None
    assert account.before.events == account.after.events == 18
    assert account.before.device_time_ns == account.after.device_time_ns
    lost = {text: one - other for text, one, other in account.rows() if one > other}
    told = {dropped.message: dropped.count for dropped in account.dropped if dropped.reason[:8] == "profile."}
    assert told == {f"{text} are not kept": count for text, count in lost.items()}
    if name == "x.csv":
        assert lost["operations of the host"] == 3


def test_the_command_prints_the_account_and_writes_it(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    done = CliRunner().invoke(convert.app, [str(PROFILE), str(tmp_path / "x.csv"), "--log-json", str(log)])
    assert done.exit_code == 0, done.output
    assert "device events" in done.stderr
    assert "3 operations of the host are not kept [profile.host_operations]" in done.stderr
    document = cast("dict[str, Any]", json.loads(log.read_text()))
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    account = document["conservation"]
    assert account["events_in"] == account["events_out"] == 18
    assert account["device_time_ns_in"] == account["device_time_ns_out"]
