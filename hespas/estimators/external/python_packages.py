"""Simulators that are Python packages: looked for in this Python, or in the one that is named.

They run in a process of their own: they want other versions of NumPy, take gigabytes, write files.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

from hespas.estimators.availability import Availability
from hespas.estimators.external.commands import CommandError, run_command
from hespas.files.sandbox import isolated_script

__all__ = ["package_availability"]

_PROBE_S = 60.0
_PROBE = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"


def package_availability(distribution: str, command: str, install: str) -> Availability:
    """Whether a package is installed where ``command`` (empty: this Python) looks for it."""
    if not command:
        try:
            return Availability(True, f"{distribution} {version(distribution)}")
        except PackageNotFoundError:
            return Availability(False, f"{distribution} is not installed", install)
    try:
        return Availability(True, f"{distribution} {_version_there(distribution, command)}")
    except CommandError as error:
        said = str(error).strip().splitlines()
        return Availability(False, f"{distribution} with {command}: {said[-1] if said else 'fails'}", install)


@lru_cache(maxsize=8)
def _version_there(distribution: str, command: str) -> str:
    with TemporaryDirectory(prefix="hespas-probe-") as folder:
        return run_command(
            isolated_script(_PROBE, distribution, python=command), Path(folder), _PROBE_S
        ).strip()
