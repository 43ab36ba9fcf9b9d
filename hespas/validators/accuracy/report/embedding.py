"""Scripts and data inside a page: nothing in them ends the element they stand in."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from hespas.graph.errors import MissingExtraError

__all__ = ["json_for_script", "plotly_script"]

_ESCAPES = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\N{LINE SEPARATOR}": "\\u2028",
    "\N{PARAGRAPH SEPARATOR}": "\\u2029",
}


class _PlotlyOffline(Protocol):
    """What is used of ``plotly.offline``, which ships no types."""

    def get_plotlyjs(self) -> str: ...


def json_for_script(document: bytes) -> str:
    """JSON for a ``script`` element that means the same: without ``<``, ``>``, ``&``, U+2028 and U+2029."""
    text = document.decode("utf-8")
    for letter, escape in _ESCAPES.items():
        text = text.replace(letter, escape)
    return text


def plotly_script() -> str:
    """The text of plotly.js as the installed plotly package brings it along.

    Raises ``MissingExtraError`` where that is not installed.
    """
    try:
        offline = cast("_PlotlyOffline", import_module("plotly.offline"))
    except ImportError as error:
        raise MissingExtraError("the HTML report", "report") from error
    # Inside a string or a pattern of the script, "<\/" means "</".
    return offline.get_plotlyjs().replace("</script", "<\\/script").replace("<!--", "<\\!--")
