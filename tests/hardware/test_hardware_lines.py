"""Lines of systolic arrays and learned models in hardware files: separate, checked, read back unchanged."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from hespas.estimators.calibrated import FitIndex
from hespas.estimators.systolic.lines import ELEMENTS, LINES_FOLDER, PRODUCTS, read_lines
from hespas.graph.errors import FormatError, OutputError, UsageError
from hespas.hardware import Device, Fit, device_to_toml, load_device, named_device, write_device
from hespas.hardware.device_fits import LINE_FORMS, parameter_fault

V4 = load_device("TPU-v4")
CYCLES = {"t0_ns": 900.0, "cycle_ns": 0.2}


def roofline_of(line: Fit) -> Fit:
    """A fit of the roofline's form of the same class as a line."""
    of_chip = next(fit for fit in V4.fits if fit.form == "roofline")
    return replace(of_chip, kind=line.kind, op=line.op, scheme=line.scheme, variant=line.variant)


def fitted() -> Device:
    lines = read_lines("TPU-v4")[:3]
    return replace(V4, fits_of="", own_fits=tuple(map(roofline_of, lines)), own_lines=lines)


def test_the_forms_are_those_of_the_estimator() -> None:
    assert set(LINE_FORMS) == {PRODUCTS, ELEMENTS}
    shipped = [line for path in sorted(LINES_FOLDER.glob("*.toml")) for line in read_lines(path.stem)]
    assert {line.form for line in shipped} == set(LINE_FORMS), "read, so their weights are in order"


def test_lines_are_read_back_beside_fits_of_the_same_classes(tmp_path: Path) -> None:
    device = fitted()
    assert {fit.key for fit in device.own_fits} == {line.key for line in device.own_lines}
    path = write_device(device, tmp_path / "mine.toml")
    again = load_device(path)
    assert repr((again.own_fits, again.own_lines)) == repr((device.own_fits, device.own_lines))
    assert device_to_toml(again) == path.read_text("utf-8") == device_to_toml(device)


def test_no_other_estimator_sees_lines() -> None:
    device = replace(fitted(), own_fits=())
    assert device.fits == ()
    assert FitIndex.of(device).by_class == {}


def test_a_second_line_of_a_class_is_a_fault(tmp_path: Path) -> None:
    line = read_lines("TPU-v4")[0]
    path = write_device(replace(V4, own_lines=(line, replace(line, seed=9))), tmp_path / "mine.toml")
    with pytest.raises(FormatError, match=r"is stated already in fits\[0\]"):
        load_device(path)


@pytest.mark.parametrize(
    ("form", "change", "name"),
    [
        ("cycles", {"cycle_ns": -0.1}, "cycle_ns"),
        ("cycles", {"cycle_ns": inf}, "cycle_ns"),
        ("cycles", {"cycle_ns": nan}, "cycle_ns"),
        ("cycles", {"compute": 0.5}, "compute"),
        ("cycles", {"long_t0_ns": 4e3}, "long_cycle_ns"),
        ("cycles", {"array_rows": 128.0}, "array_columns"),
        ("cycles", {"array_rows": 0.0, "array_columns": 128.0}, "array_rows"),
        ("cycles", {"array_rows": 1.5, "array_columns": 128.0}, "array_rows"),
        ("cycles", {"t0_ns": 0.0, "cycle_ns": 0.0}, "t0_ns"),
        ("cycles", {"long_t0_ns": 0.0, "long_cycle_ns": 0.0}, "long_t0_ns"),
        ("elements", {}, "cycle_ns"),
    ],
)
def test_a_weight_that_cannot_be_used_is_a_fault(form: str, change: dict[str, float], name: str) -> None:
    assert parameter_fault("cycles", CYCLES) is None
    fault = parameter_fault(form, CYCLES | change)
    assert fault is not None
    assert fault[0] == name


@pytest.mark.parametrize("missing", list(CYCLES))
def test_a_line_states_its_start_and_its_cycles(missing: str) -> None:
    fault = parameter_fault("cycles", {name: CYCLES[name] for name in CYCLES if name != missing})
    assert fault == (
        missing,
        f"missing: a fit of form 'cycles' with {next(iter(CYCLES.keys() - {missing}))} needs it",
    )


def test_learned_models_are_named_relative_to_the_file(tmp_path: Path) -> None:
    card = str(tmp_path / "mine.learned" / "matmul-bf16.json")
    path = write_device(replace(V4, learned_models=(card,)), tmp_path / "mine.toml")
    assert 'learned_models = ["mine.learned/matmul-bf16.json"]' in path.read_text("utf-8").splitlines()
    assert load_device(path).learned_models == (card,)
    (tmp_path / "gone").mkdir()
    with contextlib.chdir(tmp_path / "gone"):
        (tmp_path / "gone").rmdir()
        assert load_device(path).learned_models == (card,)  # an absolute path needs no working folder
    (tmp_path / "elsewhere").mkdir()
    moved = path.rename(tmp_path / "elsewhere" / "mine.toml")
    assert load_device(moved).learned_models == (
        str(tmp_path / "elsewhere" / "mine.learned" / "matmul-bf16.json"),
    )
    far = tmp_path / "elsewhere" / "far.toml"
    with pytest.raises(OutputError, match="can only name learned models within its own folder"):
        write_device(replace(V4, learned_models=(card,)), far)
    assert not far.exists()


@pytest.mark.parametrize(
    ("value", "position", "message"),
    [
        ('["models"]', r"learned_models\[0\]", "the path of a card"),
        ('["a.json", "a.json"]', r"learned_models\[1\]", "stated already"),
        ('["a\\u0000.json"]', r"learned_models\[0\]", "the path of a card"),
        ('"a.json"', "learned_models", "expected a list"),
        ("[1]", r"learned_models\[0\]", "expected a string"),
        ('["/etc/a.json"]', r"learned_models\[0\]", "not within the folder"),
        ('["../a.json"]', r"learned_models\[0\]", "not within the folder"),
        ('["b/../../a.json"]', r"learned_models\[0\]", "not within the folder"),
        ('["b/../a.json"]', r"learned_models\[0\]", "not within the folder"),
        ('["./a.json", "a.json"]', r"learned_models\[1\]", "stated already"),
    ],
)
def test_what_names_no_card_is_a_fault(tmp_path: Path, value: str, position: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"learned_models = {value}\n{device_to_toml(V4)}", "utf-8")
    with pytest.raises(FormatError, match=f"{position}: .*{message}"):
        load_device(path)


def test_a_card_that_leads_out_of_the_folder_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.json").write_text("{}")
    own = tmp_path / "own"
    own.mkdir()
    (own / "a.json").symlink_to(tmp_path / "elsewhere" / "a.json")
    path = own / "mine.toml"
    path.write_text(f'learned_models = ["a.json"]\n{device_to_toml(V4)}', "utf-8")
    with pytest.raises(FormatError, match="not within the folder"):
        load_device(path)


def test_a_device_that_is_called_like_a_path_opens_none(tmp_path: Path) -> None:
    for name in ("../data/TPU-v4", str(LINES_FOLDER / "TPU-v4")):
        assert read_lines(name) == ()
        with pytest.raises(UsageError, match="no device"):
            named_device(f"{name}.toml")
    assert read_lines("TPU-v4")
