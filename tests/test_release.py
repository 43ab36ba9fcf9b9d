"""Files of a release: one version, one list of requirements, and hooks and actions that run."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling.metadata.core import CoreMetadata, ProjectMetadata
from hatchling.plugin.manager import PluginManager
from packaging.specifiers import SpecifierSet

import hespas
from hespas import __version__
from tools import release

ROOT = Path(__file__).parents[1]
_CONDA_NAMES = {"isal": "python-isal"}
"""Name in the package index -> name in conda-forge, where they differ."""


def document(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_one_version() -> None:
    assert document("CITATION.cff")["version"] == __version__
    assert document("conda/recipe.yaml")["context"]["version"] == __version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)[0]
    assert newest == (__version__, str(document("CITATION.cff")["date-released"]))


def test_pinned_versions_install_on_the_lowest_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lowest = project["requires-python"].removeprefix(">=") + ".0"
    refused: list[str] = []
    for pin in re.findall(r"^.+==.+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE):
        name, _, version = pin.partition("==")
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        python = str(found.metadata.json.get("requires_python", ""))
        if found.version == version and not SpecifierSet(python).contains(lowest):
            refused.append(f"{pin} needs Python {python}")
    assert refused == []


def test_conda_requires_what_the_wheel_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {"python" + project["requires-python"]}
    for requirement in project["dependencies"]:
        name, bounds = re.fullmatch(r"([a-z]+)(.*)", requirement).groups()  # type: ignore[union-attr]
        wanted.add(_CONDA_NAMES.get(name, name) + bounds)
    listed = document("conda/recipe.yaml")["requirements"]["run"]
    assert {entry.replace(" ", "") for entry in listed} == wanted
    scripts = document("conda/recipe.yaml")["build"]["python"]["entry_points"]
    assert dict(entry.split(" = ") for entry in scripts) == project["scripts"]


def test_the_hook_finds_an_invalid_trace(tmp_path: Path) -> None:
    hook = document(".pre-commit-hooks.yaml")[0]
    folder = tmp_path / "traces"
    hespas.generate(hespas.random_job(ranks=2, nodes=20), folder)
    trace = next(folder.glob("*.et"))
    assert re.search(hook["files"], trace.name)
    program, *options = hook["entry"].split()
    assert (program, hook["pass_filenames"]) == ("hespas-validate", False)
    command = [sys.executable, "-c", "from hespas.cli.validate import main; main()", *options, str(folder)]
    assert subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 0
    trace.write_bytes(trace.read_bytes()[:-3])
    assert subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 1


@pytest.mark.skipif(shutil.which("bash") is None, reason="the script of the action needs bash")
def test_the_action_compares_two_programs(tmp_path: Path) -> None:
    script = ROOT / ".github" / "actions" / "predicted-step" / "compare.sh"
    programs = ROOT / "fixtures" / "stablehlo"
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "hespas").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hespas "$@"\n')
    (folder / "hespas").chmod(0o755)
    settings = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HARDWARE": "H100-SXM", "OPTIONS": ""}
    comments = [tmp_path / "changed.md", tmp_path / "new.md"]
    for base, comment in zip((programs / "mlp.mlir", tmp_path / "none"), comments, strict=True):
        words = [str(script), str(base), str(programs / "mlp_train.mlir"), str(comment)]
        subprocess.run(words, cwd=ROOT, env=settings, check=True, capture_output=True)
    changed, new = (comment.read_text(encoding="utf-8") for comment in comments)
    assert re.search(r"^\| before \| [\d.]+ us per step on H100-SXM", changed, re.MULTILINE)
    assert "step" in changed.partition("```")[2]
    assert new.endswith("The file is new.\n")


def test_wheel_and_source_are_reproducible(tmp_path: Path) -> None:
    digests: list[dict[str, str]] = []
    for name in ("first", "second"):
        command = [sys.executable, "-m", "hatchling", "build", "--directory", str(tmp_path / name)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        made = sorted((tmp_path / name).iterdir())
        digests.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in made})
    assert digests[0] == digests[1]
    assert sorted(digests[0]) == [
        f"hespas-{__version__}-py3-none-any.whl", f"hespas-{__version__}.tar.gz",
    ]  # fmt: skip
    wheel = next((tmp_path / "first").glob("*.whl"))
    assert wheel.stat().st_size <= 6_000_000


def built_metadata(root: Path) -> CoreMetadata:
    return ProjectMetadata(str(root), PluginManager()).core


def test_metadata_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HESPAS_REPOSITORY", raising=False)
    core = built_metadata(ROOT)
    assert (core.readme, core.urls) == ((ROOT / "README.md").read_text(encoding="utf-8"), {})
    assert core.dynamic == []


def test_metadata_with_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HESPAS_REPOSITORY", "https://host.example/owner/name/")
    core = built_metadata(ROOT)
    address, tag = "https://host.example/owner/name", f"v{__version__}"
    assert core.urls["Repository"] == address
    assert core.urls["Changelog"] == f"{address}/blob/{tag}/CHANGELOG.md"
    prefixes = {f"{address}/{kind}/{tag}/" for kind in ("blob", "raw")}
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", core.readme)
    assert {image for image, _ in links} == {"", "!"}
    for image, link in links:
        prefix = f"{address}/{'raw' if image else 'blob'}/{tag}/"
        assert link.startswith(prefix), link
        assert (ROOT / link.removeprefix(prefix).partition("#")[0]).exists(), link
    readme = core.readme
    for prefix in prefixes:
        readme = readme.replace(prefix, "")
    assert readme == (ROOT / "README.md").read_text(encoding="utf-8")


def test_an_address_that_is_not_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HESPAS_REPOSITORY", "example")
    with pytest.raises(ValueError, match="HESPAS_REPOSITORY is 'example': use an address such as https://"):
        built_metadata(ROOT)


def test_a_source_archive_keeps_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyproject.toml", "hatch_build.py", "README.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    version_file = tmp_path / "hespas" / "_version.py"
    version_file.parent.mkdir()
    shutil.copyfile(ROOT / "hespas" / "_version.py", version_file)
    lines = ("Metadata-Version: 2.4", "Name: hespas", f"Version: {__version__}")
    link = "Project-URL: Repository, https://host.example/owner/name"
    for stated, expected in (((), {}), ((link,), {"Repository": "https://host.example/owner/name"})):
        (tmp_path / "PKG-INFO").write_text("\n".join([*lines, *stated, "", "[page](docs/page.md)\n"]))
        monkeypatch.setenv("HESPAS_REPOSITORY", "https://host.example/other/name")
        core = built_metadata(tmp_path)
        assert (core.readme, core.urls) == ("[page](docs/page.md)\n", expected)


_PAGE = """
```console
$ env echo one
one
$ pip install hespas
```

