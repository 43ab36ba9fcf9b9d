"""Documents as trees of fields, and changes to one to three fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from tests.fuzzing.values import BYTES, FLOATS, INTEGERS, TEXTS, Raw

__all__ = ["Document", "Group", "Node", "Scalar", "changed", "copied"]

Scalar = None | bool | int | float | str | bytes


@dataclass(slots=True, eq=False)
class Group:
    """Parts of a document that stand together; ``kind`` is a word of the format's codec."""

    kind: str
    parts: list[Node] = field(default_factory=list["Node"])


Node = Group | Scalar

_MOST_SLOTS = 20_000
_MOST_DEPTH = 60
_REPEATS = (2, 3, 20, 200)
_TOKENS = (
    re.compile(r"[+-]?\d[\w.+-]*"),
    re.compile(r"[%@#!^$]\S*"),
    re.compile(r"[a-z]+\d+(x.*)?|(\d+x)+[a-z]+\d*"),
    re.compile(r"\w[\w.-]*"),
    re.compile(r'["\'].*', re.DOTALL),
)
"""Classes of texts, of which one may stand where another does."""


class _Slot(NamedTuple):
    """A position in a tree."""

    group: Group
    at: int

    @property
    def node(self) -> Node:
        return self.group.parts[self.at]


@dataclass(slots=True, eq=False)
class Document:
    """A tree that is changed many times; each change is reverted before the next."""

    tree: Group
    slots: list[_Slot] = field(default_factory=list[_Slot])
    _before: dict[int, tuple[Group, list[Node]]] = field(default_factory=dict[int, tuple[Group, list[Node]]])

    def __post_init__(self) -> None:
        self.slots = _slots(self.tree)

    def parts(self, group: Group) -> list[Node]:
        """The parts of a group, to be changed."""
        self._before.setdefault(id(group), (group, [*group.parts]))
        return group.parts

    def put(self, slot: _Slot, node: Node) -> None:
        """Another node at a place."""
        self.parts(slot.group)[slot.at] = node

    def walk_again(self) -> None:
        """Find the places anew once there are others."""
        if self._before:
            self.slots = _slots(self.tree)

    def restore(self, slots: list[_Slot]) -> None:
        """Put everything back to where its places were ``slots``."""
        for group, parts in self._before.values():
            group.parts[:] = parts
        self._before.clear()
        self.slots = slots


def _slots(tree: Group) -> list[_Slot]:
    """All places of a tree; blanks between words are none."""
    found: list[_Slot] = []
    stack: list[Group] = [tree]
    while stack and len(found) < _MOST_SLOTS:
        group = stack.pop()
        parts = group.parts
        if group.kind == "line":
            words = (at for at, part in enumerate(parts) if not (isinstance(part, str) and part.isspace()))
            found += [_Slot(group, at) for at in words]
        else:
            found += [_Slot(group, at) for at in range(len(parts))]
        stack += [part for part in parts if isinstance(part, Group)]
    return found[:_MOST_SLOTS]


def copied(node: Node, depth: int = 0) -> Node:
    """A copy of a part of a tree; what lies too deep is left out."""
    if not isinstance(node, Group):
        return node
    if depth > _MOST_DEPTH:
        return None
    return Group(node.kind, [copied(part, depth + 1) for part in node.parts])


@contextmanager
def changed(document: Document, rng: Random) -> Generator[Group]:
    """The tree with one to three fields in another way, until it is left."""
    before = document.slots
    try:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            document.walk_again()
            if not document.slots:
                break
            rng.choice(_TEXT_CHANGES if document.tree.kind == "text" else _CHANGES)(document, rng)
        yield document.tree
    finally:
        document.restore(before)


def _replace(document: Document, rng: Random) -> None:
    """Another value of the same type."""
    slot = _scalar_slot(document, rng)
    document.put(slot, _other(slot.node, slot.group.kind, rng))


def _everywhere(document: Document, rng: Random) -> None:
    """Another value wherever one stands: a name, a type or a size that stays the same in all its places."""
    slot = _scalar_slot(document, rng)
    old = slot.node
    new = _other(old, slot.group.kind, rng)
    for each in document.slots:
        if type(each.node) is type(old) and each.node == old and not isinstance(old, Group):
            document.put(each, new)


def _scalar_slot(document: Document, rng: Random) -> _Slot:
    """A place that holds no group, if one is soon found."""
    for _ in range(20):
        slot = rng.choice(document.slots)
        if not isinstance(slot.node, Group) and not _is_sign(slot):
            return slot
    return rng.choice(document.slots)


def _is_sign(slot: _Slot) -> bool:
    """Return True if a word of a text is punctuation."""
    return slot.group.kind == "line" and isinstance(slot.node, str) and not re.search(r"\w", slot.node)


def _other(node: Node, kind: str, rng: Random) -> Node:
    if isinstance(node, Group):
        return Group(node.kind)
    if isinstance(node, str) and kind == "line":
        return _other_token(node, rng)
    return rng.choice(_others(node, rng))


