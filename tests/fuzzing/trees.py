"""Documents as trees of fields, and changes to one to three of these fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from tests.fuzzing.values import BYTES, FLOATS, INTEGERS, TEXTS, Raw

__all__ = ["Group", "Node", "Scalar", "changed", "copied"]

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


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place in a tree."""

    group: Group
    at: int

    @property
    def node(self) -> Node:
        return self.group.parts[self.at]


def _slots(tree: Group) -> list[_Slot]:
    """All places of a tree; blanks between words are none."""
    return list(islice(_walk(tree), _MOST_SLOTS))


def _walk(tree: Group) -> Iterator[_Slot]:
    stack: list[Group] = [tree]
    while stack:
        group = stack.pop()
        for at, part in enumerate(group.parts):
            if isinstance(part, str) and part.isspace() and group.kind == "line":
                continue
            yield _Slot(group, at)
            if isinstance(part, Group):
                stack.append(part)


def copied(node: Node, depth: int = 0) -> Node:
    """A copy of a part of a tree; what lies too deep is left out."""
    if not isinstance(node, Group):
        return node
    if depth > _MOST_DEPTH:
        return None
    return Group(node.kind, [copied(part, depth + 1) for part in node.parts])


def changed(tree: Group, rng: Random) -> Group:
    """One to three fields of a tree in another way; the tree itself is changed."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        slots = _slots(tree)
        if not slots:
            break
        rng.choice(_TEXT_CHANGES if tree.kind == "text" else _CHANGES)(slots, rng)
    return tree


def _replace(slots: Sequence[_Slot], rng: Random) -> None:
    """Another value of the same type."""
    slot = _scalar_slot(slots, rng)
    slot.group.parts[slot.at] = _other(slot.node, slot.group.kind, rng)


def _everywhere(slots: Sequence[_Slot], rng: Random) -> None:
    """Another value wherever one stands: a name, a type or a size that stays the same in all its places."""
    slot = _scalar_slot(slots, rng)
    old = slot.node
    new = _other(old, slot.group.kind, rng)
    for each in slots:
        if type(each.node) is type(old) and each.node == old and not isinstance(old, Group):
            each.group.parts[each.at] = new


def _scalar_slot(slots: Sequence[_Slot], rng: Random) -> _Slot:
    """A place that holds no group, if one is soon found."""
    for _ in range(20):
        slot = rng.choice(slots)
        if not isinstance(slot.node, Group) and not _is_sign(slot):
            return slot
    return rng.choice(slots)


def _is_sign(slot: _Slot) -> bool:
    """Whether a word of a text is a comma, a bracket or the like."""
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


def _retype(slots: Sequence[_Slot], rng: Random) -> None:
    """A value of any type where another is expected."""
    slot = rng.choice(slots)
    slot.group.parts[slot.at] = rng.choice(
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


def _refer(slots: Sequence[_Slot], rng: Random) -> None:
    """The value of another field of the same type: names of other records, cycles."""
    slot = _scalar_slot(slots, rng)
    for _ in range(40):
        other = rng.choice(slots)
        if other is not slot and _alike(slot.node, other.node):
            slot.group.parts[slot.at] = copied(other.node)
            return


def _alike(one: Node, other: Node) -> bool:
    if isinstance(one, Group) or isinstance(other, Group):
        return isinstance(one, Group) and isinstance(other, Group) and one.kind == other.kind
    if isinstance(one, str) and isinstance(other, str):
        return one != other and _token_class(one) == _token_class(other)
    return type(one) is type(other) and one != other


def _token_class(token: str) -> int:
    return next((place for place, form in enumerate(_TOKENS) if form.fullmatch(token)), -1)


def _delete(slots: Sequence[_Slot], rng: Random) -> None:
    slot = rng.choice(slots)
    del slot.group.parts[slot.at]


def _duplicate(slots: Sequence[_Slot], rng: Random) -> None:
    slot = rng.choice(slots)
    slot.group.parts.insert(slot.at, copied(slot.node))


def _repeat(slots: Sequence[_Slot], rng: Random) -> None:
    slot = rng.choice(slots)
    times = rng.choice(_REPEATS)
    slot.group.parts[slot.at : slot.at] = [copied(slot.node) for _ in range(times)]


def _swap(slots: Sequence[_Slot], rng: Random) -> None:
    """Two fields of one group, or of any two."""
    one = rng.choice(slots)
    near = [_Slot(one.group, at) for at in range(len(one.group.parts))]
    other = rng.choice(near if rng.random() < 0.5 else slots)
    first, second = copied(one.node), copied(other.node)
    one.group.parts[one.at], other.group.parts[other.at] = second, first


def _move(slots: Sequence[_Slot], rng: Random) -> None:
    """A field or record to another place."""
    slot, to = rng.choice(slots), rng.choice(slots)
    node = copied(slot.node)
    del slot.group.parts[slot.at]
    to.group.parts.insert(min(to.at, len(to.group.parts)), node)


def _copy_over(slots: Sequence[_Slot], rng: Random) -> None:
    """What stands elsewhere, whatever it is."""
    slot, source = rng.choice(slots), rng.choice(slots)
    slot.group.parts[slot.at] = copied(source.node)


def _empty(slots: Sequence[_Slot], rng: Random) -> None:
    """A group without its parts."""
    groups = [slot.node for slot in slots if isinstance(slot.node, Group)]
    if groups:
        rng.choice(groups).parts.clear()


def _shuffle(slots: Sequence[_Slot], rng: Random) -> None:
    """Records of a group in another order."""
    group = rng.choice(slots).group
    rng.shuffle(group.parts)


_Change = Callable[[Sequence[_Slot], Random], None]
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