```python
# extra.py
import sys

sys.exit("error: it needs more\\n  try: pip install 'hespas[jax]'")
```

```console
$ python extra.py
two
$ cat two.txt
two
```
"""


def test_commands_of_pages_print_what_the_pages_show() -> None:
    pages = {"page.md": _PAGE, "other.md": "No commands."}
    outcomes, failures = release.tried_pages(sys.executable, pages)
    assert outcomes == {"as documented": 1, "skipped (pip commands)": 1, "failed": 2}
    assert [failure.splitlines()[0] for failure in failures] == [
        "page.md: $ python extra.py", "page.md: $ cat two.txt",
    ]  # fmt: skip
    assert failures[0].splitlines()[-3:] == [
        "-two",
        "+error: it needs more",
        "+  try: pip install 'hespas[jax]'",
    ]
    outcomes, failures = release.tried_pages(sys.executable, pages, has_extras=False)
    assert failures == []
    assert outcomes == {"as documented": 1, "skipped (pip commands)": 1, "without their extra": 2}
    unnamed = {"page.md": _PAGE.replace("hespas[jax]", "jax")}
    assert len(release.tried_pages(sys.executable, unnamed, has_extras=False)[1]) == 2


def test_a_release_replaces_no_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "built", pytest.fail)
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "hespas-0.1.0.tar.gz").write_text("an earlier release")
    with pytest.raises(SystemExit, match=r"has other files than those of a release, such as notes\.txt"):
        release.main(["--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="python0: no such interpreter"):
        release.main(["--out", str(tmp_path), "python0"])
    with pytest.raises(SystemExit, match="--repository example: use an address such as https://"):
        release.main(["--out", str(tmp_path), "--repository", "example"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hespas-0.1.0.tar.gz", "notes.txt"]
