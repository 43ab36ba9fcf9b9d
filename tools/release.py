"""Command that builds a release and tests it in empty environments: ``python -m tools.release [--out dist]
[PYTHON...]``.

The wheel and the source archive are built twice and must be equal. For each interpreter (default: this one),
the wheel is then installed in two new environments:

- With the extra ``stablehlo``, the commands of README.md and of the pages of ``docs`` must print what the
  documents show, in an empty folder per document. The notebooks run there as scripts.
- Without extras, the commands of README.md above its first extra must do so too. On all pages, the first
  command that prints something else must name the extra that it needs.

``--repository URL`` writes the project's address to the metadata of both files, and replaces the relative
links of README.md there by links to this address (``hatch_build.py``).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import unified_diff
from functools import partial
from pathlib import Path

from tools.examples import Example, comparable, examples, run
from tools.generate import DOCUMENTS_AT_ONCE, documents_with_commands
from tools.notebooks import FOLDER

__all__ = ["built", "main", "tried_pages"]

_ROOT = Path(__file__).parents[1]
_EXTRA = "pip install 'hespas["
"""Start of the hint that names an extra."""


def built(folder: Path, repository: str = "") -> dict[str, str]:
    """Build the wheel and the source archive in a folder; return the SHA-256 digest of each."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    environment = os.environ | {"HESPAS_REPOSITORY": repository}
    subprocess.run(command, cwd=_ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def tried_pages(
    python: str, pages: Mapping[str, str], *, has_extras: bool = True
) -> tuple[Counter[str], list[str]]:
    """Run the commands of pages (name -> text) with the package of an interpreter.

    Returns the number of commands by outcome, and the failures: outputs that the page does not show. Without
    extras, a command may need one if its output names it, and so may the commands below it on the page.
    """
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    with ThreadPoolExecutor(DOCUMENTS_AT_ONCE) as pool:
        shown = {name: examples(text) for name, text in pages.items()}
        tried = pool.map(partial(_printed, python), shown.values())
        for (name, page), outputs in zip(shown.items(), tried, strict=True):
            is_extra_missing = False
            for example, output in zip(page, outputs, strict=True):
                if output is None:
                    outcomes[f"skipped ({example.skip_reason})"] += 1
                    continue
                is_same = comparable(output) == comparable(example.output)
                is_extra_missing |= not (is_same or has_extras) and _EXTRA in output
                if is_same or is_extra_missing:
                    outcomes["as documented" if is_same else "without their extra"] += 1
                else:
                    outcomes["failed"] += 1
                    difference = unified_diff(
                        example.output.splitlines(), output.splitlines(), "document", "output", lineterm=""
                    )
                    failures.append("\n".join([f"{name}: $ {example.command}", *difference]))
    return outcomes, failures


def _printed(python: str, page: Sequence[Example]) -> list[str | None]:
    with tempfile.TemporaryDirectory(prefix="hespas-release-") as folder:
        return run(page, Path(folder), python) if page else []


def _installed(python: str, requirement: str, folder: Path) -> str:
    """Install a requirement in a new environment, and return its interpreter."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    program = str(folder / "bin" / "python")
    subprocess.run([program, "-m", "pip", "install", "--quiet", requirement], check=True)
    return program


def _try_out(python: str, wheel: Path) -> None:
    pages = {str(path.relative_to(_ROOT)): path.read_text("utf-8") for path in documents_with_commands()}
    first_screen = {"README.md": pages["README.md"].partition("`stablehlo`")[0]}
    with tempfile.TemporaryDirectory(prefix="hespas-release-") as scratch:
        program = _installed(python, f"{wheel}[stablehlo]", Path(scratch) / "stablehlo")
        _report(f"{python}, hespas[stablehlo]", *tried_pages(program, pages))
        notebooks = sorted(FOLDER.glob("*.py"))
        for notebook in notebooks:
            _run_script(program, notebook)
        sys.stdout.write(f"{python}, hespas[stablehlo]: {len(notebooks)} notebooks\n")
        program = _installed(python, str(wheel), Path(scratch) / "base")
        _report(f"{python}, hespas, first part of README.md", *tried_pages(program, first_screen))
        _report(f"{python}, hespas", *tried_pages(program, pages, has_extras=False))


def _report(title: str, outcomes: Counter[str], failures: Sequence[str]) -> None:
    """Print the outcomes of commands, and exit with the failures if there are any."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    sys.stdout.write(f"{title}: {outcomes.total()} commands: {counts}\n")
    if failures:
        sys.exit("\n\n".join(failures))


def _run_script(program: str, script: Path) -> None:
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    settings["PATH"] = f"{Path(program).parent}{os.pathsep}{settings['PATH']}"
    with tempfile.TemporaryDirectory(prefix="hespas-release-") as folder:
        done = subprocess.run(
            [program, str(script)], cwd=folder, env=settings, capture_output=True, text=True, check=False
        )
    if done.returncode:
        sys.exit(f"{script}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, compare and test the release."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=_ROOT / "dist", help="folder of the built files")
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    parser.add_argument(
        "--repository", default="", metavar="URL", help="write this address of the project to the metadata"
    )
    chosen = parser.parse_args(arguments)
    if chosen.repository and not chosen.repository.startswith("https://"):
        sys.exit(f"--repository {chosen.repository}: use an address such as https://HOST/OWNER/NAME")
    for python in chosen.pythons:
        if shutil.which(python) is None:
            sys.exit(f"{python}: no such interpreter")
    earlier = list(chosen.out.iterdir()) if chosen.out.is_dir() else []
    others = [file.name for file in earlier if not re.fullmatch(r"hespas-.*\.(whl|tar\.gz)", file.name)]
    if others:
        sys.exit(f"{chosen.out} has other files than those of a release, such as {others[0]}")
    for path in earlier:
        path.unlink()
    first = built(chosen.out, chosen.repository)
    with tempfile.TemporaryDirectory() as folder:
        if built(Path(folder), chosen.repository) != first:
            sys.exit("two builds differ")
    for name, digest in first.items():
        sys.stdout.write(f"{name}  {(chosen.out / name).stat().st_size:,} bytes  sha256 {digest}\n")
    for python in chosen.pythons:
        _try_out(python, next(chosen.out.glob("*.whl")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
