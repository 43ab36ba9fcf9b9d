"""Notebooks of ``examples/notebooks`` with their outputs: ``python -m tools.notebooks [NAME...]``.

Each notebook is made from the Python file of the same name, which runs as a script too. A line that starts
with ``# %%`` begins a cell; ``# %% [markdown]`` begins a cell of text, whose lines start with ``#``.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["FOLDER", "cells_of", "executed", "main"]

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
_TIMEOUT_S = 600
_MARKDOWN = "# %% [markdown]"


def cells_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield the kind (``markdown`` or ``code``) and the text of each cell of a Python file."""
    for part in re.split(r"^(?=# %%)", source, flags=re.MULTILINE):
        head, _, body = part.partition("\n")
        if not head.startswith("# %%"):
            continue
        if head.strip() == _MARKDOWN:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip("\n").split("\n")]
            yield "markdown", "\n".join(lines)
        else:
            yield "code", body.strip("\n")


def executed(path: Path) -> Any:
    """Return the notebook of a Python file after it ran in an empty folder. Raises the error of its code."""
    v4: Any = import_module("nbformat.v4")
    client: Any = import_module("nbclient").NotebookClient
    cells = [
        v4.new_markdown_cell(text) if kind == "markdown" else v4.new_code_cell(text)
        for kind, text in cells_of(path.read_text(encoding="utf-8"))
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # random ids would change with every run
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client(notebook, timeout=_TIMEOUT_S, resources=resources, record_timing=False).execute()
    notebook.metadata = {"kernelspec": kernel}
    return notebook


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute and write the named notebooks (default: all)."""
    nbformat: Any = import_module("nbformat")
    names = list(sys.argv[1:] if arguments is None else arguments)
    sources = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
    if unknown := set(names) - sources.keys():
        sys.exit(f"no notebook {', '.join(sorted(unknown))}: use {', '.join(sources)}")
    for name, path in sources.items():
        if not names or name in names:
            nbformat.write(executed(path), path.with_suffix(".ipynb"))
            sys.stdout.write(f"{path.with_suffix('.ipynb').name}: written\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
