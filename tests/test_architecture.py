"""Packages, the imports between them, and rules for every module.

The rules are checked on the syntax tree, so a module need not be importable to be checked.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from importlib import import_module
from pathlib import Path
from warnings import catch_warnings, simplefilter

import pytest

from tests.limits import SAFETY_S

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hespas"

MAY_IMPORT: dict[str, frozenset[str]] = {
    "graph": frozenset(),
    "schemas": frozenset(),
    "files": frozenset({"graph"}),
    "report": frozenset({"graph", "files"}),
    "costs": frozenset({"graph"}),
    "programs": frozenset({"graph"}),
    "hardware": frozenset({"graph", "schemas", "files"}),
    "converters": frozenset({"graph", "schemas", "files", "costs", "programs", "measurements"}),
    "generators": frozenset({"graph", "schemas", "files", "costs", "hardware", "operations"}),
    "captures": frozenset({"graph", "schemas", "files", "costs", "programs", "hardware", "converters"}),
    "operations": frozenset({"graph", "costs"}),
    "measurements": frozenset({"graph", "files", "hardware", "operations", "costs"}),
    "estimators": frozenset(
        {"graph", "schemas", "files", "hardware", "costs", "programs", "operations", "measurements"}
    ),
    "fitting": frozenset({"graph", "files", "hardware", "operations", "measurements", "estimators"}),
    "simulator": frozenset({"graph", "schemas", "files", "hardware", "operations", "estimators"}),
    "validators": frozenset(
        {
            "graph",
            "schemas",
            "files",
            "hardware",
            "operations",
            "measurements",
            "estimators",
            "fitting",
            "simulator",
            "converters",
            "generators",
            "report",
        }
    ),
}
MAY_IMPORT["analysis"] = MAY_IMPORT["validators"] | {"costs"}
MAY_IMPORT["studies"] = frozenset(MAY_IMPORT)
MAY_IMPORT["api"] = frozenset(MAY_IMPORT)
MAY_IMPORT["cli"] = frozenset(MAY_IMPORT)
MAY_IMPORT["__main__"] = frozenset({"cli"})
"""Packages that each package may import, besides itself and the version in ``hespas``."""

SHARED_CONVERTERS = frozenset(
    {
        "format",
        "linking",
        "registry",
        "replica_groups",
        "chrome_events",
        "tracks",
        "gpu_trace",
        "measured_ops",
    }
)
"""Modules of ``hespas.converters`` that every format may use."""

HEAVY = ("jax", "jaxlib", "pandas", "pyarrow", "scipy", "sklearn", "torch")
OPTIONAL = frozenset({"jax", "jaxlib", "sklearn", "torch"})
"""What an extra installs: a module that needs it may be absent."""

MAX_MODULE_LINES = 650
MAX_FUNCTION_LINES = 80

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """``hespas.graph.columns`` for its file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(name: str) -> str:
    """``graph`` for ``hespas.graph.columns``; nothing for the package itself."""
    return name.split(".")[1] if "." in name else ""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """List the nodes of a module's syntax tree, which many tests go through."""
    return tuple(ast.walk(tree_of(path)))


