"""``comm_group.json``: an object, decimal group id >= 1 -> list of global ranks in ring order.

Tools call the file otherwise, and name groups by texts; both are read. What is written has ids.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from hespas.converters.chakra.contract import WHOLE_WORLD
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.files.limits import limits
from hespas.files.source import read_document
from hespas.graph.errors import FormatError

if TYPE_CHECKING:
    from hespas.converters.chakra.faults import Faults

__all__ = [
    "FILE_NAME",
    "USUAL_NAMES",
    "NamedGroups",
    "groups_of_metadata",
    "parse_groups",
    "read_groups",
    "render_groups",
]

FILE_NAME = "comm_group.json"
USUAL_NAMES = (FILE_NAME, "comm_groups.json")
"""What tools call the file; STAGE names it after its traces."""
_TRACES, _BESIDE_TRACES = "et", "comm_groups.json"
"""MLSynth writes it beside a folder ``et`` of its traces."""
_PROCESS_GROUPS = b'"pg_name"'
_MOST_DIGITS = 10


class _ProcessGroup(TypedDict):
    """One entry of PyTorch's list of process groups."""

    pg_name: str
    ranks: list[int]


class NamedGroups(dict[int, list[int]]):
    """Group id -> ranks in ring order. ``names`` are the spellings that are no id of a simulator, with the id
    that stands for each; 0 is all ranks.
    """

    def __init__(self) -> None:
        """Start without groups."""
        super().__init__()
        self.names: dict[str, int] = {}
        self._stated: set[int] = set()

    def add(self, name: str, ranks: list[int], number: int) -> None:
        """List a group under its id, or one under a name under the id ``number``."""
        if _is_id(name):
            self[int(name)] = ranks
            self._stated.add(int(name))
        else:
            self.names[name] = number if ranks else 0
            if ranks:
                self[number] = ranks

    def find(self, text: str) -> int:
        """The id that a text names, 0 for all ranks, -1 for none."""
        if text in self.names:
            return self.names[text]
        if text in WHOLE_WORLD:
            return 0
        return int(text) if _is_id(text) and int(text) in self._stated else -1


def _is_id(name: str) -> bool:
    """Whether it is a number from 1 on, as simulators spell it."""
    return name.isascii() and name.isdecimal() and len(name) < _MOST_DIGITS and name[0] != "0"


def read_groups(
    folder: Path, name: str, faults: Faults, stated: Path | None = None
) -> tuple[NamedGroups, bytes]:
    """The groups of a folder of traces called ``name`` and the file's bytes, both empty where there is no
    such file; ``stated`` is the file that the user names.
    """
    path = stated or _found(folder, name)
    if path is None:
        return NamedGroups(), b""
    if path != folder / FILE_NAME:
        message = f"the process groups are those of {path}"
        faults.diagnostics.info("chakra.groups-file", faults.path, message)
    try:
        data = read_document(path, limits().groups_bytes, "a list of process groups")
    except FormatError as error:
        faults.error(
            "ET019", f"{path.name} cannot be read: {error.message}", hint=error.hint or "check the file"
        )
        return NamedGroups(), b""
    return parse_groups(data, faults), data


def _found(folder: Path, name: str) -> Path | None:
    """The file beside the traces, by what tools call it; another one only where it holds lists of ranks."""
    usual = folder / FILE_NAME
    if os.path.lexists(usual):
        return usual
    others = [*(folder / each for each in USUAL_NAMES[1:]), folder / f"{name}.json"]
    if folder.resolve().name == _TRACES:
        others.append(folder.resolve().parent / _BESIDE_TRACES)
    return next((path for path in others if path.is_file() and _lists_ranks(path)), None)


def _lists_ranks(path: Path) -> bool:
    import msgspec

    try:
        data = read_document(path, limits().groups_bytes, "a list of process groups")
        return bool(msgspec.json.decode(data, type=dict[str, list[int]]))
    except (FormatError, ValueError, RecursionError):
        return False


def parse_groups(data: bytes, faults: Faults) -> NamedGroups:
    """Group id -> ranks. Groups under a name, or under id 0, get ids behind those that are stated."""
    import msgspec

    try:
        listed = msgspec.json.decode(data, type=dict[str, list[int]])
    except (ValueError, RecursionError) as error:  # not JSON or of other types; not UTF-8; nested without end
        faults.error(
            "ET019",
            f"{FILE_NAME} is no object of rank lists: {error}",
            hint='write {"1": [0, 1], "2": [2, 3]}',
        )
        return NamedGroups()
    groups = NamedGroups()
    number = max((int(name) for name in listed if _is_id(name)), default=0)
    for name, ranks in listed.items():
        number += not _is_id(name)
        if not ranks or len(set(ranks)) < len(ranks) or min(ranks) < 0:
            faults.error("ET019", f"{FILE_NAME}: group {name} is empty, or lists a rank twice or below 0")
        elif max(ranks) >= MAX_DEVICES:
            faults.error("ET019", f"{FILE_NAME}: group {name} names a rank past {MAX_DEVICES:,}, the limit")
        else:
            groups.add(name, ranks, number)
    if groups.names:
        some = ", ".join(repr(name) for name in list(groups.names)[:4])
        message = f"groups have no integer from 1 on for a name, as ASTRA-sim wants: {some}; they get one"
        faults.lint("ET018", message, len(groups.names))
    return groups


def groups_of_metadata(texts: Iterable[bytes]) -> tuple[bytes, set[str]]:
    """The process groups that METADATA nodes of a PyTorch trace list, as the content of a file, and those
    that are of all ranks. ``texts`` are the values of their inputs.
    """
    import msgspec

    listed: dict[str, list[int]] = {}
    whole: set[str] = set()
    for text in texts:
        if _PROCESS_GROUPS not in text:
            continue
        try:
            # A Python list of one text, as PyTorch's observer spells it.
            groups = msgspec.json.decode(text[2:-2], type=list[_ProcessGroup])
        except (ValueError, RecursionError):
            continue
        for group in groups:
            if group["ranks"]:
                listed.setdefault(group["pg_name"], group["ranks"])
            else:
                whole.add(group["pg_name"])
    return (msgspec.json.encode(listed) if listed else b""), whole


def render_groups(groups: Mapping[int, Sequence[int]]) -> bytes:
    """The file's content, by ascending id."""
    rows = ", ".join(f'"{number}": [{", ".join(map(str, groups[number]))}]' for number in sorted(groups))
    return b"{" + rows.encode() + b"}"
