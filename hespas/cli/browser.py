"""Opening of results: pages in the browser, timelines in the Perfetto UI."""

from __future__ import annotations

import re
import shutil
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from hespas.cli.terminal import emit
from hespas.graph.errors import OutputError

__all__ = ["PORT", "UI", "open_page", "open_timeline"]

UI = "https://ui.perfetto.dev"
PORT = 9001
"""Port from which the Perfetto UI may load traces
(https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui).
"""
_WAIT_S = 600.0
_PAGES = ("index.html", "report.html")


def open_page(path: Path) -> None:
    """Open a page, or the page of a report folder, in the browser. If there is none, print the address."""
    page = next((path / name for name in _PAGES if (path / name).exists()), path)
    address = page.resolve().as_uri()
    if not webbrowser.open(address):
        emit(f"no browser: open {address}")


class _TraceHandler(BaseHTTPRequestHandler):
    """Handler that sends one file to the Perfetto UI."""

    def __init__(self, trace: Path, sent: threading.Event, *connection: object) -> None:
        self.trace, self.sent = trace, sent
        super().__init__(*connection)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Send the trace; other paths do not exist."""
        if self.path != _served_path(self.trace):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(self.trace.stat().st_size))
        self.send_header("Access-Control-Allow-Origin", UI)
        self.send_header("Cache-Control", "no-cache")
        self.end_headers()
        with suppress(ConnectionError), self.trace.open("rb") as content:
            shutil.copyfileobj(content, self.wfile)
            self.sent.set()

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - name of the base class
        """Print nothing: the address in the browser shows what was requested."""


def _served_path(trace: Path) -> str:
    """Return the path of a trace in its address: its name with characters that need no encoding."""
    return "/" + re.sub(r"[^A-Za-z0-9._-]", "_", trace.name)


def open_timeline(trace: Path, wait_s: float = _WAIT_S) -> None:
    """Open a trace in the Perfetto UI. The browser loads it from this process, which serves that file only,
    to the Perfetto UI on this machine, and waits until it is loaded.

    Raises ``OutputError`` if the port is in use or the trace is not loaded in ``wait_s`` seconds.
    """
    sent = threading.Event()
    handler: Callable[..., _TraceHandler] = partial(_TraceHandler, trace, sent)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", PORT), handler)
    except OSError as error:
        raise OutputError(
            f"cannot be served on port {PORT}: {error.strerror}", path=str(trace),
            hint=f"end the other program on that port, or open the file in {UI}",
        ) from error  # fmt: skip
    address = f"{UI}/#!/?url=http://127.0.0.1:{PORT}{_served_path(trace)}"
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        if not webbrowser.open(address):
            emit(f"no browser: open {address}")
        is_sent = sent.wait(wait_s)
        server.shutdown()
    if not is_sent:
        raise OutputError(
            f"was not loaded in {wait_s:g} s", path=str(trace), hint=f"open the file in {UI} yourself"
        )