@cache
def imports_of(path: Path) -> tuple[tuple[int, str], ...]:
    """List line and full name of everything that a module imports, at its top or in a function."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[tuple[int, str]]:
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def ours(path: Path) -> Iterator[tuple[int, str]]:
    return ((line, name) for line, name in imports_of(path) if name.split(".")[0] == "hespas")


def test_every_package_has_its_imports() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert packages <= set(MAY_IMPORT)


def test_the_contributing_page_has_the_same_imports() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"^\| `hespas/(\w+)` \| .* \| ([^|]*) \|$", table, re.MULTILINE))
    assert named.pop("studies") == "everything but api and cli"
    assert named.pop("api") == "everything but cli"
    assert named.pop("cli") == "everything"
    packages = MAY_IMPORT.keys() - {"studies", "api", "cli", "__main__"}
    assert named == {package: ", ".join(sorted(MAY_IMPORT[package])) or "nothing" for package in packages}


def test_paths_of_the_contributing_page_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:hespas|tests|tools|benchmarks)/[\w./-]+)`", text)
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []


_REFERENCE = re.compile(r":(?:func|class|mod|data|meth|attr):`~?(hespas(?:\.\w+)+)`")
_DOCUMENTED = re.compile(r"`(?:with )?(hespas(?:\.[A-Za-z_]\w*)+)")
_GROUPS = {f"hespas.{group}" for group in ("costs", "estimators", "formats")}
"""Groups of entry points, which documents name like modules."""


def _exists(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: object = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part, getattr(value, "__annotations__", {}).get(part))
            if value is None:
                return False
        return True
    return False


def test_names_in_documents_and_docstrings_exist() -> None:
    named = {
        (path.name, name)
        for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
        for name in _DOCUMENTED.findall(path.read_text(encoding="utf-8"))
        if name not in _GROUPS and ".NAME" not in name
    }
    named |= {
        (name_of(path), name)
        for path in MODULES
        for name in _REFERENCE.findall(path.read_text(encoding="utf-8"))
    }
    assert len(named) > 100
    with catch_warnings():
        simplefilter("ignore", DeprecationWarning)
        assert sorted(entry for entry in named if not _exists(entry[1])) == []


def test_imports_go_down_only() -> None:
    wrong: list[str] = []
    for path in MODULES:
        package = package_of(name_of(path))
        if not package:
            continue
        for line, imported in ours(path):
            target = package_of(imported)
            is_package = (PACKAGE / target).is_dir()
            if is_package and target != package and target not in MAY_IMPORT[package]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {package} imports {imported}")
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports in functions and under TYPE_CHECKING count too."""
    known = {name_of(path) for path in MODULES}
    imported = {
        name_of(path): {module_of(name, known) for _, name in ours(path)} - {name_of(path), ""}
        for path in MODULES
        if path.name != "__init__.py"
    }
    assert circles(imported) == []


def module_of(name: str, known: Set[str]) -> str:
    """Return the module of an imported name; empty for a package, whose ``__init__`` imports its modules."""
    parts = name.split(".")
    found = next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in known), "")
    return "" if (ROOT / found.replace(".", "/")).is_dir() else found


def circles(imported: Mapping[str, Set[str]]) -> list[set[str]]:
    """Modules each of which reaches the others."""
    reached = {name: reach(name, imported) for name in imported}
    found: list[set[str]] = []
    for name, beyond in reached.items():
        circle = {other for other in beyond if name in reached.get(other, ())}
        if circle and circle not in found:
            found.append(circle)
    return found


