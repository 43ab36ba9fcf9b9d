"""Build a release and try it in empty environments: ``python -m tools.release [--out dist] [PYTHON...]``.

The wheel and the source archive are built twice and must be equal. The wheel is then installed with the
extras ``stablehlo`` and ``report`` for each interpreter (default: this one) in an environment of its own. The
commands of README.md and the notebooks, as scripts, are run there in an empty folder.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.notebooks import FOLDER

__all__ = ["built", "main", "readme_commands"]

_ROOT = Path(__file__).parents[1]


def built(folder: Path) -> dict[str, str]:
    """Build the wheel and the source archive in a folder; return the SHA-256 digest of each."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.DEVNULL)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def readme_commands() -> Iterator[str]:
    """Yield the commands of the consoles in README.md, up to a pipe, except installations and ``make``."""
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^\$ (hespas.*)$", block, re.MULTILINE):
            yield line.partition(" | ")[0]


def _try_out(python: str, wheel: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="hespas-release-") as scratch:
        environment, folder = Path(scratch) / "venv", Path(scratch) / "empty"
        folder.mkdir()
        subprocess.run([python, "-m", "venv", str(environment)], check=True)
        programs = environment / "bin"
        pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", f"{wheel}[stablehlo]"]
        subprocess.run(pip, check=True)
        settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        settings["PATH"] = f"{programs}{os.pathsep}{settings['PATH']}"
        commands = [shlex.split(line) for line in readme_commands()]
        commands += [["python", str(notebook)] for notebook in sorted(FOLDER.glob("*.py"))]
        for command in commands:
            if command[0] == "python":
                shutil.rmtree(folder)
                folder.mkdir()
            done = subprocess.run(
                command, cwd=folder, env=settings, capture_output=True, text=True, check=False
            )
            if done.returncode:
                sys.exit(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        sys.stdout.write(f"{python}: {len(commands)} commands and notebooks\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, compare and try the release."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=_ROOT / "dist", help="folder of the built files")
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    chosen = parser.parse_args(arguments)
    for python in chosen.pythons:
        if shutil.which(python) is None:
            sys.exit(f"{python}: no such interpreter")
    earlier = list(chosen.out.iterdir()) if chosen.out.is_dir() else []
    others = [file.name for file in earlier if not re.fullmatch(r"hespas-.*\.(whl|tar\.gz)", file.name)]
    if others:
        sys.exit(f"{chosen.out} has other files than those of a release, such as {others[0]}")
    for path in earlier:
        path.unlink()
    first = built(chosen.out)
    with tempfile.TemporaryDirectory() as folder:
        if built(Path(folder)) != first:
            sys.exit("two builds differ")
    for name, digest in first.items():
        sys.stdout.write(f"{name}  {(chosen.out / name).stat().st_size:,} bytes  sha256 {digest}\n")
    for python in chosen.pythons:
        _try_out(python, next(chosen.out.glob("*.whl")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
