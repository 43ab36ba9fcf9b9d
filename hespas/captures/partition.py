"""A program for a whole mesh -> the program of each device, as XLA's partitioner makes it.

The partitioner runs in a child process (:mod:`hespas.captures.partition_child`): what crashes, never ends or
takes all memory there is an error here that says what to do.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

from hespas.captures.mesh import Mesh
from hespas.captures.partition_child import PARTITIONED, REFUSED, Settings
from hespas.files.children import end_of, error_from_text
from hespas.files.sandbox import ROOT, clean_environment, isolated_python
from hespas.graph.errors import HespasError, UnsupportedError, UsageError

__all__ = ["TIMEOUT_S", "Partitioner", "partition"]

Partitioner = Literal["auto", "shardy", "gspmd"]
"""Who propagates shardings: as the program is annotated, or one of the two."""

TIMEOUT_S = 1800.0
"""How long a program may keep the partitioner busy."""

_POLLED_S = 0.01
_MOST_SAID = 400
_SUSPECTED = re.compile(r"(?:\\n|\s)*Suspected Python Code")
_SHARDY = (b"sdy.", b"xla.sdy", b"sdy\0")
_WAYS_ROUND = (
    "find the operation by leaving parts of the program out, shard its operands otherwise there "
    "(jax.lax.with_sharding_constraint), or write it with shard_map"
)


def partition(
    program: bytes,
    *,
    axes: Mapping[str, int] | str | Mesh | None = None,
    partitioner: Partitioner = "auto",
    timeout_s: float = TIMEOUT_S,
) -> str:
    """The text of the HLO module that each device runs, from StableHLO in any form with shardings of Shardy
    or GSPMD. ``axes`` gives the axes of its mesh other sizes.

    It is the module just after XLA's SPMD partitioner and its clean-up: collectives are not yet combined,
    nothing is fused, and numbers have the formats of the program.

    Raises ``FormatError`` for what is no program, ``UsageError`` where axes are not those of the program, and
    ``UnsupportedError`` where the partitioner refuses, crashes or does not finish.
    """
    wanted = {} if axes is None else Mesh.of(axes).axes
    is_shardy = any(mark in program for mark in _SHARDY)
    if is_shardy and partitioner == "gspmd":
        raise UsageError(
            "the program has the annotations of Shardy, which GSPMD does not read",
            hint="capture the function itself with `partitioner=gspmd`, or leave that out",
        )
    shardy = is_shardy or partitioner == "shardy"
    with tempfile.TemporaryDirectory(prefix="hespas-partition-") as scratch:
        source, folder = Path(scratch, "program"), Path(scratch, "out")
        source.write_bytes(program)
        folder.mkdir()
        settings = Settings(str(source), str(folder), wanted, shardy)
        status = _run(settings, Path(scratch, "errors"), timeout_s)
        found = _dump(folder)
        if found is not None and (_is_written(folder) or _is_whole(found)):
            return found.read_text(encoding="utf-8")
        # A program that is lowered already has the annotations that it has.
        ways = f"try `partitioner=gspmd`; else {_WAYS_ROUND}" if partitioner == "shardy" else _WAYS_ROUND
        raise _failure(folder, Path(scratch, "errors"), status, timeout_s, ways)


def _run(settings: Settings, errors: Path, timeout_s: float) -> int | None:
    """Run the child until the file is there; its exit status, None where it was ended or out of time."""
    command = isolated_python("hespas.captures.partition_child", json.dumps(settings._asdict()))
    end = monotonic() + timeout_s
    folder = Path(settings.folder)
    with errors.open("wb") as log:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=clean_environment({"TF_CPP_MIN_LOG_LEVEL": "2"}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            while child.poll() is None:
                if _is_written(folder) or monotonic() > end:
                    return None
                sleep(_POLLED_S)
            return child.returncode
        finally:
            child.kill()
            child.wait()


def _numbered(folder: Path) -> dict[int, Path]:
    """Dumps by their number: XLA counts them as it goes."""
    found = ((re.search(r"\.(\d{4,})\.", path.name), path) for path in folder.glob("*.txt"))
    return {int(match[1]): path for match, path in found if match}


def _dump(folder: Path) -> Path | None:
    return next((path for _, path in sorted(_numbered(folder).items()) if _is_wanted(path)), None)


def _is_wanted(path: Path) -> bool:
    return any(mark in path.name for mark in PARTITIONED)


def _is_written(folder: Path) -> bool:
    """Whether a file after the wanted one is there."""
    dumps = _numbered(folder)
    wanted = next((number for number, path in dumps.items() if _is_wanted(path)), None)
    return wanted is not None and max(dumps) > wanted


def _is_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 8, 0))
        return file.read().rstrip().endswith(b"}")


def _failure(
    folder: Path, errors: Path, status: int | None, timeout_s: float, ways_round: str
) -> HespasError:
    """Why there is no partitioned program."""
    refusal = folder / REFUSED
    if refusal.exists():
        told = json.loads(refusal.read_text(encoding="utf-8"))
        if told["kind"] == "XLA":
            why = _SUSPECTED.split(told["message"])[0].strip()[:_MOST_SAID]
            return UnsupportedError(f"XLA's partitioner refuses the program: {why}", hint=ways_round)
        return error_from_text(told)
    said = errors.read_bytes()
    if status is not None:
        return UnsupportedError(f"XLA's partitioner {end_of(status, said)}", hint=ways_round)
    how = f"does not finish within {timeout_s:g} s"
    return UnsupportedError(f"XLA's partitioner {how}", hint=f"give it more time; else {ways_round}")
