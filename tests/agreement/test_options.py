"""The command line and the Python interface have the same options, defaults and errors."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import pytest
from typer.testing import CliRunner

from hespas import api
from hespas.cli import convert, main, validate
from hespas.cli.terminal import flagged
from hespas.graph.errors import UsageError, exit_code
from hespas.graph.hints import REQUIRED, AtLeast, AtMost, DeclaredOption, check_value, members_of, options_of
from tests.test_untrusted import COMMANDS

FUNCTIONS: Mapping[str, tuple[Callable[..., object], ...]] = {
    "hespas estimate": (api.estimate, api.estimate_table),
    "hespas view": (api.view,),
    "hespas simulate": (api.simulate, api.simulate_grid),
    "hespas analyze": (api.analyze,),
    "hespas capture": (api.capture,),
    "hespas plan": (api.plan,),
    "hespas serve": (api.plan_serving, api.serve),
    "hespas sample": (api.sample,),
    "hespas generate llm": (api.llm_step, api.generate),
    "hespas generate dlrm": (api.dlrm_step, api.generate),
    "hespas generate vit": (api.vit_step, api.generate),
    "hespas generate dit": (api.dit_step, api.generate),
    "hespas generate eager": (api.eager_step, api.generate),
    "hespas generate collectives": (api.collective_benchmark, api.generate),
    "hespas generate random": (api.random_job, api.generate),
    "hespas generate synth": (api.synthesize,),
    "hespas bundle": (api.bundle,),
    "hespas-validate check": (api.check,),
    "hespas-validate roundtrip": (api.roundtrip,),
    "hespas-validate capture": (api.validate_capture,),
    "hespas-validate noise": (api.noise,),
    "hespas-validate privacy": (api.privacy,),
    "hespas-validate conform": (api.conform,),
    "hespas-validate accuracy": (api.accuracy,),
    "hespas-validate calibrate": (api.calibrate, api.suggest_shapes),
    "hespas-validate compare": (api.compare,),
    "hespas-validate league": (api.league,),
    "hespas-validate serving": (api.validate_serving,),
    "hespas-convert": (api.convert,),
}
APPS = {"hespas": main.app, "hespas-convert": convert.app, "hespas-validate": validate.app}
WITHOUT_FUNCTION = frozenset({"hespas estimators", "hespas mcp"})
"""Commands that list something, or offer other commands; those of ``hespas hardware`` are not compared."""
OF_ALL_COMMANDS = frozenset(
    {"--json", "--html", "--overwrite", "--progress", "--verbose", "--debug", "--untrusted", "--limit"}
    | {
        "--help",
        "--open",
        "--max-input-bytes",
        "--allow-programs",
        "--version",
        "--install-completion",
        "--show-completion",
    }
)
OF_THE_COMMAND: Mapping[str, frozenset[str]] = {
    "hespas estimate": frozenset({"--out", "--model-explorer"}),  # functions that write a result
    "hespas plan": frozenset({"--out"}),
    "hespas serve": frozenset({"--out"}),
    "hespas analyze": frozenset({"--report", "--top"}),
    "hespas view": frozenset({"--top", "--class"}),
    "hespas simulate": frozenset({"--compare"}),  # compare_runs
    "hespas generate llm": frozenset({"--row", "--list"}),  # row_of, model_names
    "hespas capture": frozenset({"--program", "--partitioned", "--profile"}),
    "hespas-validate check": frozenset({"--list-rules"}),
    "hespas-validate accuracy": frozenset({"--report"}),
    "hespas-validate league": frozenset({"--report"}),
    "hespas-validate calibrate": frozenset({"--out", "--report", "--end-to-end"}),
    "hespas-convert": frozenset({"--with", "--log-json", "--list-formats"}),  # --with: Rescaling.others
}


def declared_by(command: str) -> dict[str, DeclaredOption]:
    found: dict[str, DeclaredOption] = {}
    for function in reversed(FUNCTIONS[command]):
        found |= options_of(function)
    return found


def parameters() -> Iterator[tuple[str, str]]:
    """Yield each command with each of its options that a function declares."""
    for command in FUNCTIONS:
        for parameter in COMMANDS[command].params:
            if parameter.opts[0] not in OF_ALL_COMMANDS | OF_THE_COMMAND.get(command, frozenset()):
                yield command, parameter.name


def parameter_of(command: str, name: str) -> Any:
    return next(entry for entry in COMMANDS[command].params if entry.name == name)


def test_every_command_is_compared() -> None:
    compared = {name for name in COMMANDS if not name.startswith("hespas hardware")}
    assert compared == FUNCTIONS.keys() | WITHOUT_FUNCTION


@pytest.mark.parametrize("command", FUNCTIONS)
def test_both_have_the_same_options(command: str) -> None:
    names = {name for other, name in parameters() if other == command}
    assert names == declared_by(command).keys()
    stated = {entry.opts[0] for entry in COMMANDS[command].params}
    assert OF_THE_COMMAND.get(command, frozenset()) <= stated


@pytest.mark.parametrize("command", FUNCTIONS)
def test_options_are_keywords_or_fields_of_an_option_class(command: str) -> None:
    for function in FUNCTIONS[command]:
        keywords = inspect.signature(function).parameters
        for name, option in options_of(function).items():
            assert option.parameter in keywords
            if option.kind is not None:
                assert name in inspect.signature(option.kind).parameters


@pytest.mark.parametrize(("command", "name"), list(parameters()))
def test_both_have_the_same_default(command: str, name: str) -> None:
    parameter, option = parameter_of(command, name), declared_by(command)[name]
    if option.default is REQUIRED:
        has_default = option.option.completes == "devices"  # HESPAS_HARDWARE
        assert parameter.required or option.option.is_required is False or has_default
    elif parameter.default in (None, "", []):
        # the function gets nothing, so that its own default holds; a default of several values is in the help
        has_own = option.default not in (None, "", (), {})
        assert not has_own or parameter.multiple or option.option.repeats
    else:
        assert parameter.default == option.default


@pytest.mark.parametrize(("command", "name"), list(parameters()))
def test_messages_show_a_keyword_as_its_option(command: str, name: str) -> None:
    """Other commands' messages name the option too, or leave the keyword as it is."""
    assert flagged(f"`{name}`") in {f"`{name}`", declared_by(command)[name].flag}


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("hespas simulate", "x --jitter=nan", "--jitter nan is not a number"),
        ("hespas capture", "m:f --mesh=x=2 --timeout=nan", "--timeout nan is not a number"),
        ("hespas generate random", "--ranks=8 --p2p-share=nan --dry-run", "--p2p-share nan is not a number"),
    ],
)
def test_messages_name_the_options_of_their_command(command: str, words: str, message: str) -> None:
    program, _, word = command.partition(" ")
    done = CliRunner().invoke(APPS[program], [*word.split(), *words.split()])
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("hespas capture", "m:f --mesh="),
        ("hespas capture", " --mesh=x=2"),
        ("hespas serve", "m --hardware= --requests=r"),
        ("hespas serve", "m --hardware=T4 --requests="),
        ("hespas serve", " --hardware=T4 --requests=poisson:rate=4"),
        ("hespas estimate", "x --hardware="),
        ("hespas-validate calibrate", "--hardware= --table=t --out=o.toml"),
        ("hespas-validate calibrate", "--hardware= --suggest=5 --out=o.csv"),
        ("hespas-validate calibrate", "--hardware= --end-to-end --table=t --out=o.json"),
    ],
)
def test_an_empty_text_of_a_required_option_is_refused(command: str, words: str) -> None:
    program, _, word = command.partition(" ")
    done = CliRunner().invoke(APPS[program], [word, *words.split(" ")])
    assert done.exit_code in {2, 3}, done.output
    assert "error: " in done.output


