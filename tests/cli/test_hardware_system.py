"""``hespas hardware system``: output as file, ASTRA-sim configuration and JSON; and its Python function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol, cast

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

import hespas
from hespas.cli.main import app
from hespas.graph.errors import OutputError
from hespas.hardware import load_system

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "hespas" / "schemas" / "system.schema.json").read_text())


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["hardware", "system", *map(str, arguments)])


def test_a_system_is_shown_as_a_file_to_start_from(tmp_path: Path) -> None:
    done = run("gb200-nvl72", "--devices", "144")
    assert done.exit_code == 0, done.output
    (tmp_path / "mine.toml").write_text(done.stdout, "utf-8")
    assert load_system(tmp_path / "mine.toml").shape == (72, 2)
    assert run(tmp_path / "mine.toml", "--devices", "100").exit_code == 0


def test_configuration_files_and_a_step_on_them(tmp_path: Path) -> None:
    traces, configs = tmp_path / "traces", tmp_path / "configs"
    hespas.convert(ROOT / "fixtures" / "hlo" / "moe_all_to_all.hlo.txt", traces, hardware="H100-SXM")
    done = run("dgx-h100", "--devices", "8", "--to", "astra-sim", configs)
    assert done.exit_code == 0, done.output
    assert "system.reduction-left-out" in done.stdout
    step = hespas.simulate(
        traces,
        mode="astra",
        system_config=configs / "system.json",
        network_config=configs / "network.yml",
        memory_config=configs / "remote_memory.json",
    )
    assert step.timeline.finish_ns.min() > 0
    again = run("dgx-h100", "--devices", "8", "--to", "astra-sim", configs)
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr
    assert run("tpu-v4", "--devices", "4x4x4", "--to", "astra-sim", configs, "--overwrite").exit_code == 0
    assert "Ring, Ring, Ring" in (configs / "network.yml").read_text()


def test_json(tmp_path: Path) -> None:
    done = run("dgx-h100-roce", "--devices", "32", "--json", tmp_path / "s.json")
    assert (done.exit_code, done.stdout) == (0, "")
    document = json.loads((tmp_path / "s.json").read_text())
    cast("_Validator", Draft202012Validator(SCHEMA)).validate(document)
    assert document["devices"] == 32
    assert [each["size"] for each in document["dimensions"]] == [8, 4, 1]
    assert document["dimensions"][2]["oversubscription"] == 7.0
    assert hespas.load_system("dgx-h100-roce", 32).to_dict() == document


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("dgx-h1000",), 2, "no system 'dgx-h1000'"),
        (("dgx-h100", "--devices", "many"), 2, "--devices 64, or --devices 4x4x8"),
        (("dgx-h100", "--devices", "0"), 2, "not 0"),
        (("dgx-h100", "--to", "astra-sim", "here"), 2, "dgx-h100 has no number of devices"),
        (("dgx-h100", "--devices", "12", "--to", "astra-sim", "here"), 2, "8 or 16 devices"),
        (("dgx-h100", "--devices", "8", "--to", "booksim", "here"), 2, "unknown format 'booksim'"),
        (("nowhere/mine.toml",), 3, "nowhere/mine.toml"),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_outputs_that_are_not_of_their_kind(tmp_path: Path) -> None:
    done = run("dgx-h100", "--devices", "64", "--to", "astra-sim", "-")
    assert (done.exit_code, "'-' is not a folder" in done.output) == (2, True)
    done = CliRunner().invoke(app, ["hardware", "measure", "--out", str(tmp_path / "cpu.txt")])
    assert (done.exit_code, "expected a .toml file" in done.output) == (2, True)


def test_in_python(tmp_path: Path) -> None:
    found = hespas.load_system("dgx-b200", (8, 4))
    assert repr(found) == "<SystemResult: dgx-b200, 8x4 B200-SXM>"
    assert list(found.to_pandas()["name"]) == ["NVLink 5", "InfiniBand NDR"]
    assert [path.name for path in found.write_astra_sim(tmp_path / "c")] == [
        "system.json",
        "network.yml",
        "remote_memory.json",
    ]
    with pytest.raises(OutputError):
        found.write_astra_sim(tmp_path / "c")
    assert repr(hespas.load_system("dgx-b200")) == "<SystemResult: dgx-b200, 8xany B200-SXM>"


def test_the_list_names_systems() -> None:
    done = CliRunner().invoke(app, ["hardware", "list"])
    assert done.exit_code == 0
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert "any  NVLink 4 450 GB/s, InfiniBand NDR 50 GB/s" in rows["dgx-h100"]
    assert "up to 256" in rows["tpu-v5e"]


PROGRAM = ROOT / "fixtures" / "hlo" / "moe_all_to_all.hlo.txt"


def simulated(folder: Path, *arguments: str | Path) -> dict[str, object]:
    place = folder / "out.json"
    done = CliRunner().invoke(
        app, ["simulate", str(PROGRAM), *map(str, arguments), "--json", str(place), "--overwrite"]
    )
    assert done.exit_code == 0, done.output
    document: dict[str, object] = json.loads(place.read_text())
    return document


def test_a_step_on_a_system_names_it(tmp_path: Path) -> None:
    usual = simulated(tmp_path, "--hardware", "H100-SXM")
    system = simulated(tmp_path, "--system", "dgx-h100")
    assert (usual["system"], system["system"], system["hardware"]) == ("", "dgx-h100", "H100-SXM")
    assert system["step_ns"] == usual["step_ns"]
    (tmp_path / "mine.toml").write_text(run("dgx-h100").stdout.replace("450000000000.0", "45000000000.0"))
    assert simulated(tmp_path, "--system", tmp_path / "mine.toml")["step_ns"] > usual["step_ns"]  # type: ignore[operator]


def test_mode_astra_of_a_system_is_that_of_its_files(tmp_path: Path) -> None:
    configs = tmp_path / "configs"
    assert run("dgx-h100", "--devices", "8", "--to", "astra-sim", configs).exit_code == 0
    files = [
        f"--{name}-config={configs / file}"
        for name, file in (
            ("system", "system.json"),
            ("network", "network.yml"),
            ("memory", "remote_memory.json"),
        )
    ]
    named = simulated(tmp_path, "--mode", "astra", "--system", "dgx-h100")
    assert named["ranks"] == simulated(tmp_path, "--mode", "astra", "--hardware", "H100-SXM", *files)["ranks"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--system", "dgx-h1000"), "no system 'dgx-h1000'"),
        (
            ("--mode", "astra", "--system", "dgx-h100", "--network-config", "n.yml"),
            "cannot be combined",
        ),
    ],
)
def test_systems_that_do_not_fit(arguments: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, ["simulate", str(PROGRAM), *arguments])
    assert done.exit_code == 2
    assert said in done.stderr
