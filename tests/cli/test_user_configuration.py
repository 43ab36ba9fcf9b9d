"""Devices, systems and defaults of the user's configuration folder, and lists of devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import hespas
from hespas.cli.main import app
from hespas.files.user_folders import cache_folder, config_folder, default_hardware
from hespas.graph.errors import FormatError, UsageError
from hespas.hardware import device_to_toml, load_device, load_system, system_to_toml

_PROGRAM = Path(__file__).parents[2] / "fixtures" / "stablehlo" / "mlp.mlir"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration folder with one device and one system."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("HESPAS_HARDWARE", raising=False)
    own = tmp_path / "hespas"
    for name in ("devices", "systems"):
        (own / name).mkdir(parents=True)
    device = device_to_toml(load_device("H100-SXM")).replace('name = "H100-SXM"', 'name = "lab-gpu"', 1)
    lines = ['aliases = ["lab"]' if line.startswith("aliases") else line for line in device.splitlines()]
    (own / "devices" / "lab-gpu.toml").write_text("\n".join(lines))
    system = system_to_toml(load_system("dgx-h100")).replace('name = "dgx-h100"', 'name = "lab-rack"', 1)
    lines = ["aliases = []" if line.startswith("aliases") else line for line in system.splitlines()]
    (own / "systems" / "lab-rack.toml").write_text("\n".join(lines))
    return own


def _estimate(*options: str) -> Result:
    return CliRunner().invoke(app, ["estimate", str(_PROGRAM), "--quiet", *options])


def test_own_devices_and_systems_by_name(folder: Path) -> None:
    assert load_device("lab-gpu").name == load_device("LAB").name == "lab-gpu"
    assert load_system("lab-rack").name == "lab-rack"
    assert "lab-gpu" in hespas.list_devices().columns["device"]
    assert "lab-rack" in hespas.list_systems().columns["system"]
    by_name, by_path = (
        _estimate("--hardware", "lab-gpu"),
        _estimate("--hardware", str(folder / "devices" / "lab-gpu.toml")),
    )
    assert by_name.exit_code == by_path.exit_code == 0
    assert by_name.stdout.replace("lab-gpu", "") == by_path.stdout.replace(
        str(folder / "devices" / "lab-gpu.toml"), ""
    ).replace("lab-gpu", "")


def test_own_file_with_a_shipped_name(folder: Path) -> None:
    (folder / "devices" / "B200-SXM.toml").write_text(device_to_toml(load_device("B200-SXM")))
    with pytest.raises(UsageError, match="ships with Hespas, and a file"):
        load_device("B200-SXM")


def test_default_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = _estimate()
    assert missing.exit_code == 2
    assert "--hardware is required" in missing.stderr
    assert "HESPAS_HARDWARE" in missing.stderr
    (folder / "config.toml").write_text('hardware = "lab-gpu"\n')
    assert _estimate().stdout == _estimate("--hardware", "lab-gpu").stdout
    monkeypatch.setenv("HESPAS_HARDWARE", "B200-SXM")
    assert _estimate().stdout == _estimate("--hardware", "B200-SXM").stdout
    assert _estimate("--hardware", "lab-gpu").stdout != _estimate().stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('hardwar = "H100-SXM"', "unknown key 'hardwar'"),
        ("hardware = 100", "is not a text"),
        ("hardware", "not TOML"),
    ],
)
def test_damaged_configuration(folder: Path, text: str, message: str) -> None:
    (folder / "config.toml").write_text(text)
    with pytest.raises(FormatError, match=message):
        default_hardware()
    done = _estimate()
    assert done.exit_code == 3
    assert message in done.stderr
    assert _estimate("--hardware", "H100-SXM").exit_code == 0


def test_lists_of_devices() -> None:
    assert (
        _estimate("--hardware", "H100-SXM,B200-SXM").stdout
        == _estimate("--hardware", "H100-SXM", "--hardware", "B200-SXM").stdout
    )


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert cache_folder("league") == tmp_path / ".cache" / "hespas" / "league"
    assert config_folder() == tmp_path / ".config" / "hespas"