def reach(name: str, imported: Mapping[str, Set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(imported[name])
    while waiting:
        other = waiting.pop()
        if other not in seen:
            seen.add(other)
            waiting += imported.get(other, ())
    return seen


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def test_a_format_never_imports_another() -> None:
    wrong: list[str] = []
    for path in (PACKAGE / "converters").rglob("*.py"):
        own = name_of(path).split(".")[2:3]
        for line, imported in ours(path):
            parts = imported.split(".")
            if parts[1:2] != ["converters"] or len(parts) < 3:
                continue
            is_format = (PACKAGE / "converters" / parts[2]).is_dir() or parts[2:3] == own
            if is_format and parts[2] not in SHARED_CONVERTERS and parts[2:3] != own:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: imports {imported}")
    assert wrong == []


def test_shared_converter_modules_import_no_format() -> None:
    wrong: list[str] = []
    folder = PACKAGE / "converters"
    formats = {path.name for path in folder.iterdir() if path.is_dir()} - SHARED_CONVERTERS
    for path in folder.rglob("*.py"):
        if name_of(path).split(".")[2:3] and name_of(path).split(".")[2] in formats:
            continue
        for line, imported in ours(path):
            if imported.split(".")[1] == "converters" and set(imported.split(".")[2:3]) & formats:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: imports {imported}")
    assert wrong == []


def test_no_module_imports_tests_or_fixtures() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {imported}"
        for path in MODULES
        for line, imported in imports_of(path)
        if imported.split(".")[0] in {"tests", "fixtures", "benchmarks"}
    ]
    assert wrong == []


def declared_public(tree: ast.Module) -> list[str] | None:
    """The literal list ``__all__``, None where there is none."""
    for node in tree.body:
        value = _public_list(node)
        if value is not None:
            return [str(name) for name in ast.literal_eval(value)]
    return None


def _public_list(node: ast.stmt) -> ast.expr | None:
    """The value of ``__all__`` if the statement assigns it."""
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
        assert isinstance(node, ast.Assign | ast.AnnAssign)
        return node.value
    return None


def defined_names(tree: ast.Module) -> set[str]:
    """Names that statements of the module itself make; imports do not count."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                parts = (part for target in targets for part in ast.walk(target))
                names |= {part.id for part in parts if isinstance(part, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case _:
                pass
    return names


def needs_all(tree: ast.Module) -> bool:
    return any(not isinstance(node, ast.Expr) for node in tree.body)


def faults_of_public_names(tree: ast.Module) -> Iterator[str]:
    listed = declared_public(tree)
    if listed is None:
        yield "no __all__"
        return
    public = {name for name in defined_names(tree) if not name.startswith("_")}
    twice = {name for name in listed if listed.count(name) > 1}
    yield from (f"__all__ lists {name} twice" for name in sorted(twice))
    yield from (f"{name} is public and not in __all__: list or underscore it" for name in public - {*listed})
    yield from (f"a {type(node).__name__} stands before __all__" for node in statements_before_all(tree))


def test_public_names_are_listed_first_and_in_full() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in MODULES
        if needs_all(tree_of(path))
        for fault in faults_of_public_names(tree_of(path))
    ]
    assert wrong == []


def test_the_rule_about_public_names_sees_them() -> None:
    broken = "import os\nx = 1\n__all__ = ['a', 'a']\ndef a(): ...\ndef b(): ...\n"
    assert len(list(faults_of_public_names(ast.parse(broken)))) == 4
    assert list(faults_of_public_names(ast.parse("def a(): ..."))) == ["no __all__"]
    assert list(faults_of_public_names(ast.parse("__all__ = ['a']\ndef a(): ...\ndef _b(): ..."))) == []


def statements_before_all(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        if _public_list(node) is not None:
            return
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not isinstance(node, ast.Import | ast.ImportFrom | ast.If | ast.Try):
            yield node


def test_listed_names_exist() -> None:
    wrong: list[str] = []
    for path in MODULES:
        listed = declared_public(tree_of(path)) or []
        try:
            module = import_module(name_of(path))
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in OPTIONAL:
                wrong.append(f"{name_of(path)} needs {error.name}")
            continue
        wrong += [f"{name_of(path)}: {name}" for name in listed if not hasattr(module, name)]
    assert wrong == []


@cache
def long_functions(path: Path) -> Iterator[str]:
    """The parameters of a function that declares options are the table of its options: they are not
    counted.
    """
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            declares = any(
                isinstance(above, ast.Call)
                and isinstance(above.func, ast.Name)
                and above.func.id == "checked"
                for above in node.decorator_list
            )
            first = (node.body[0] if declares else node).lineno
            length = (node.end_lineno or 0) - first + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path.relative_to(ROOT)}: {node.name} has {length} lines"


def test_modules_and_functions_are_small() -> None:
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in MODULES}
    large = [f"{path.relative_to(ROOT)} has {n} lines" for path, n in lines.items() if n > MAX_MODULE_LINES]
    assert large + [fault for path in MODULES for fault in long_functions(path)] == []


def test_only_the_command_line_prints_or_exits() -> None:
    wrong: list[str] = []
    for path in MODULES:
        if package_of(name_of(path)) == "cli":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "sys.exit", "exit", "quit"}:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.func)}")
            if isinstance(node, ast.Raise) and node.exc and "SystemExit" in ast.unparse(node.exc):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: SystemExit")
    assert wrong == []


STARTERS = frozenset({
    "subprocess", "multiprocessing", "concurrent.futures.ProcessPoolExecutor", "concurrent.futures.process",
    "os.fork", "os.forkpty", "os.popen", "os.posix_spawn", "os.posix_spawnp", "os.system",
})  # fmt: skip
"""Modules and functions that start processes."""


def starters_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and name of everything that starts processes."""
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        for name in names:
            if name in STARTERS or name.startswith(tuple(f"{starter}." for starter in STARTERS)):
                yield getattr(node, "lineno", 0), name


def test_one_module_starts_processes() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}; use hespas.files.processes"
        for path in MODULES
        if name_of(path) != "hespas.files.processes"
        for line, name in starters_in(nodes_of(path))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "statement",
    [
        "import subprocess",
        "from multiprocessing.context import get_context",
        "from concurrent.futures import ProcessPoolExecutor",
        "concurrent.futures.ProcessPoolExecutor()",
        "os.system('true')",
    ],
)
def test_the_rule_about_processes_sees_them(statement: str) -> None:
    assert list(starters_in(ast.walk(ast.parse(f"def late():\n    {statement}"))))


