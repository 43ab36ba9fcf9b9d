"""Pages of the documentation site that a hook of ``mkdocs.yml`` generates during the build.

The pages are the reference of the command line, from the options that each command declares, the reference of
JSON documents, from their schemas, the notebooks of ``examples``, and the documents of the repository's root.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from hespas.cli import convert, main, validate

__all__ = [
    "command_pages",
    "notebook_pages",
    "on_config",
    "on_files",
    "on_page_content",
    "on_page_markdown",
    "root_pages",
    "schema_page",
]

ROOT = Path(__file__).parents[1]
_ROOT_PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Documents of the root -> their pages."""
_COMMANDS = "reference/commands"
_SCHEMAS_INTRODUCTION = """
`--json FILE` of a command writes one of these documents; `to_json()` of a result in Python returns it. Each
has a JSON schema, which lists the nested objects too. Names have units: `duration_ns`,
`bytes_read`, `flops`. An unknown number is `null`.
"""
_NEEDS = re.compile(r"^(```console) \w+$", re.MULTILINE)
_LINK = re.compile(r"\]\(([\w./-]+\.md)(#[\w-]+)?\)")


def on_config(config: MkDocsConfig) -> None:
    """Add the commands to the navigation, and the selector of versions to a site that `mike` deploys."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    sections = cast("list[dict[str, list[str | dict[str, object]]]]", config["nav"])
    reference = next(section["Reference"] for section in sections if "Reference" in section)
    commands = next(entry for entry in reference if isinstance(entry, dict) and "Command line" in entry)
    pages: list[object] = [f"{_COMMANDS}/index.md"]
    pages += [{" ".join(names): f"{_COMMANDS}/{'-'.join(names)}.md"} for names, _ in _commands()]
    commands["Command line"] = pages


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to the files of the site."""
    pages = command_pages() | root_pages() | notebook_pages() | {"reference/json.md": schema_page()}
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    for path in _schemas():
        files.append(File.generated(config, f"reference/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Remove the package that a fence of commands needs (``console jax``), which Markdown cannot parse."""
    return _NEEDS.sub(r"\1", markdown)


def on_page_content(html: str, **_: object) -> str:
    """Declare the cells of table heads as heads of columns, for screen readers."""
    return re.sub(r"<th(?! scope)(?= |>)", '<th scope="col"', html)


def root_pages() -> dict[str, str]:
    """Return the pages of the documents in the root, whose links lead to pages of the site."""

    def of_site(link: re.Match[str]) -> str:
        path, anchor = link.groups(default="")
        return f"]({_ROOT_PAGES.get(path, path.removeprefix('docs/'))}{anchor})"

    return {page: _LINK.sub(of_site, (ROOT / name).read_text("utf-8")) for name, page in _ROOT_PAGES.items()}


def command_pages() -> dict[str, str]:
    """Return an index of the commands, and a page for each program or command."""
    pages: dict[str, str] = {}
    index = [
        "# Command line\n",
        "The pages are made from the options that each command declares, as `--help` is.\n",
        "| command | task |\n|---|---|",
    ]
    for names, command in _commands():
        name = " ".join(names)
        page = f"{'-'.join(names)}.md"
        summary, *rest = _paragraphs(command.help)
        pages[f"{_COMMANDS}/{page}"] = _command_page(name, command, summary, rest)
        index.append(f"| [`{name}`]({page}) | {_cell(summary)} |")
    index.append(
        "\nEvery command prints its options with `-h`, and its version with `--version`. Shells complete "
        "commands, options and names of devices, systems, models, estimators and formats after "
        "`hespas --install-completion`.\n"
    )
    return {f"{_COMMANDS}/index.md": "\n".join(index)} | pages


def _commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all commands that ``--help`` lists, with their words."""
    for program, app in (
        ("hespas-convert", convert.app),
        ("hespas", main.app),
        ("hespas-validate", validate.app),
    ):
        yield from _below((program,), typer.main.get_command(app))


def _below(names: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield names, command
        return
    for name, member in command.commands.items():
        if not member.hidden:
            yield from _below((*names, name), member)


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(part.split()) for part in (text or "").split("\n\n") if part.strip()]


def _command_page(name: str, command: Any, summary: str, rest: Iterable[str]) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join(
        [name, *(parameter.make_metavar(_context(command)) for parameter in arguments), "[OPTIONS]"]
    )
    examples = [text for text in rest if text.startswith("hespas")]
    parts = [f"# {name}\n", f"{summary}\n", f"```sh\n{usage}\n```\n"]
    parts += [f"{text}\n" for text in rest if text not in examples]
    if examples:
        parts.append("Examples:\n\n```sh\n" + "\n".join(examples) + "\n```\n")
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            panel = getattr(parameter, "rich_help_panel", None)
            panel = panel or ("Arguments" if parameter in arguments else "Options")
            panels.setdefault(panel, []).append(_option_row(command, parameter))
    for panel, rows in panels.items():
        parts.append(f"## {panel}\n\n| option | effect | default |\n|---|---|---|\n" + "\n".join(rows))
        parts.append("")
    if command.epilog:
        parts.append(f"{command.epilog}\n")
    return "\n".join(parts)


def _context(command: Any) -> Any:
    return command.context_class(command, info_name=command.name)


def _option_row(command: Any, parameter: Any) -> str:
    """Return the row of an option: its spellings with its value, its help and its default."""
    is_argument = parameter.param_type_name == "argument"
    is_switch = getattr(parameter, "is_flag", False)
    value = parameter.make_metavar(_context(command)).strip("[]<>")
    *names, last = [value] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    names.append(last if is_argument or is_switch else f"{last} {value}")
    default = parameter.default if parameter.show_default is True else parameter.show_default
    if is_switch:
        default = parameter.opts[0] if default and parameter.secondary_opts else None
    is_shown = default is not False and default not in (None, "", [], ())
    shown = "required" if parameter.required else f"`{default}`" if is_shown else ""
    spelling = ", ".join(f"`{name}`" for name in names)  # pipes in literals need no escape
    return f"| {spelling} | {_cell(parameter.help or '')} | {shown} |"


def _cell(text: str) -> str:
    """Return a text as a cell of a table in Markdown."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def notebook_pages() -> dict[str, str]:
    """Return a page for each notebook of ``examples``, with its outputs."""
    pages: dict[str, str] = {}
    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        parts: list[str] = []
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            source = "".join(cell["source"])
            parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
            parts += [_output_text(output) for output in cell.get("outputs", ())]
        parts.append(f"From the notebook `examples/notebooks/{path.name}`.")
        pages[f"examples/{path.stem}.md"] = "\n\n".join(parts) + "\n"
    return pages


def _output_text(output: Mapping[str, Any]) -> str:
    """Return an output of a cell: its HTML or picture if it has one, else its text."""
    data = output.get("data", {})
    for kind in ("text/html", "image/svg+xml"):
        if kind in data:
            return f"<div>{''.join(data[kind])}</div>"
    text = "".join(output.get("text", data.get("text/plain", ())))
    return f"```text\n{text.rstrip()}\n```"


def _schemas() -> list[Path]:
    return sorted((ROOT / "hespas" / "schemas").glob("*.schema.json"))


def schema_page() -> str:
    """Return the page of the JSON documents: the keys of each, with types, from its schema."""
    parts = [
        "# JSON documents\n",
        _SCHEMAS_INTRODUCTION,
    ]
    for path in _schemas():
        schema: dict[str, Any] = json.loads(path.read_text("utf-8"))
        name = path.name.removesuffix(".schema.json")
        rows = [
            f"| `{key}` | {_type_text(value)} | {_cell(value.get('description', ''))} |"
            for key, value in schema.get("properties", {}).items()
        ]
        parts.append(
            f"## {name}\n\n{_cell(schema.get('title', name))}. Schema: [{path.name}]({path.name}).\n"
        )
        parts.append("| key | type | content |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _type_text(schema: Mapping[str, Any]) -> str:
    """Return the type of a key in words."""
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type_text(part) for part in schema["anyOf"]))
    if "$ref" in schema:
        return f"object `{schema['$ref'].rpartition('/')[2]}`"
    kind: str | list[str] = schema.get("type", "any value")
    if isinstance(kind, list):
        return " or ".join(kind)
    return f"list of {_type_text(schema['items'])}" if kind == "array" and "items" in schema else str(kind)
