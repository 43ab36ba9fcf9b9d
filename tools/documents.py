"""What commands that make documents share: their options, and writing what has changed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["ROOT", "document_command"]

ROOT = Path(__file__).parents[1]


def document_command(
    description: str | None, make: Callable[[], Mapping[Path, str]], words: Sequence[str] | None = None
) -> int:
    """Write the documents of ``make`` (path -> text) that have changed, and say which; the exit code.

    With ``--check`` among ``words`` (default: those of the command line) nothing is written, and the code is
    1 where one is not current.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 where a document is not current"
    )
    is_check = parser.parse_args(words).check
    stale = 0
    for path, text in make().items():
        same = path.is_file() and path.read_text("utf-8") == text
        stale += not same
        if not same and not is_check:
            path.write_text(text, encoding="utf-8")
        outcome = "as it was" if same else "not current" if is_check else "brought up to date"
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        sys.stdout.write(f"{shown}: {outcome}\n")
    return int(is_check and stale > 0)