def heavy_modules_after(statement: str, heavy: Sequence[str] = HEAVY) -> list[str]:
    """Return the modules of ``heavy`` that a fresh interpreter has loaded after ``statement``."""
    script = f"import sys\n{statement}\nprint([name for name in {tuple(heavy)!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=SAFETY_S,
    )
    assert done.returncode == 0, done.stderr
    return [str(name) for name in ast.literal_eval(done.stdout)]


def test_importing_the_package_and_the_commands_is_cheap() -> None:
    commands = [name_of(path) for path in MODULES if package_of(name_of(path)) == "cli"]
    assert heavy_modules_after(f"import {', '.join(['hespas', 'hespas.graph', *commands])}") == []


_OF_FEW = (
    "hespas.captures.aot.compiler",
    "hespas.converters.chakra.reader",
    "hespas.converters.measured_ops",
)
"""Modules and packages that few commands need."""


@pytest.mark.parametrize("command", ["convert", "main", "validate"])
def test_commands_start_without_what_few_need(command: str) -> None:
    others = ("hespas.simulator", "hespas.generators.llm", "hespas.estimators")
    assert heavy_modules_after(f"import hespas.cli.{command}", (*_OF_FEW, *others)) == []


def test_listing_the_formats_is_cheap() -> None:
    statement = (
        "from hespas.converters.registry import format_names, load_format\n"
        "for name in format_names(): load_format(name)"
    )
    assert heavy_modules_after(statement) == []


_POSSESSIVE = re.compile(r"(?<!\\)(?:[*?}]|\+)\+|\(\?>")
"""A possessive quantifier or an atomic group of a regular expression."""


def _is_pattern(text: str) -> bool:
    return any(mark in text for mark in ("\\s", "\\w", "\\d", "[^", "(?", "\\."))


def lines_with_possessive_patterns(path: Path) -> Iterator[str]:
    documents = {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}
    for node in nodes_of(path):
        if not isinstance(node, ast.Constant) or id(node) in documents:
            continue
        if not isinstance(node.value, str | bytes):
            continue
        text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
        if (_is_pattern(text) or isinstance(node.value, bytes)) and _POSSESSIVE.search(text):
            yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_no_pattern_needs_what_python_3_11_2_runs_wrongly() -> None:
    assert [line for path in MODULES for line in lines_with_possessive_patterns(path)] == []


def test_the_rule_about_patterns_sees_them() -> None:
    wrong = [r"[^,]*+", r"\d++", r"\s?+", r"(?>a|b)", r"\d{1,3}+"]
    right = [r"\*+", r"[^,]*", r"\d+", r"\++x", r"(?:a|b)", "C++"]
    assert [text for text in wrong if not (_is_pattern(text) and _POSSESSIVE.search(text))] == []
    assert [text for text in right if _is_pattern(text) and _POSSESSIVE.search(text)] == []


_REFUSALS = {"FormatError", "UnsupportedError"}


def _remedies(path: Path) -> Iterator[tuple[int, bool]]:
    """Yield the line of each refusal in a module, and True if it has a hint."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _REFUSALS:
            yield node.lineno, any(keyword.arg in {"hint", None} for keyword in node.keywords)


def test_every_refusal_of_a_converter_has_a_hint() -> None:
    found = [
        (path, line, has_remedy)
        for path in sorted((ROOT / "hespas" / "converters").rglob("*.py"))
        for line, has_remedy in _remedies(path)
    ]
    assert len(found) > 100
    assert [f"{path}:{line}" for path, line, has_remedy in found if not has_remedy] == []
