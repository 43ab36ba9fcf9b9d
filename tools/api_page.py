"""The page of the Python interface, ``docs/api.md``, from its docstrings: ``python -m tools.api_page``."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ForwardRef, Literal, get_args, get_origin

import hespas
from hespas.api import Result
from hespas.graph.hints import options_of
from tools.documents import document_command

__all__ = ["PAGE", "api_document", "main"]

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
_WIDEST = 100
_SPELLED = {
    "_Path": "str | Path",
    "_Progress": "Callable[[int, int], None]",
    "Value": "Workload | Profile",
    "Rules": "Literal['chakra', 'astra-sim']",
}
"""Private names of types -> the types."""
_INTRODUCTION = """# The Python interface

Made by `python -m tools.api_page` from the docstrings; do not edit.

Each command has one function. It takes paths, or values that were read already, and returns a result. A
result has a summary line (`repr`), a table (`table()`, and `to_pandas()` as a data frame) and the document
that the command writes with `--json` (`to_json()` and `to_dict()`). A table has `to_csv()`, `to_markdown()`,
`to_text()`, `to_records()` and `write_parquet(path)`. A notebook shows the summary line and the first rows of
the table. The keywords that are options of the command, too, are listed with their help.
Errors are those of `hespas.graph.errors`: they state the fault, its position and a fix. Warnings and notes
are added to `diagnostics`, a `hespas.graph.Diagnostics`. `options` of readers and writers are those of
`hespas.converters`.

