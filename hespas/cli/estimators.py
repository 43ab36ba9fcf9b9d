"""``hespas estimators``: which models there are, and what those need that cannot be used here."""

from __future__ import annotations

from hespas.cli import options
from hespas.cli.reports import list_file
from hespas.cli.session import command_line, emit
from hespas.cli.text import table_text

__all__ = ["estimators"]


def estimators(
    json_file: options.ListFile = None,
    *,
    as_json: options.AsJson = False,
    overwrite: options.Overwrite = False,
    debug: options.Debug = False,
) -> None:
    """The estimators: what each is, whether it can be used here, and what to install."""
    with command_line(debug, writes=[json_file]):
        place = list_file(json_file, as_json=as_json, overwrite=overwrite)
        from hespas.estimators.registry import list_estimators

        rows = list_estimators()
        if place:
            from hespas import api

            api.write_json(api.estimators_document(rows), place, overwrite=overwrite)
            return
        lines = [(row.name, "yes" if row.available else "no", row.what, row.detail) for row in rows]
        emit(table_text(("estimator", "usable", "what", "detail"), lines, left=(0, 1, 2, 3)))
        for row in rows:
            if row.install and not row.available:
                emit(f"{row.name}: {row.install}")
