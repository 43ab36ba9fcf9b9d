"""Examples and signatures of CONTRIBUTING.md: they run, and agree with the code."""

from __future__ import annotations
import __future__

import ast
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from math import nan
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from hespas.cli.convert import app as convert
from hespas.cli.main import app as hespas
from hespas.cli.validate import app as validate
from hespas.converters import registry as formats
from hespas.estimators import registry as estimators
from hespas.graph import NodeKind
from hespas.validators import checker
from hespas.validators.checker import inputs, rules

ROOT = Path(__file__).parents[1]
_PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
_FENCES = re.findall(r"^```(\w+)\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"# ([\w./-]+\.(?:py|toml))\n")
_FILES = {named[1]: body for _, body in _FENCES if (named := _NAMED.match(body))}
_COMMANDS = [line for language, body in _FENCES if language == "sh" for line in body.splitlines()]
_STUBS = [ast.parse(body) for language, body in _FENCES if language == "pyi"]
_SIGNATURES = [
    node for tree in _STUBS for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
]
_APPS = {"hespas": hespas, "hespas-convert": convert, "hespas-validate": validate}
_MODULES = (
    "hespas.converters.format",
    "hespas.graph",
    "hespas.estimators.interface",
    "hespas.hardware",
    "hespas.validators.checker.job",
    "hespas.validators.checker.rules",
)
_RULE_MODULE = "hespas/validators/checker/rules/single_ranks.py"


def _module(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
    return module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the files of the page and the fixtures, which modules can be imported from."""
    for name in ("mycsv.py", "flat.py", "My-GPU.toml"):
        (tmp_path / name).write_text(_FILES[name], "utf-8")
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _install(folder: Path) -> None:
    """Write what pip writes about a package: its entry points."""
    project = tomllib.loads(_FILES["pyproject.toml"])["project"]
    installed = folder / f"my_extensions-{project['version']}.dist-info"
    installed.mkdir()
    lines = [f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"]
    (installed / "METADATA").write_text("".join(lines), "utf-8")
    groups: dict[str, dict[str, str]] = project["entry-points"]
    points = [
        f"[{group}]\n" + "\n".join(f"{name} = {row[name]}" for name in row) for group, row in groups.items()
    ]
    (installed / "entry_points.txt").write_text("\n".join(points) + "\n", "utf-8")


def _add_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the rule of the page to the table of rules."""
    table = next(body for _, body in _FENCES if body.startswith("RULES"))
    names: dict[str, Any] = vars(rules) | {"single_ranks": _module("single_ranks", _FILES[_RULE_MODULE])}
    exec(table, names)
    added = (*rules.RULES, *(row for row in names["RULES"] if row is not ...))
    for module in (rules, checker, inputs):
        monkeypatch.setattr(module, "RULES", added)


@pytest.mark.parametrize("registered", ["entry points", "tables"])
def test_commands_of_the_page(registered: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if registered == "tables":
        monkeypatch.setitem(formats.BUILTIN, "mycsv", "mycsv:FORMAT")
        monkeypatch.setitem(estimators.BUILTIN, "flat", "flat:Flat")
    else:
        _install(folder)
    _add_rule(monkeypatch)
    ran = 0
    for line in _COMMANDS:
        command, _, expected = line.partition("  # ")
        program, *words = shlex.split(command.partition(" > ")[0])
        if program == "printf":
            subprocess.run(["sh", "-c", command], check=True)
        elif program in _APPS:
            done = CliRunner().invoke(_APPS[program], words, env={"COLUMNS": "200"})
            assert done.exit_code == 0, f"{line}\n{done.output}"
            assert expected, line
            assert expected in done.output, f"{line}\n{done.output}"
            ran += 1
        else:
            assert program == "python", line  # a test, which another test here runs
    assert ran > 10


def test_test_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    _add_rule(monkeypatch)
    module = _module("test_single_ranks", _FILES["tests/validators/checker/test_single_ranks.py"])
    test: Any = module.test_collective_of_one_rank
    [mark] = test.pytestmark
    for groups, expected in mark.args[1]:
        test(groups, expected)


def _real(name: str) -> Any:
    found = [module for module in map(import_module, _MODULES) if hasattr(module, name)]
    assert found, f"{name} is in none of {', '.join(_MODULES)}"
    return getattr(found[-1] if name in vars(checker) else found[0], name)


def _check_function(shown: ast.FunctionDef, owner: Any) -> None:
    stub: dict[str, Any] = {"NodeKind": NodeKind, "nan": nan}
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.unparse(shown), "CONTRIBUTING.md", "exec", flags, dont_inherit=True), stub)
    signatures = set[str]()
    for member in (stub[shown.name], inspect.getattr_static(owner, shown.name)):
        function: Any = getattr(member, "__func__", getattr(member, "fget", member))
        signatures.add(f"{type(member).__name__} {inspect.signature(function)}")
    assert len(signatures) == 1, signatures


@pytest.mark.parametrize("shown", _SIGNATURES, ids=lambda node: node.name)
def test_signatures_of_the_page(shown: ast.ClassDef | ast.FunctionDef) -> None:
    real = _real(shown.name)
    if isinstance(shown, ast.FunctionDef):
        _check_function(shown, sys.modules[real.__module__])
        return
    for member in shown.body:
        if isinstance(member, ast.FunctionDef):
            _check_function(member, real)
        elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            fields = {
                name: str(kind) for row in real.__mro__ for name, kind in inspect.get_annotations(row).items()
            }
            assert fields[member.target.id] == ast.unparse(member.annotation)
