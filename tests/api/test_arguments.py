"""Arguments that a function does not allow are refused as the command line refuses its options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

import hespas
from hespas import api
from hespas.api.arguments import checked
from hespas.cli.convert import app as convert_app
from hespas.cli.main import app as hespas_app
from hespas.cli.validate import app as validate_app
from hespas.graph.errors import UsageError

PROGRAM = Path(__file__).parents[2] / "fixtures" / "stablehlo" / "mlp.mlir"
FUNCTIONS: Mapping[str, Callable[..., object]] = {
    name: function for name in hespas.__all__ if inspect.isfunction(function := getattr(hespas, name))
} | {"simulate_grid": api.simulate_grid, "compare_runs": api.compare_runs}


class Strange:
    """A value that no hint names."""


def keywords() -> Iterator[tuple[str, str]]:
    """Return the name of each public function with each of its parameters."""
    for name, function in FUNCTIONS.items():
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
                yield name, parameter.name


@pytest.mark.parametrize(("name", "keyword"), list(keywords()))
def test_every_keyword_of_every_function_is_checked(name: str, keyword: str) -> None:
    """All that is given is checked before anything is read, also before an argument is found missing."""
    with pytest.raises(UsageError, match=f"`{keyword}"):
        FUNCTIONS[name](**{keyword: Strange()})


@pytest.mark.parametrize(
    ("name", "keyword", "app", "words"),
    [
        ("convert", "missing", convert_app, ["x.mlir", "y.et", "--missing"]),
        ("convert", "granularity", convert_app, ["x.mlir", "y.et", "--granularity"]),
        ("simulate", "missing", hespas_app, ["simulate", "x.mlir", "--missing"]),
        ("simulate", "mode", hespas_app, ["simulate", "x.et", "--mode"]),
        ("simulate", "backend", hespas_app, ["simulate", "x.et", "--backend"]),
        ("estimate", "granularity", hespas_app, ["estimate", "x.mlir", "--granularity"]),
        ("check", "profile", validate_app, ["check", "x.et", "--profile"]),
        ("league", "calibrate", validate_app, ["league", "x.csv", "--calibrate"]),
        ("validate_serving", "calibrate", validate_app, ["serving", "x.csv", "--calibrate"]),
        ("capture", "framework", hespas_app, ["capture", "m:f", "--mesh", "x=2", "--framework"]),
        ("capture", "partitioner", hespas_app, ["capture", "m:f", "--mesh", "x=2", "--partitioner"]),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_alike(
    name: str, keyword: str, app: Typer, words: list[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        FUNCTIONS[name](**{keyword: "nope"})
    done = CliRunner().invoke(app, [*words, "nope"], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    allowed = [
        re.findall(r"'([^']+)'", text.partition("'nope' is not one of ")[2])
        for text in (refused.value.message, done.output)
    ]
    assert set(allowed[0]) == set(allowed[1]) != set()
    assert str(refused.value.hint).startswith(f"`{keyword}=")


@pytest.mark.parametrize(
    ("call", "message", "hint"),
    [
        (lambda: hespas.convert(PROGRAM, "x.et", ranks=3), "`ranks=3` is an int", "pass a range or None"),  # type: ignore[arg-type]
        (lambda: hespas.serve("llama-3-8b", "r.csv"), "`server=llama-3-8b` is a str", "pass a Server"),  # type: ignore[arg-type]
        (lambda: api.Server(model="llama-3-8b", hardware="L4", tp="2"), "`tp=2` is a str", "pass an int"),  # type: ignore[arg-type]
        (lambda: hespas.roundtrip(PROGRAM, jobs=True), "`jobs=True` is a bool", "pass an int"),
    ],
)
def test_messages_name_the_argument_and_what_is_expected(
    call: Callable[[], object], message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as refused:
        call()
    assert (refused.value.message, refused.value.hint) == (message, hint)


def test_a_workload_has_no_profile_to_analyze() -> None:
    with pytest.raises(UsageError, match="`source` is a Workload"):
        hespas.analyze(hespas.read(PROGRAM))  # type: ignore[arg-type]


def test_hints_of_all_functions_resolve_and_stay_visible() -> None:
    for name, function in FUNCTIONS.items():
        assert inspect.unwrap(function) is not function, f"{name} is not checked"
        assert str(inspect.signature(function)) == str(inspect.signature(inspect.unwrap(function)))


def test_numbers_of_other_libraries_and_paths_are_taken() -> None:
    np = pytest.importorskip("numpy")

    @checked()
    def f(count: int, rate: float, flag: bool, name: str, axes: Mapping[str, int] | None = None) -> int:
        return count

    path: Any = Path("x")
    assert f(np.int64(3), np.float32(2.0), np.bool_(True), path, {"dp": np.int32(2)}) == 3
    with pytest.raises(UsageError, match="`axes` is a dict"):
        f(1, 1, True, "x", {"dp": "2"})  # type: ignore[dict-item]
