"""Groups of collectives and pairs of point-to-point messages, in symbolic form.

A strided group set writes a rank as mixed-radix digits: some digits select the group, the others the position
in it. Iota lists with a transpose (HLO ``[4,2]<=[2,4]T(1,0)``) and mesh axes (StableHLO
``replica_group_mesh_axes``, HLO ``mesh[...] {axes}``) have this form, so the group of a rank follows from a
few integers, for 8 ranks and for 65,536. Other splits are stored as explicit lists.

The groups of a set are disjoint: a rank is in at most one of them. Overlapping groups belong to several sets.
Two process groups of the same ranks match their collectives separately, so they are two sets with different
``communicator``; 0 is the first one, and the default process group of all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.errors import InvariantError

__all__ = [
    "Digit",
    "ExplicitGroups",
    "GroupMembership",
    "GroupSet",
    "Permutation",
    "PermutationPeers",
    "StridedGroups",
    "compress_groups",
    "digits_of",
    "first_group",
    "groups_text",
    "member_rows",
    "membership_of",
    "peers_of",
    "salted",
]


_FIRST_RANKS = 8
"""Number of ranks of a group that messages list before they abbreviate."""

Digit = tuple[int, int]
"""``(size, stride)``: one digit of a mixed-radix rank number."""


def _spread(digits: Sequence[Digit]) -> IntArray:
    """Return all sums of multiples of the strides: ``index x stride`` for each digit (size, stride), with all
    indices below its size. The first digit varies slowest.
    """
    values = np.zeros(1, np.int64)
    for size, stride in digits:
        values = (values[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return values


def _merge(digits: Sequence[Digit]) -> tuple[Digit, ...]:
    """Return the canonical form of digits: digits of size 1 are dropped, contiguous digits are merged."""
    merged: list[Digit] = []
    for size, stride in digits:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class StridedGroups:
    """Groups in symbolic form. A rank is ``base`` plus (index x stride) for each of ``group_digits``, which
    select the group, and for each of ``member_digits``, which select the member. A digit is a pair (size,
    stride).

    The first digit varies slowest. Every rank of ``base .. base + num_groups * group_size - 1`` is in exactly
    one group. ``communicator`` distinguishes process groups of the same ranks.
    """

    group_digits: tuple[Digit, ...]
    member_digits: tuple[Digit, ...]
    base: int = 0
    communicator: int = 0

    def __post_init__(self) -> None:
        """Bring the digits into canonical form and check that they tile the ranks exactly once."""
        object.__setattr__(self, "group_digits", _merge(self.group_digits))
        object.__setattr__(self, "member_digits", _merge(self.member_digits))
        expected = 1
        for size, stride in sorted((*self.group_digits, *self.member_digits), key=lambda digit: digit[1]):
            if size < 1 or stride != expected:
                raise InvariantError(
                    f"digits {self.group_digits} x {self.member_digits} do not tile the ranks"
                )
            expected = size * stride

    @classmethod
    def all_ranks(cls, num_ranks: int) -> StridedGroups:
        """Return one group of all ranks."""
        return cls((), ((num_ranks, 1),))

    @classmethod
    def from_iota(
        cls, num_groups: int, group_size: int, dims: Sequence[int], permutation: Sequence[int] | None = None
    ) -> GroupSet:
        """Return the groups of HLO's ``[num_groups,group_size]<=[dims]T(permutation)``: a transposed iota,
        cut into rows.

        Raises ``ValueError`` if the element counts disagree.
        """
        if prod(dims) != num_groups * group_size:
            raise ValueError(f"iota over {list(dims)} does not fill {num_groups} groups of {group_size}")
        order = range(len(dims)) if permutation is None else permutation
        if sorted(order) != list(range(len(dims))):
            raise ValueError(f"T({list(order)}) is not a permutation of {len(dims)} dimensions")
        strides = [prod(dims[axis + 1 :]) for axis in range(len(dims))]
        digits = [(dims[axis], strides[axis]) for axis in order]
        split = _split_digits(digits, group_size)
        if split is not None:
            return cls(*split)
        members = _spread(digits).reshape(num_groups, group_size)
        return ExplicitGroups.from_rows(members.tolist())

    @classmethod
    def from_mesh(cls, axis_sizes: Sequence[int], group_axes: Sequence[int]) -> StridedGroups:
        """Return the groups of ranks that differ only in their coordinates on some axes of a row-major mesh.

        ``axis_sizes`` are the sizes of all axes. Members are ordered by ``group_axes``, in the given order.
        """
        strides = [prod(axis_sizes[axis + 1 :]) for axis in range(len(axis_sizes))]
        fixed = [axis for axis in range(len(axis_sizes)) if axis not in set(group_axes)]
        return cls(
            tuple((axis_sizes[axis], strides[axis]) for axis in fixed),
            tuple((axis_sizes[axis], strides[axis]) for axis in group_axes),
        )

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return prod(size for size, _ in self.group_digits)

    @property
    def group_size(self) -> int:
        """Ranks in each group."""
        return prod(size for size, _ in self.member_digits)

    @property
    def num_ranks(self) -> int:
        """Number of ranks in all groups."""
        return self.num_groups * self.group_size

    @property
    def max_group_size(self) -> int:
        """Ranks in the largest group."""
        return self.group_size

    def group_of(self, rank: int) -> int:
        """Return the group of a rank, -1 if it is in none. O(digits)."""
        local = rank - self.base
        if not 0 <= local < self.num_ranks:
            return -1
        group = 0
        for size, stride in self.group_digits:
            group = group * size + local // stride % size
        return group

    def groups_of(self, ranks: IntArray) -> IntArray:
        """Return the group of each rank, -1 for ranks in none."""
        local = ranks - self.base
        index = np.zeros(len(ranks), np.int64)
        for size, stride in self.group_digits:
            index = index * size + local // stride % size
        return np.where((local >= 0) & (local < self.num_ranks), index, -1)

    def members(self, group: int) -> IntArray:
        """Return the ranks of one group in ring order."""
        start, index = self.base, group
        for size, stride in reversed(self.group_digits):
            index, digit = divmod(index, size)
            start += digit * stride
        return start + _spread(self.member_digits)

    def rows_of_ranks(self) -> Sequence[Sequence[int]]:
        """Return the ranks of each group in ring order, as Python integers. O(ranks), vectorised."""
        groups = self.base + _spread(self.group_digits)
        rows: list[list[int]] = (groups[:, None] + _spread(self.member_digits)).tolist()
        return rows

    def holds_all(self, num_ranks: int) -> bool:
        """Return True if each of ranks 0..num_ranks-1 is in a group. O(1)."""
        return self.base == 0 and num_ranks <= self.num_ranks

    def is_world(self, num_ranks: int) -> bool:
        """Return True if this is one group with ranks 0..num_ranks-1 in ascending order."""
        return self.base == 0 and not self.group_digits and self.member_digits in {((num_ranks, 1),), ()}

    def __iter__(self) -> Iterator[IntArray]:
        return (self.members(group) for group in range(self.num_groups))


@dataclass(frozen=True, slots=True)
class ExplicitGroups:
    """Groups listed rank by rank, for splits without a strided form; sizes may differ.

    ``communicator`` distinguishes process groups of the same ranks.
    """

    rows: tuple[tuple[int, ...], ...]
    communicator: int = 0
    _group: dict[int, int] = field(default_factory=dict[int, int], init=False, repr=False, compare=False)
    """The first group of each rank, filled at the first call of :meth:`group_of`."""

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> ExplicitGroups:
        """Return groups from nested sequences."""
        return cls(tuple(tuple(row) for row in rows))

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.rows)

    @property
    def group_size(self) -> int:
        """Ranks in each group, -1 if sizes differ."""
        sizes = {len(row) for row in self.rows}
        return sizes.pop() if len(sizes) == 1 else -1

    @property
    def num_ranks(self) -> int:
        """Number of ranks in all groups."""
        return sum(len(row) for row in self.rows)

    @property
    def max_group_size(self) -> int:
        """Ranks in the largest group, 0 without groups."""
        return max((len(row) for row in self.rows), default=0)

    def group_of(self, rank: int) -> int:
        """Return the first group that lists a rank, -1 if none does. The first call is O(ranks),
        others O(1).
        """
        if not self._group:
            for group, row in reversed(list(enumerate(self.rows))):
                self._group.update(dict.fromkeys(row, group))
        return self._group.get(rank, -1)

    def groups_of(self, ranks: IntArray) -> IntArray:
        """Return the first group that lists each rank, -1 if none does."""
        return np.array([self.group_of(rank) for rank in ranks.tolist()], np.int64)

    def members(self, group: int) -> IntArray:
        """Return the ranks of one group in ring order."""
        return np.array(self.rows[group], np.int64)

    def rows_of_ranks(self) -> Sequence[Sequence[int]]:
        """Return the ranks of each group in ring order, as Python integers."""
        return self.rows

    def holds_all(self, num_ranks: int) -> bool:
        """Return True if each of ranks 0..num_ranks-1 is in a group. O(ranks)."""
        listed = {rank for row in self.rows for rank in row if 0 <= rank < num_ranks}
        return len(listed) == num_ranks

    def is_world(self, num_ranks: int) -> bool:
        """Return True if this is one group with ranks 0..num_ranks-1 in ascending order."""
        # Lengths first: an input may state more ranks than fit in memory.
        if len(self.rows) != 1 or len(self.rows[0]) != num_ranks:
            return False
        return self.rows[0] == tuple(range(num_ranks))

    def __iter__(self) -> Iterator[IntArray]:
        return (self.members(group) for group in range(self.num_groups))


GroupSet = StridedGroups | ExplicitGroups


def first_group(groups: GroupSet) -> tuple[int, ...]:
    """Return the first few ranks of the first group."""
    first: list[int] = groups.members(0)[:_FIRST_RANKS].tolist() if groups.num_groups else []
    return tuple(first)


def groups_text(groups: GroupSet, num_ranks: int) -> str:
    """Return a description such as ``4 groups of 2, the first 0 4``; it differs for different groupings."""
    if groups.is_world(num_ranks):
        return "all ranks"
    size = f"{groups.group_size:,}" if groups.group_size >= 0 else f"up to {groups.max_group_size:,}"
    first = first_group(groups)
    more = " ..." if groups.group_size > len(first) else ""
    plural = "" if groups.num_groups == 1 else "s"
    which = f", the first {' '.join(map(str, first))}{more}" if first else ""
    return f"{groups.num_groups:,} group{plural} of {size}{which}"


def _split_digits(
    digits: Sequence[Digit], group_size: int
) -> tuple[tuple[Digit, ...], tuple[Digit, ...]] | None:
    """Divide digits (size, stride) into slow digits and fast digits. The fast digits form ``group_size``
    numbers. Return None if the boundary is within a digit.
    """
    members: list[Digit] = []
    rest = list(digits)
    remaining = group_size
    while remaining > 1:
        size, stride = rest.pop()
        if remaining % size == 0:
            members.insert(0, (size, stride))
            remaining //= size
        elif size % remaining == 0:
            members.insert(0, (remaining, stride))
            rest.append((size // remaining, stride * remaining))
            remaining = 1
        else:
            return None
    return tuple(rest), tuple(members)


def digits_of(values: IntArray) -> tuple[Digit, ...] | None:
    """Return digits (size, stride) whose sums are exactly the numbers ``values``, in this order; the first
    value is 0. None if there are none.
    """
    digits: list[Digit] = []
    while len(values) > 1:
        stride = int(values[1] - values[0])
        steps = np.flatnonzero(np.diff(values) != stride)
        size = int(steps[0]) + 1 if len(steps) else len(values)
        if stride < 1 or len(values) % size:
            return None
        digits.insert(0, (size, stride))
        values = values[::size]
    return tuple(digits)


def compress_groups(rows: IntArray) -> GroupSet:
    """Return the strided form of a dense ``(groups, size)`` list if it has one, else the explicit form.

    The result lists exactly the given groups in the given order. O(ranks), vectorised.
    """
    explicit = ExplicitGroups.from_rows
    if rows.size == 0:
        return explicit(rows.tolist())
    base = int(rows[0, 0])
    groups, members = digits_of(rows[:, 0] - base), digits_of(rows[0] - base)
    if groups is None or members is None:
        return explicit(rows.tolist())
    if not np.array_equal(base + _spread((*groups, *members)), rows.reshape(-1)):
        return explicit(rows.tolist())
    try:
        return StridedGroups(groups, members, base)
    except InvariantError:  # strided, but with gaps: ranks 0, 2, 4 without 1, 3, 5
        return explicit(rows.tolist())


@dataclass(frozen=True, slots=True)
class Permutation:
    """Pairs of a sending rank (source) and a receiving rank (target). A rank is at most once a source and at
    most once a target.

    If every pair shifts one digit of the rank by the same step, the form is symbolic: ``digit`` = (size,
    stride), ``shift``, and ``wraps`` (True if the end wraps to the start). Otherwise ``pairs`` lists (source,
    target), sorted by source.
    """

    num_ranks: int
    digit: Digit = (1, 1)
    shift: int = 0
    wraps: bool = True
    pairs: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        """Check that the digit divides the ranks, so that all targets are ranks."""
        size, stride = self.digit
        if size < 1 or stride < 1 or (self.pairs is None and self.num_ranks % (size * stride)):
            raise InvariantError(f"digit {self.digit} does not divide {self.num_ranks} ranks")

    @classmethod
    def from_pairs(cls, pairs: Sequence[tuple[int, int]], num_ranks: int) -> Permutation:
        """Return the symbolic form if the pairs have one, else the listed form. O(pairs).

        Raises ``ValueError`` if a rank is out of range, or is a source or a target twice.
        """
        ordered = tuple(sorted(pairs))
        sources, targets = [pair[0] for pair in ordered], [pair[1] for pair in ordered]
        for role, ranks in (("source", sources), ("target", targets)):
            if len(set(ranks)) < len(ranks):
                repeated = next(rank for rank, count in Counter(ranks).items() if count > 1)
                raise ValueError(f"rank {repeated} is the {role} of two pairs")
        outside = next((rank for pair in ordered for rank in pair if not 0 <= rank < num_ranks), None)
        if outside is not None:
            raise ValueError(f"rank {outside} is outside 0..{num_ranks - 1}")
        return _symbolic(ordered, num_ranks) or cls(num_ranks, pairs=ordered)

    def target_of(self, rank: int) -> int:
        """Return the rank that ``rank`` sends to, -1 for none."""
        if self.pairs is None:
            return self._shifted(rank, self.shift)
        return next((target for source, target in self.pairs if source == rank), -1)

    def source_of(self, rank: int) -> int:
        """Return the rank that ``rank`` receives from, -1 for none."""
        if self.pairs is None:
            return self._shifted(rank, -self.shift)
        return next((source for source, target in self.pairs if target == rank), -1)

    def targets_of(self, ranks: IntArray) -> IntArray:
        """Return the target of each rank, -1 for none. O(ranks + pairs)."""
        return self._all_shifted(ranks, self.shift, sends=True)

    def sources_of(self, ranks: IntArray) -> IntArray:
        """Return the source of each rank, -1 for none. O(ranks + pairs)."""
        return self._all_shifted(ranks, -self.shift, sends=False)

    def _all_shifted(self, ranks: IntArray, shift: int, *, sends: bool) -> IntArray:
        if self.pairs is not None:
            partner_of = dict(self.pairs) if sends else {target: source for source, target in self.pairs}
            return np.array([partner_of.get(rank, -1) for rank in ranks.tolist()], np.int64)
        size, stride = self.digit
        digit = ranks // stride % size
        shifted = (digit + shift) % size if self.wraps else digit + shift
        exists = (ranks >= 0) & (ranks < self.num_ranks) & (shifted >= 0) & (shifted < size)
        return np.where(exists, ranks + (shifted - digit) * stride, -1)

    def _shifted(self, rank: int, shift: int) -> int:
        size, stride = self.digit
        if not 0 <= rank < self.num_ranks:
            return -1
        digit = rank // stride % size
        shifted = digit + shift
        if self.wraps:
            shifted %= size
        return rank + (shifted - digit) * stride if 0 <= shifted < size else -1

    def __iter__(self) -> Iterator[tuple[int, int]]:
        if self.pairs is not None:
            yield from self.pairs
            return
        for rank in range(self.num_ranks):
            target = self.target_of(rank)
            if target >= 0:
                yield rank, target


def _symbolic(pairs: tuple[tuple[int, int], ...], num_ranks: int) -> Permutation | None:
    """Return the symbolic form of listed pairs, a shift of one digit, or None if they have none."""
    steps = {target - source for source, target in pairs}
    if not pairs or len(steps) > 2 or 0 in steps:
        return None
    forward = min(steps, key=lambda step: (abs(step), -step))
    stride, sign = abs(forward), 1 if forward > 0 else -1
    back = next(iter(steps - {forward}), None)
    wraps = back is not None
    if back is not None:
        span = abs(back) + stride
    else:  # an open shift has no source for ``stride`` ranks in every ``span``
        missing = num_ranks - len(pairs)
        divides = missing and num_ranks * stride % missing == 0
        span = num_ranks * stride // missing if divides else num_ranks
    if span % stride or num_ranks % span:
        return None
    if len(pairs) != num_ranks - (0 if wraps else num_ranks // span * stride):
        return None  # avoids a loop over all ranks, up to 2**31
    candidate = Permutation(num_ranks, (span // stride, stride), sign, wraps)
    return candidate if tuple(candidate) == pairs else None


_MAX_ABSENT = 1 << 20
"""Limit of ranks in a group set that are not in the job. A set with more counts as empty."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupMembership:
    """Process groups of one group set of a job, restricted to its ranks.

    ``group`` is the group of each rank (-1: none), shape ``(ranks,)``. The other columns have shape
    ``(groups,)``. ``uid`` is equal for groups of all group sets with the same members and communicator.
    ``is_first`` is True for groups that no earlier group set had.
    """

    group: IntArray
    uid: IntArray
    is_first: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class PermutationPeers:
    """Peers of each rank in a permutation, shape ``(ranks,)``: the rank to which it sends (``target``) and
    from which it receives (``source``). -1 means no peer, or a peer that is not in the job.
    """

    target: IntArray
    source: IntArray


