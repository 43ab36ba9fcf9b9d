"""``comm_group.json``: an object, decimal group id >= 1 -> list of global ranks in ring order."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hespas.converters.replica_groups import MAX_DEVICES
from hespas.files.limits import limits
from hespas.files.source import read_document
from hespas.graph.errors import FormatError

if TYPE_CHECKING:
    from hespas.converters.chakra.faults import Faults

__all__ = ["FILE_NAME", "parse_groups", "read_groups", "render_groups"]

FILE_NAME = "comm_group.json"


def read_groups(folder: Path, faults: Faults) -> tuple[dict[int, list[int]], bytes]:
    """The groups of a folder and the file's bytes, both empty where there is no such file."""
    path = folder / FILE_NAME
    if not os.path.lexists(path):
        return {}, b""
    try:
        data = read_document(path, limits().groups_bytes, "a list of process groups")
    except FormatError as error:
        faults.error(
            "ET018", f"{FILE_NAME} cannot be read: {error.message}", hint=error.hint or "check the file"
        )
        return {}, b""
    return parse_groups(data, faults), data


def parse_groups(data: bytes, faults: Faults) -> dict[int, list[int]]:
    """Group id -> ranks. Id 0 is reserved, so a list under it is an error."""
    import msgspec

    try:
        listed = msgspec.json.decode(data, type=dict[str, list[int]])
    except (ValueError, RecursionError) as error:  # not JSON or of other types; not UTF-8; nested without end
        faults.error(
            "ET018",
            f"{FILE_NAME} is no object of rank lists: {error}",
            hint='write {"1": [0, 1], "2": [2, 3]}',
        )
        return {}
    groups: dict[int, list[int]] = {}
    for name, ranks in listed.items():
        number = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else 0
        if number < 1 or str(number) != name:
            faults.error("ET018", f"{FILE_NAME}: group id {name!r} is no integer of at least 1")
        elif not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0:
            faults.error("ET019", f"{FILE_NAME}: group {name} is empty, or lists a rank twice or below 0")
        elif max(ranks) >= MAX_DEVICES:
            faults.error("ET019", f"{FILE_NAME}: group {name} names a rank past {MAX_DEVICES:,}, the limit")
        else:
            groups[number] = ranks
    return groups


def render_groups(groups: Mapping[int, Sequence[int]]) -> bytes:
    """The file's content, by ascending id."""
    rows = ", ".join(f'"{number}": [{", ".join(map(str, groups[number]))}]' for number in sorted(groups))
    return b"{" + rows.encode() + b"}"
