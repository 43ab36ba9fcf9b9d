"""Notebooks: generated from their Python files, and executed without errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.notebooks import FOLDER, cells_of, executed, main

SOURCES = sorted(FOLDER.glob("*.py"))


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


def test_cells_of_a_source() -> None:
    source = '"""Not a cell."""\n# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nx = 1\n\nx\n'
    assert list(cells_of(source)) == [("markdown", "# Title\n\ntext"), ("code", "x = 1\n\nx")]


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_notebooks_have_the_cells_of_their_sources(path: Path) -> None:
    notebook = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert cells == list(cells_of(path.read_text(encoding="utf-8")))
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert outputs
    assert not any(output["output_type"] == "error" for output in outputs)


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_notebooks_run(path: Path) -> None:
    notebook: Any = executed(path)
    assert any(cell.get("outputs") for cell in notebook.cells)


def test_a_notebook_that_does_not_exist() -> None:
    with pytest.raises(SystemExit, match="no notebook share: use astra_sim, calibrate_device"):
        main(["share"])
