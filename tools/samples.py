"""Command that copies the files of ``hespas sample`` from the fixtures: ``python -m tools.samples``."""

from __future__ import annotations

import shutil
from pathlib import Path

from hespas.api.samples import FILES, catalogue

__all__ = ["fixture_of", "main"]

_FIXTURES = Path(__file__).parents[1] / "fixtures"


def fixture_of(file: str) -> Path:
    """Return the fixture that a sample file is a copy of: the only one whose path ends with its path."""
    (fixture,) = (path for path in _FIXTURES.rglob(Path(file).name) if path.as_posix().endswith(f"/{file}"))
    return fixture


def main() -> None:
    """Replace the sample files by their fixtures."""
    shutil.rmtree(FILES, ignore_errors=True)
    for sample in catalogue():
        for file in sample.files:
            target = FILES / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(fixture_of(file), target)


if __name__ == "__main__":
    main()