Names of version 0.1 that have changed are listed under [Deprecated names](#deprecated-names).

```python
import hespas

hespas.check("step.mlir")  # <CheckReport: step.mlir, valid, 0 violations>
workload = hespas.read("step.mlir")  # a value that is read once
hespas.simulate(workload, "H100-SXM").step_ns
hespas.estimate(workload, "H100-SXM").to_pandas()  # one row per operation
hespas.convert(workload, "traces/", hardware="H100-SXM")
report = hespas.accuracy("trace.json.gz", hardware="H100-SXM")
report.write("out")  # report.html, .json, .csv and .md
hespas.calibrate("H100-SXM", table="measured.csv").write("my-h100.toml")
step = hespas.llm_step("llama-3-70b", dp=4, tp=8, pp=4, global_batch=64)
hespas.generate(step, "traces/", hardware="H100-SXM")  # a trace of each rank, and the predicted step
```
"""


_RENAMED = {
    "functions": {
        "hespas.suggest": "hespas.suggest_shapes",
        "hespas.system": "hespas.load_system",
        "hespas.api.step_of": "hespas.api.simulated_step",
        "hespas.api.class_totals": "hespas.api.op_class_summary",
    },
    "classes in `hespas.api`": {
        "Conservation": "ConversionAccount",
        "Dropped": "MergedOps",
        "Parts": "WriteSharding",
        "Preparation": "Lowering",
    },
    "arguments": {
        "missing": "on_unknown",
        "beside": "overlay",
        "against": "baseline",
        "measured": "profiles (join_profile: profile)",
        "with_rows": "per_request",
    },
    "fields of `Server`": {
        "stack": "engine",
        "cache": "kv_cache_dtype",
        "experts": "expert_dtype",
        "memory_share": "gpu_memory_utilization",
        "max_sequences": "max_num_seqs",
        "cache_tokens": "kv_cache_tokens",
        "host_us": "step_overhead_us",
        "request_ms": "request_overhead_ms",
    },
    "`SimulationResult`": {
        "path": "critical_path",
        "links": "network_utilization",
        "statistics": "astra_statistics",
        "external": "astra_reference",
        "low_ns, high_ns": "interval_ns (a pair)",
        "is_mixed": "mixes_recorded_and_estimated",
    },
    "`Analysis`": {"found": "tables", "tables()": "tables_by_name()", "against": "baseline"},
    "reports": {"result": "details, or attributes of the report"},
    "`ServingAccuracyReport`": {"judgement": "errors"},
    "`ServingResult`": {"cache_tokens": "kv_cache_tokens", "with_rows": "per_request"},
    "`CaptureResult`": {"partitioned": "spmd_hlo"},
    "`ProfiledProgram`": {"is_what_ran": "matches_profile", "joined_share": "matched_fraction"},
    "`OpGraph`": {"multiplicity": "executions"},
    "`OpGraph`, `Profile` and its tables": {"*_row": "*_id"},
}
"""Deprecated names by kind -> new names."""


def _plain(doc: str | None) -> str:
    """Return a docstring as Markdown, with literals and references in one pair of backquotes."""
    text = inspect.cleandoc(doc or "")
    text = re.sub(r":\w+:`~?([^`]+)`", lambda found: f"`{found[1].rpartition('.')[2]}`", text)
    return text.replace("``", "`")


def _type_text(hint: Any) -> str:
    """Return a type as it is written, without declarations of options and bounds."""
    origin, inside = get_origin(hint), get_args(hint)
    if isinstance(hint, ForwardRef):
        return hint.__forward_arg__
    if hint is type(None):
        return "None"
    if origin is Annotated:
        return _type_text(inside[0])
    if origin in {typing.Union, UnionType}:
        return " | ".join(map(_type_text, inside))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, inside))}]"
    name: str = getattr(origin or hint, "__name__", str(hint))
    return (
        f"{name}[{', '.join('...' if part is ... else _type_text(part) for part in inside)}]"
        if inside
        else name
    )


def _stated_type(function: Any, annotation: str) -> str:
    """Return the type of a parameter; a name of a declared option is replaced by its type."""
    hint = vars(sys.modules[function.__module__]).get(annotation)
    return _type_text(hint) if get_origin(hint) is Annotated else annotation


def _options_table(function: Any) -> str:
    """Return the options of a function as a table; empty without one."""
    rows: list[str] = []
    for option in options_of(function).values():
        keyword = option.name if option.kind is None else f"{option.parameter}.{option.name}"
        flags = "" if option.option.is_argument else f"`{option.flags}`"
        text = option.option.help.replace("\n\n", " ").replace("|", "\\|")
        rows.append(f"| `{keyword}` | {flags} | {text} |\n")
    return "".join(["\n| keyword | command line | |\n|---|---|---|\n", *rows]) if rows else ""


def _signature(name: str, function: Any) -> str:
    """Return the signature on one line, or with a line per parameter."""
    signature = inspect.signature(function)
    parts: list[str] = []
    for parameter in signature.parameters.values():
        star = "*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else ""
        has_star = any(part.startswith("*") for part in parts)
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not has_star:
            parts.append("*")
        stated = ""
        if parameter.annotation is not inspect.Parameter.empty:
            stated = f": {_stated_type(function, parameter.annotation)}"
        shown = repr(parameter.default)
        parts.append(
            f"{star}{parameter.name}{stated}"
            + ("" if parameter.default is inspect.Parameter.empty else f" = {shown}")
        )
    after = (
        "" if signature.return_annotation is inspect.Signature.empty else f" -> {signature.return_annotation}"
    )
    for alias, spelled in _SPELLED.items():
        parts = [re.sub(rf"\b{alias}\b", spelled, part) for part in parts]
    line = f"{name}({', '.join(parts)}){after}"
    if len(line) <= _WIDEST:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts if part) + f"){after}"


def _functions() -> Iterator[tuple[str, Any]]:
    for name in hespas.__all__:
        if not name.startswith("_"):
            yield name, getattr(hespas, name)


def _result_classes() -> dict[str, type[Result]]:
    """Return the result classes, in the order of the functions."""
    found: dict[str, type[Result]] = {}
    for _, function in _functions():
        given = str(inspect.signature(function).return_annotation)
        kind = getattr(hespas.api, given, None)
        if isinstance(kind, type) and issubclass(kind, Result):
            found[given] = kind
    return found


def _members(kind: type[Result]) -> Iterator[str]:
    """Yield a line per property and method that the class itself defines."""
    for name, member in vars(kind).items():
        if name.startswith("_") or name in {"headline", "to_json"}:
            continue
        if isinstance(member, property):
            yield f"- `{name}`: {_plain(member.__doc__)}"
        elif inspect.isfunction(member):
            inside = ", ".join(list(inspect.signature(member).parameters)[1:])
            yield f"- `{name}({inside})`: {_plain(member.__doc__)}"


def api_document() -> str:
    """Return the page."""
    parts = [_INTRODUCTION]
    for name, function in _functions():
        signature = _signature(name, function)
        options = _options_table(function) if inspect.isfunction(function) else ""
        doc = f"{_plain(function.__doc__)}\n{options}"
        parts.append(f"## hespas.{name}\n\n```python\n{signature}\n```\n\n{doc}")
    parts.append("## Results\n")
    for name, kind in _result_classes().items():
        fields = ", ".join(f"`{each}`" for each in getattr(kind, "__dataclass_fields__", {}))
        members = "".join(f"{line}\n" for line in _members(kind))
        parts.append(f"### {name}\n\n{_plain(kind.__doc__)}\n\nFields: {fields}.\n\n{members}")
    rows = [
        f"| {kind} | `{old}` | `{new}` |" for kind, names in _RENAMED.items() for old, new in names.items()
    ]
    parts.append(
        "## Deprecated names\n\nThese names work until the next minor version, with a `DeprecationWarning`. "
        "Fields of JSON documents keep\ntheir names.\n\n| of | deprecated | new |\n|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )
    return "\n".join(parts)


def main() -> int:
    """Write the page; return 1 if ``--check`` finds it stale."""
    return document_command(__doc__, lambda: {PAGE: api_document()})


if __name__ == "__main__":
    sys.exit(main())
