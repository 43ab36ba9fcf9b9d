"""Which operations of a program the time of a profile belongs to."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from hespas.api.io import read
from hespas.api.validation import read_program
from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.errors import UsageError

if TYPE_CHECKING:
    from hespas.validators.accuracy import Joined

__all__ = ["join_profile"]


def join_profile(
    program: str | Path | bytes | Workload,
    measured: str | Path | Profile,
    *,
    diagnostics: Diagnostics | None = None,
) -> Joined:
    """Join a profile to the program that ran: a file, what was read of it, or its text as ``bytes``
    (``lowered.as_text().encode()``, with or without names). Needs no device: nothing is estimated.

    The answer says which share of the device time finds its operations, by which evidence, and whether
    another program ran (``is_other_program``); it never splits what one event did by guess. Raises what
    ``read`` does, and ``UsageError`` for a profile as program or the other way round.
    """
    from hespas.validators.accuracy import join_program

    found = diagnostics if diagnostics is not None else Diagnostics()
    workload = _read_text(program, found) if isinstance(program, bytes) else read_program(program, found)
    profile = measured if isinstance(measured, Profile) else read(measured, diagnostics=found)
    if not isinstance(profile, Profile):
        raise UsageError("a program is no profile", path=str(measured), hint="give it as `program`")
    if workload is None:
        raise UsageError("no program", hint="give the program that ran")
    return join_program(workload, profile, found)


def _read_text(text: bytes, diagnostics: Diagnostics) -> Workload | None:
    """A program that is no file: it is written into one."""
    with TemporaryDirectory(prefix="hespas-") as folder:
        path = Path(folder) / "program"
        path.write_bytes(text)
        return read_program(path, diagnostics)