def _others(node: Scalar, rng: Random) -> Sequence[Scalar]:
    """Values that may stand for one of a type."""
    match node:
        case bool():
            return (not node, not node, int(node), None)
        case int():
            return (node + 1, node - 1, -node, node * 2, *rng.sample(INTEGERS, 8))
        case float():
            return (node + 1.0, -node, node * 1e6, *rng.sample(FLOATS, 8))
        case str():
            return (node + "x", node[:-1], node.upper(), str(rng.choice(INTEGERS)), *rng.sample(TEXTS, 4))
        case bytes():
            return (node + b"\0", node[:-1], *rng.sample(BYTES, 3))
        case None:
            return (0, "", *rng.sample(INTEGERS, 2))


def _other_token(token: str, rng: Random) -> str:
    """Another word of a text."""
    if token.isascii() and token.isdecimal() and len(token) < 20:
        number = int(token)
        return _digits(rng.choice((number + 1, number * 2, *rng.sample(INTEGERS, 3), rng.choice(FLOATS))))
    if _TOKENS[0].fullmatch(token):
        return _digits(rng.choice((*rng.sample(INTEGERS, 2), *rng.sample(FLOATS, 2))))
    if token[:1] in {'"', "'"}:
        return f"{token[0]}{rng.choice(TEXTS)}{token[0]}"
    if numbers := re.findall(r"\d+", token):
        return token.replace(rng.choice(numbers), _digits(rng.choice(INTEGERS)), 1)
    return rng.choice((token * 2, token[:-1], token.upper(), *rng.sample(TEXTS, 2)))


def _digits(number: float) -> str:
    return str(number)


def _retype(document: Document, rng: Random) -> None:
    """A value of any type where another is expected."""
    slot = rng.choice(document.slots)
    other = rng.choice(
        (
            None,
            True,
            rng.choice(INTEGERS),
            rng.choice(FLOATS),
            rng.choice(TEXTS),
            rng.choice(BYTES),
            Group("array"),
            Group("object"),
            Group("array", [copied(slot.node)]),
            Raw(
                rng.choice(
                    ("1e999", "-0", "-", "01", "nan", "[" * 3000, '{"a":' * 3000, "undefined", "'", "\0")
                )
            ),
        )
    )
    document.put(slot, other)


def _refer(document: Document, rng: Random) -> None:
    """The value of another field of the same type: names of other records, cycles."""
    slot = _scalar_slot(document, rng)
    for _ in range(40):
        other = rng.choice(document.slots)
        if other is not slot and _alike(slot.node, other.node):
            document.put(slot, copied(other.node))
            return


def _alike(one: Node, other: Node) -> bool:
    if isinstance(one, Group) or isinstance(other, Group):
        return isinstance(one, Group) and isinstance(other, Group) and one.kind == other.kind
    if isinstance(one, str) and isinstance(other, str):
        return one != other and _token_class(one) == _token_class(other)
    return type(one) is type(other) and one != other


def _token_class(token: str) -> int:
    return next((place for place, form in enumerate(_TOKENS) if form.fullmatch(token)), -1)


def _delete(document: Document, rng: Random) -> None:
    slot = rng.choice(document.slots)
    del document.parts(slot.group)[slot.at]


def _duplicate(document: Document, rng: Random) -> None:
    slot = rng.choice(document.slots)
    document.parts(slot.group).insert(slot.at, copied(slot.node))


def _repeat(document: Document, rng: Random) -> None:
    slot = rng.choice(document.slots)
    times = rng.choice(_REPEATS)
    document.parts(slot.group)[slot.at : slot.at] = [copied(slot.node) for _ in range(times)]


def _swap(document: Document, rng: Random) -> None:
    """Two fields of one group, or of any two."""
    one = rng.choice(document.slots)
    near = [_Slot(one.group, at) for at in range(len(one.group.parts))]
    other = rng.choice(near if rng.random() < 0.5 else document.slots)
    first, second = copied(one.node), copied(other.node)
    document.put(one, second)
    document.put(other, first)


def _move(document: Document, rng: Random) -> None:
    """A field or record to another place."""
    slot, to = rng.choice(document.slots), rng.choice(document.slots)
    node = copied(slot.node)
    del document.parts(slot.group)[slot.at]
    document.parts(to.group).insert(min(to.at, len(to.group.parts)), node)


def _copy_over(document: Document, rng: Random) -> None:
    """Replace a part by a copy of another part."""
    slot, source = rng.choice(document.slots), rng.choice(document.slots)
    document.put(slot, copied(source.node))


def _empty(document: Document, rng: Random) -> None:
    """Remove the parts of a group."""
    groups = [slot.node for slot in document.slots if isinstance(slot.node, Group)]
    if groups:
        document.parts(rng.choice(groups)).clear()


def _shuffle(document: Document, rng: Random) -> None:
    """Records of a group in another order."""
    group = rng.choice(document.slots).group
    rng.shuffle(document.parts(group))


_Change = Callable[[Document, Random], None]
_CHANGES: tuple[_Change, ...] = (
    *(_replace,) * 8,
    *(_everywhere,) * 3,
    *(_refer,) * 4,
    *(_retype,) * 3,
    *(_delete,) * 2,
    *(_duplicate,) * 2,
    *(_swap,) * 2,
    _repeat,
    _move,
    _copy_over,
    _empty,
    _shuffle,
)
"""Changes, each as often as it is made."""

_TEXT_CHANGES: tuple[_Change, ...] = (
    *(_everywhere,) * 10,
    *(_replace,) * 6,
    *(_refer,) * 6,
    *(_delete, _duplicate, _swap, _repeat, _move, _retype),
)
"""The same for texts, whose grammar most other changes only break."""
