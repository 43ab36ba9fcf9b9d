"""``hespas estimators``: which models there are, and what those need that cannot be used here."""

from __future__ import annotations

from typing import Annotated

import typer

from hespas.cli.session import DebugOption, command_line, emit
from hespas.cli.text import table_text

__all__ = ["estimators"]


def estimators(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The list as JSON.")] = False,
    debug: Annotated[bool, DebugOption] = False,
) -> None:
    """The estimators: what each is, whether it can be used here, and what to install."""
    with command_line(debug):
        from hespas.estimators.listing import list_estimators

        rows = list_estimators()
        if as_json:
            import json

            from hespas import api

            emit(json.dumps(api.estimators_document(rows), indent=2).split("\n"))
            return
        lines = [(row.name, "yes" if row.available else "no", row.what, row.detail) for row in rows]
        emit(table_text(("estimator", "usable", "what", "detail"), lines, left=(0, 1, 2, 3)))
        for row in rows:
            if row.install and not row.available:
                emit(f"{row.name}: {row.install}")
