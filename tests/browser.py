"""Pages in headless Chromium, if it is installed: results of scripts, and console messages."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.limits import SAFETY_S

__all__ = ["BROWSER", "FAULTS", "needs_browser", "opened", "seen_by"]

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium to open the page in")

FAULTS = """
const faults = [];
const all = selector => [...document.querySelectorAll(selector)];
const fault = (text, elements) => {
  for (const element of elements) faults.push(`${text}: ${element.outerHTML.slice(0, 120)}`);
};
const titled = svg => svg.getAttribute("role") === "img" && svg.querySelector(":scope > title");
const hasTitle = svg => Boolean(titled(svg) && titled(svg).textContent);
const target = link => document.getElementById(decodeURIComponent(link.hash.slice(1)).split("/")[0]);
const text = field => (field.matches("button") ? field.textContent.trim() : "");
const isNamed = field => text(field) || field.ariaLabel || field.closest("label");
const ids = all("[id]").map(element => element.id);
if (all("main").length !== 1) faults.push("not one main");
fault("svg without a name", all("svg:not(.frame, .mark)").filter(svg => !hasTitle(svg)));
fault("th without scope", all("th").filter(cell => !cell.scope));
fault("link to nothing", all('a[href^="#"]').filter(link => !target(link)));
fault("control without a name", all("button, input, select").filter(field => !isNamed(field)));
fault("scrolled without a keyboard", all(".wide, .drawn, .flame").filter(box => box.tabIndex !== 0));
faults.push(...ids.filter((id, row) => ids.indexOf(id) !== row).map(id => `id twice: ${id}`));
const width = document.documentElement.scrollWidth;
if (width > innerWidth) faults.push(`${width} wide in a window of ${innerWidth}`);
if (performance.getEntriesByType("resource").length) faults.push("loads something");
"""
"""Script that lists what is wrong with any page in ``faults``."""


def opened(page: Path, folder: Path, *, width: int = 1280, options: tuple[str, ...] = ()) -> str:
    """Open a page and return its DOM; messages of the console are errors. ``folder`` is for the browser."""
    assert BROWSER is not None
    switches = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
    done = subprocess.run(
        [BROWSER, *switches, *options, f"--user-data-dir={folder / 'browser'}",
         f"--window-size={width},900", "--virtual-time-budget=8000", page.as_uri()],
        capture_output=True,
        timeout=SAFETY_S,
        check=True,
    )  # fmt: skip
    assert b"CONSOLE" not in done.stderr, done.stderr.decode("utf-8", "replace")
    return done.stdout.decode("utf-8", "replace")


def seen_by(script: str, page: Path, folder: Path, *, width: int = 1280) -> dict[str, Any]:
    """Run a script at the end of a page, and return the object that it makes the title of the document."""
    text = page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>")
    copy = folder / f"seen-{width}.html"
    copy.write_text(text, encoding="utf-8")
    title = re.search(r"<title>(\{.*?\})</title>", opened(copy, folder, width=width), re.DOTALL)
    assert title is not None
    seen: dict[str, Any] = json.loads(unescape(title[1]))
    return seen