def wrong_values(option: DeclaredOption) -> Iterator[str]:
    """Yield texts of values that the hint of an option does not allow."""
    waiting: list[object] = [option.hint]
    while waiting:
        hint = waiting.pop()
        if isinstance(hint, AtLeast):
            yield json.dumps(hint.least - 1)
        elif isinstance(hint, AtMost):
            yield json.dumps(hint.most + 1)
        elif get_origin(hint) is Literal:
            yield "nope"
        waiting += [] if get_origin(hint) is Literal else get_args(hint)


def give(command: str, option: DeclaredOption, value: object) -> None:
    """Give a value to the function that has the option, or to the check of its option class."""
    if option.kind is None:
        function = next(entry for entry in FUNCTIONS[command] if option.name in options_of(entry))
        function(**{option.name: value})
    else:
        check_value(option.name, value, option.hint)


def refusals() -> Iterator[tuple[str, str, str]]:
    for command, name in parameters():
        for text in wrong_values(declared_by(command)[name]):
            yield command, name, text


@pytest.mark.parametrize(("command", "name", "text"), list(refusals()))
def test_both_refuse_the_same_values(command: str, name: str, text: str) -> None:
    option, flag = declared_by(command)[name], parameter_of(command, name).opts[0]
    value: object = text if text == "nope" else json.loads(text)
    with pytest.raises(UsageError, match=f"`{name}=") as refused:
        give(command, option, value)
    program, _, word = command.partition(" ")
    words = [*word.split(), f"{flag}={text}"]
    done = CliRunner().invoke(APPS[program], words, env={"COLUMNS": "400"})
    assert done.exit_code == exit_code(refused.value) == 2, done.output
    assert f"Invalid value for '{flag}'" in done.output
    allowed = [
        str(choice)
        for hint in members_of(option.hint)
        if get_origin(hint) is Literal
        for choice in get_args(hint)
    ]
    for choice in allowed if text == "nope" else ():
        assert repr(choice) in str(refused.value)
        assert repr(choice) in done.output


def test_hundreds_of_options_are_compared() -> None:
    assert len(list(parameters())) > 150
    assert len(list(refusals())) > 50
