"""The programs that a profile brings along."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hespas.converters import ReadOptions, load_format
from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.errors import HespasError

__all__ = ["attached_programs"]

_ATTACHED = "hlo/"


def attached_programs(profile: Profile, diagnostics: Diagnostics) -> Iterator[tuple[str, Workload]]:
    """The compiled programs of a profile that ran in it."""
    ran = {profile.strings[row] for row in np.unique(profile.module_row).tolist()}
    read = load_format("hlo").read
    for name, data in profile.attachments.items():
        module = name.removeprefix(_ATTACHED)
        if not name.startswith(_ATTACHED) or module not in ran or read is None:
            continue
        with TemporaryDirectory(prefix="hespas-") as folder:
            path = Path(folder) / "module.pb"
            path.write_bytes(data)
            found = Diagnostics()
            try:
                value = read(path, ReadOptions(), found)
            except HespasError as error:
                diagnostics.warning(
                    "accuracy.unreadable-module",
                    profile.name,
                    f"module {module} is left out: {error.message}",
                )
                continue
        _tell(found, module, diagnostics)
        if isinstance(value, Workload):
            yield module, replace(value, name=module)


def _tell(found: Diagnostics, module: str, diagnostics: Diagnostics) -> None:
    """What is found in a module, under its name: nobody knows the file it was read from."""
    counts = found.counts()
    first = {each.code: each for each in reversed(list(found))}
    for code, each in first.items():
        diagnostics.add(code, each.severity, module, each.message, count=counts[code])
