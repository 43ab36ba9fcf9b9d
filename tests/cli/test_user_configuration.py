"""Devices, systems and defaults of the user's configuration folder, and lists of devices."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("kind", ["folder", "loop", "pipe", "numbers"])
def test_own_files_that_cannot_be_read(folder: Path, kind: str) -> None:
    path = folder / "devices" / "broken.toml"
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("aliases = [1, 2]\n")
    with pytest.raises(FormatError, match=r"broken\.toml: ") as caught:
        load_device("B200-SXM")
    assert caught.value.hint


def test_texts_of_other_encodings_matter_only_where_they_are_used(folder: Path) -> None:
    (folder / "devices" / "latin.toml").write_bytes(b"\xff\xfe")
    assert load_device("lab").name == "lab-gpu"
    with pytest.raises(FormatError, match="not UTF-8"):
        load_device("latin")


def test_own_files_are_named_after_their_content(folder: Path) -> None:
    for name, load in (("devices/lab-gpu", load_device), ("systems/lab-rack", load_system)):
        path = folder / f"{name}.toml"
        path.rename(path.with_stem("renamed"))
        with pytest.raises(FormatError, match=r"in a file named renamed\.toml"):
            load("renamed")
        assert load(path.with_stem("renamed")).name == path.stem


def test_own_files_may_be_links_to_other_folders(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("devices/lab-gpu.toml", "systems/lab-rack.toml", "config.toml"):
        path = folder / name
        if name == "config.toml":
            path.write_text('hardware = "lab"\n')
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    monkeypatch.setenv("HESPAS_UNTRUSTED", "1")
    assert load_device(default_hardware()).name == "lab-gpu"
    assert load_system("lab-rack").name == "lab-rack"


def test_a_damaged_link_is_not_a_missing_file(folder: Path) -> None:
    (folder / "config.toml").symlink_to(folder / "config.toml")
    with pytest.raises(FormatError, match="cannot be read"):
        default_hardware()


def test_users_without_a_home_or_access_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", f"/{'x' * 5000}")
    monkeypatch.delenv("HESPAS_HARDWARE", raising=False)
    assert default_hardware() == ""
    assert load_device("B200-SXM").name == "B200-SXM"

    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert config_folder() == Path("/.config/hespas")
    assert cache_folder("league") == Path("/.cache/hespas/league")
