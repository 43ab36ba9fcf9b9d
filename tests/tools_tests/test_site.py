"""Documentation site: it builds strictly, works offline, and covers all options and public names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import hespas
import hespas.api
from hespas.cli import convert, main, validate
from tools.examples import examples
from tools.generate import documents_with_commands
from tools.site_pages import command_pages, root_pages, schema_page

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LOADED = re.compile(r"<(?:script|img|iframe)[^>]*\ssrc=\"([^\"]+)\"|<link[^>]*\shref=\"([^\"]+)\"[^>]*>")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_pages_load_nothing_from_the_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        for found in _LOADED.finditer(page.read_text("utf-8")):
            address = found[1] or found[2]
            assert not address.startswith(("http:", "https:", "//")), f"{page.name}: {found[0]}"


def test_pages_have_a_main_part_and_named_pictures(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        assert "<main" in text, page
        assert all("alt=" in image for image in re.findall(r"<img[^>]*>", text)), page
        assert "<th>" not in text, page  # heads of columns state their scope
    for name in ("op-graph", "rank-class", "estimate", "exposed"):
        text = (site / "concepts" / f"{name}.html").read_text("utf-8")
        assert f'<title id="{name}-title">' in text


def test_the_search_index_is_loaded_without_a_server(site: Path) -> None:
    assert "var __index" in (site / "search" / "search_index.js").read_text("utf-8")[:100]


def test_every_public_name_has_an_entry(site: Path) -> None:
    text = "".join(page.read_text("utf-8") for page in (site / "reference" / "python").glob("*.html"))
    shown = set(re.findall(r'<h[2-4] id="hespas\.(?:api\.)?(\w+)"', text))
    assert {*hespas.__all__, *hespas.api.__all__} - {"__version__"} <= shown


def _below(words: str, command: Any) -> dict[str, Any]:
    members: dict[str, Any] = getattr(command, "commands", {})
    if not members:
        return {words: command}
    shown = {name: member for name, member in members.items() if not member.hidden}
    return {
        key: leaf for name, member in shown.items() for key, leaf in _below(f"{words}-{name}", member).items()
    }


@pytest.mark.parametrize(
    ("program", "app"),
    [("hespas", main.app), ("hespas-convert", convert.app), ("hespas-validate", validate.app)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_option_is_on_the_page_of_its_command(program: str, app: typer.Typer) -> None:
    pages = command_pages()
    for words, command in _below(program, typer.main.get_command(app)).items():
        page = pages[f"reference/commands/{words}.md"]
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert re.search(rf"`{re.escape(parameter.opts[0])}[ `]", page), (
                    f"{words} {parameter.opts[0]}"
                )


def test_every_schema_is_on_the_page() -> None:
    page = schema_page()
    for path in (ROOT / "hespas" / "schemas").glob("*.schema.json"):
        assert f"]({path.name})" in page


def _anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", re.sub(_FENCE, "", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_of_documents_in_the_root_lead_somewhere(name: str) -> None:
    for address in _LINK.findall(re.sub(_FENCE, "", (ROOT / name).read_text("utf-8"))):
        path, _, anchor = address.partition("#")
        if path.startswith("https:"):
            continue
        target = ROOT / (path or name)
        assert target.exists(), address
        if anchor:
            assert anchor in _anchors(target.read_text("utf-8")), address


def test_documents_of_the_root_link_to_pages_of_the_site() -> None:
    pages = root_pages()
    assert set(pages) == {"contributing.md", "changelog.md", "security.md"}
    assert all("](docs/" not in text for text in pages.values())


def test_code_of_the_documents_is_executed() -> None:
    """A file of Python or TOML is used by a command below it, or by a test that names the page."""
    for path in documents_with_commands():
        text = path.read_text("utf-8")
        used = {name for example in examples(text) for name, _ in example.files}
        for fence in _FENCE.finditer(text):
            language, body = fence[1].split(" ")[0], fence[2]
            if language in {"python", "toml"}:
                named = re.match(r"# ([\w.-]+)\n", body)
                assert named, f"{path.name}: a block of {language} has no file name"
                assert named[1] in used, f"{path.name}: no command follows {named[1]}"
            assert language in {"python", "toml", "console", "sh", "text", "yaml"}, f"{path.name}: {fence[1]}"
