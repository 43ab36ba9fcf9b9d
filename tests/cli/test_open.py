"""``--open``: pages in the browser, timelines in the Perfetto UI."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from hespas.cli import browser
from hespas.cli.convert import app as convert_app
from hespas.cli.main import app
from hespas.graph.errors import OutputError

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "fixtures" / "stablehlo" / "mlp.mlir"


class Browser:
    """Browser that loads what the Perfetto UI would load."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.loaded: list[bytes] = []
        self.origins: list[str | None] = []
        self.other = 0
        self.loads = True
        self.loader = threading.Thread()

    def open(self, address: str) -> bool:
        self.addresses.append(address)
        if self.loads and address.startswith(browser.UI):
            self.loader = threading.Thread(target=self.load, args=[address.partition("?url=")[2]])
            self.loader.start()
        return True

    def load(self, address: str) -> None:
        folder = address.rpartition("/")[0]
        try:
            urllib.request.urlopen(f"{folder}/other.json")
        except urllib.error.HTTPError as error:
            self.other = error.code
        with urllib.request.urlopen(address) as answer:
            self.origins.append(answer.headers["Access-Control-Allow-Origin"])
            self.loaded.append(answer.read())


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Browser:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(browser, "PORT", free.getsockname()[1])
    found = Browser()
    monkeypatch.setattr(webbrowser, "open", found.open)
    return found


def test_a_timeline_is_loaded_by_the_perfetto_ui(opened: Browser, tmp_path: Path) -> None:
    trace = tmp_path / "my #1 step?%20.json"
    words = ["simulate", str(PROGRAM), "--hardware", "H100-SXM", "--timeline", str(trace), "--open", "-q"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    # The Perfetto UI decodes the address, so its path has no encoded characters.
    assert opened.addresses[0].endswith(f":{browser.PORT}/my__1_step__20.json")
    opened.loader.join()  # the server ends when all is sent, maybe before it is read
    assert opened.loaded == [trace.read_bytes()]
    assert opened.origins == ["https://ui.perfetto.dev"]
    assert opened.other == 404


def test_a_load_that_is_cancelled(opened: Browser, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "step.json"
    with trace.open("wb") as stream:
        stream.truncate(64 << 20)

    def cancel_then_load(address: str) -> None:
        with socket.create_connection(("127.0.0.1", browser.PORT)) as connection:
            connection.sendall(b"GET /step.json HTTP/1.0\r\n\r\n")
            connection.recv(1)
        Browser.load(opened, address)

    opened.load = cancel_then_load  # type: ignore[method-assign]
    browser.open_timeline(trace)
    opened.loader.join()
    assert [len(content) for content in opened.loaded] == [64 << 20]
    assert capfd.readouterr().err == ""


def test_a_page_is_opened_in_the_browser(opened: Browser, tmp_path: Path) -> None:
    report = tmp_path / "report"
    words = ["simulate", str(PROGRAM), "--hardware", "H100-SXM", "--report", str(report), "--open", "-q"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert opened.addresses == [(report / "index.html").as_uri()]


def test_nothing_to_open_is_refused_before_the_work(opened: Browser, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["simulate", str(tmp_path / "none.mlir"), "--open"])
    assert done.exit_code == 2
    assert "writes no page and no timeline" in done.stderr
    assert opened.addresses == []


@pytest.mark.parametrize(
    ("application", "words", "options"),
    [
        (app, ["simulate", str(PROGRAM), "--hardware", "H100-SXM", "--timeline", "step.csv"], "--timeline"),
        (app, ["generate", "random", "--ranks", "2", "--out", "step.json"], "--html"),
        (convert_app, [str(PROGRAM), "step.json"], "DST"),
    ],
)
def test_files_that_are_no_timeline(
    opened: Browser, application: Typer, words: list[str], options: str, tmp_path: Path
) -> None:
    words[-1] = str(tmp_path / words[-1])
    done = CliRunner().invoke(application, [*words, "--open"])
    assert done.exit_code == 2, done.output
    assert "writes no page and no timeline" in done.stderr
    assert f"add {options}" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert opened.addresses == []


def test_commands_without_pages_and_timelines() -> None:
    for words in (["estimate", str(PROGRAM), "--hardware", "H100-SXM"], ["hardware", "list"]):
        done = CliRunner().invoke(app, [*words, "--open"])
        assert done.exit_code == 2
        assert "No such option: --open" in done.stderr


def test_a_port_in_use_and_a_browser_that_loads_nothing(opened: Browser, tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    trace.write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", browser.PORT))
        taken.listen()
        with pytest.raises(OutputError, match="cannot be served on port"):
            browser.open_timeline(trace)
    opened.loads = False
    with pytest.raises(OutputError, match=r"was not loaded in 0\.05 s"):
        browser.open_timeline(trace, wait_s=0.05)