def member_rows(groups: GroupSet) -> IntArray | tuple[tuple[int, ...], ...]:
    """Return the members of every group: a matrix of shape ``(groups, size)``, or rows of unequal length."""
    if isinstance(groups, StridedGroups):
        starts = groups.base + _spread(groups.group_digits)
        return starts[:, None] + _spread(groups.member_digits)[None, :]
    return groups.rows


def membership_of(
    groups: GroupSet, num_ranks: int, uids: dict[bytes, int], members: list[tuple[int, ...]]
) -> GroupMembership:
    """Return the membership of the ranks of a job in one group set. O(ranks).

    ``uids`` and ``members`` are common to all group sets of a job. Groups with a new list of members are
    added to them. A rank that is listed twice belongs to the first group that lists it.
    """
    if groups.num_ranks > num_ranks + _MAX_ABSENT:
        return GroupMembership(np.full(num_ranks, -1, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))
    rows = member_rows(groups)
    lists: list[tuple[int, ...]] = [
        tuple(row) for row in (rows if isinstance(rows, tuple) else rows.tolist())
    ]
    uid: list[int] = []
    is_first: list[bool] = []
    for row in lists:
        key = np.array([groups.communicator, *sorted(row)], np.int64).tobytes()
        number = uids.setdefault(key, len(members))
        is_first.append(number == len(members))
        if is_first[-1]:
            members.append(row)
        uid.append(number)
    column = np.full(num_ranks, -1, np.int64)
    sizes = np.fromiter(map(len, lists), np.int64, len(lists))
    flat = np.fromiter((rank for row in lists for rank in row), np.int64, int(sizes.sum()))
    owner = np.repeat(np.arange(len(lists), dtype=np.int64), sizes)
    inside = (flat >= 0) & (flat < num_ranks)
    # In reverse order, so that the first group that lists a rank is written last.
    column[flat[inside][::-1]] = owner[inside][::-1]
    return GroupMembership(column, np.array(uid, np.int64), np.array(is_first, np.bool_))


def peers_of(permutation: Permutation, num_ranks: int) -> PermutationPeers:
    """Return the peers of all ranks of a job in one permutation. O(ranks)."""
    if permutation.pairs is None:
        ranks = np.arange(num_ranks, dtype=np.int64)
        targets, sources = permutation.targets_of(ranks), permutation.sources_of(ranks)
        targets[targets >= num_ranks] = -1
        sources[sources >= num_ranks] = -1
        return PermutationPeers(targets, sources)
    target = np.full(num_ranks, -1, np.int64)
    source = np.full(num_ranks, -1, np.int64)
    pairs = np.array(permutation.pairs, np.int64).reshape(-1, 2)
    inside = ((pairs >= 0) & (pairs < num_ranks)).all(axis=1)
    target[pairs[inside, 0]] = pairs[inside, 1]
    source[pairs[inside, 1]] = pairs[inside, 0]
    return PermutationPeers(target, source)


def salted(value: NDArray[np.uint64], salt: int) -> NDArray[np.uint64]:
    """Return a hash of each 64-bit number (SplitMix64's finaliser) that depends on ``salt``. Such hashes of
    operations and peers are combined to find ranks that behave alike.
    """
    mixed = value + np.uint64((salt * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) & (2**64 - 1))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
