"""Functions reject the same arguments as the command line rejects options."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
from typer import Typer
from typer.testing import CliRunner

import hespas
from hespas import api, simulator
from hespas.api.arguments import checked
from hespas.cli.convert import app as convert_app
from hespas.cli.main import app as hespas_app
from hespas.cli.validate import app as validate_app
from hespas.converters import ReadOptions
from hespas.generators.llm import Model, load_model
from hespas.graph.errors import UsageError
from hespas.graph.hints import AtLeast, is_option_class
from hespas.hardware import System, load_system
from hespas.validators.checker import CheckOptions

PROGRAM = Path(__file__).parents[2] / "fixtures" / "stablehlo" / "mlp.mlir"
FUNCTIONS: Mapping[str, Callable[..., object]] = {
    name: function for name in hespas.__all__ if inspect.isfunction(function := getattr(hespas, name))
} | {
    "simulate_grid": api.simulate_grid,
    "compare_runs": api.compare_runs,
    "read_profiles": api.read_profiles,
}


class Strange:
    """A value of a type that no hint names."""


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
        ("convert", "on_unknown", convert_app, ["x.mlir", "y.et", "--missing"]),
        ("convert", "granularity", convert_app, ["x.mlir", "y.et", "--granularity"]),
        ("simulate", "on_unknown", hespas_app, ["simulate", "x.mlir", "--missing"]),
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
        if not inspect.signature(function).parameters:
            continue
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


def members_of(hint: object) -> Iterator[object]:
    """Return the classes and literals that a hint names, without bounds."""
    if get_origin(hint) is Annotated:
        yield from members_of(get_args(hint)[0])
    elif get_origin(hint) is Literal or not get_args(hint):
        yield hint
    else:
        for member in get_args(hint):
            yield from members_of(member)


def hints_of(function: Callable[..., object]) -> Callable[[], Mapping[str, object]] | None:
    return inspect.getclosurevars(function).nonlocals.get("hints")


def checked_hints(name: str) -> Mapping[str, object] | None:
    """Return the resolved hints of a checked function of ``api``, and None for anything else."""
    function = getattr(api, name)
    if not inspect.isfunction(function) or inspect.unwrap(function) is function:
        return None
    while hints_of(function) is None and hasattr(function, "__wrapped__"):
        function = getattr(function, "__wrapped__")  # noqa: B009 - of a function that accepts deprecated arguments
    hints = hints_of(function)
    return None if hints is None else hints()


def option_classes() -> dict[type, tuple[str, str]]:
    """Return the option classes in the hints of the checked functions of ``api``, each with a function and
    its parameter. Simulators are the classes that have the methods of the protocol.
    """
    exported = (getattr(simulator, name) for name in simulator.__all__)
    simulators = [each for each in exported if isinstance(each, type) and hasattr(each, "run")]
    named: dict[type, tuple[str, str]] = {}
    for name in api.__all__:
        for parameter, hint in (checked_hints(name) or {}).items():
            for member in members_of(hint):
                if parameter == "return" or not inspect.isclass(member) or issubclass(member, api.Result):
                    continue
                if dataclasses.is_dataclass(member):
                    get_type_hints(member)  # fails where an option class would not be checked
                kinds = simulators if member is simulator.Simulator else [member]
                named.update({kind: (name, parameter) for kind in kinds if is_option_class(kind)})
    return named


OPTIONS = option_classes()
NEGATIVE = {(System, "max_devices"), (System, "devices")}
"""Fields of whole numbers where -1 is unknown."""


def settings_of(kind: type, **changes: object) -> object:
    """Return an instance with changed fields; fields without defaults get a small value of their hint."""
    if kind is System:
        return dataclasses.replace(load_system("dgx-h100"), **changes)  # type: ignore[arg-type]
    if kind is Model:
        return dataclasses.replace(load_model("llama-3-8b"), **changes)  # type: ignore[arg-type]
    samples: dict[object, object] = {str: "x", Path: Path("x"), Mapping: {}, tuple: ()}
    hints = get_type_hints(kind)
    stated: dict[str, object] = {}
    for each in dataclasses.fields(kind):
        if each.default is each.default_factory is dataclasses.MISSING:
            member = next(members_of(hints[each.name]))
            outer = get_origin(hints[each.name])
            stated[each.name] = samples.get(outer, samples.get(member, {}))
    return kind(**stated | changes)


def refused_values() -> Iterator[tuple[type, str, object]]:
    """Return wrong values of each field of each option class."""
    for kind in OPTIONS:
        for name, hint in get_type_hints(kind).items():
            members = list(members_of(hint))
            yield kind, name, Strange()
            if str not in members:
                yield kind, name, "nope"
            if bool not in members:
                yield kind, name, True
            if int in members:
                yield kind, name, 1.5
            if hint in {int, int | None} and (kind, name) not in NEGATIVE:
                yield kind, name, -3


def test_option_classes_of_all_functions_are_known() -> None:
    names = {kind.__name__ for kind in OPTIONS}
    assert names >= {
        "ReadOptions", "WriteOptions", "CheckOptions", "JobScheduler", "ListScheduler", "Server", "Rescaling",
        "WriteSharding", "FitMemory",
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "field", "value"), list(refused_values()))
def test_every_field_of_every_option_class_is_checked(kind: type, field: str, value: object) -> None:
    """Refused where the object is made, or by the function that receives it before anything is read."""
    function, parameter = OPTIONS[kind]
    with pytest.raises(UsageError, match=f"`{field}"):
        getattr(api, function)(**{parameter: settings_of(kind, **{field: value})})


def test_functions_that_take_options_are_checked() -> None:
    kinds = {kind.__name__ for kind in OPTIONS} - {"System"}
    for name in api.__all__:
        function = getattr(api, name)
        if inspect.isfunction(function) and checked_hints(name) is None:
            taken = " ".join(str(each.annotation) for each in inspect.signature(function).parameters.values())
            assert not kinds & set(re.findall(r"\w+", taken)), f"{name} is not checked"


@pytest.mark.parametrize(
    ("call", "message", "hint"),
    [
        (
            lambda: hespas.check(PROGRAM, profile="astra-sim", options=CheckOptions(queues_per_dim=0)),
            "`queues_per_dim=0` is less than 1",
            "`queues_per_dim=1` or more",
        ),
        (
            lambda: hespas.read(PROGRAM, options=ReadOptions(dims={"a": "x"})),  # type: ignore[dict-item]
            "`dims` is a dict",
            "pass a mapping of a str to an int",
        ),
        (lambda: hespas.convert(PROGRAM, "x.et", jobs=0), "`jobs=0` is less than 1", "`jobs=1` or more"),
        (
            lambda: simulator.JobScheduler(stragglers={0: 2.0}),  # type: ignore[arg-type]
            "`stragglers` is a dict",
            "pass a tuple of a tuple of an int or a float",
        ),
    ],
)
def test_messages_name_the_option_and_its_bound(call: Callable[[], object], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        call()
    assert (refused.value.message, refused.value.hint) == (message, hint)


def test_bounds_in_unions_and_mappings_are_checked() -> None:
    @checked()
    def f(
        count: Annotated[int, AtLeast(2)] | None = None, sizes: Mapping[str, Annotated[int, AtLeast(1)]] = {}
    ) -> int:
        return 1

    assert f() == f(None) == f(2, {"dp": 1}) == 1
    with pytest.raises(UsageError, match="`count=1` is less than 2"):
        f(1)
    with pytest.raises(UsageError, match=r"`sizes\['dp'\]=0` is less than 1"):
        f(sizes={"dp": 0})
