"""Who takes part in the collectives of a text workload, as far as the file and the number of ranks say."""

from __future__ import annotations

from dataclasses import dataclass, field

from hespas.converters.astra_text.grammar import TextWorkload
from hespas.converters.astra_text.policies import TRANSFORMERS, Role
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.graph import StridedGroups
from hespas.graph.errors import UnsupportedError, UsageError

__all__ = ["Groups"]


@dataclass(frozen=True, slots=True)
class Groups:
    """The group set of each role. ``num_ranks`` is stated by the user where ``is_stated``, else the fewest
    that the file allows. ``sets`` lacks roles that depend on the network.
    """

    num_ranks: int
    is_stated: bool
    sets: dict[Role, StridedGroups] = field(default_factory=dict[Role, StridedGroups])

    @classmethod
    def of(cls, text: TextWorkload, num_devices: int | None, path: str) -> Groups:
        """Groups of a workload over ``num_devices`` ranks (None: not known).

        Where the policy states the size of a copy of the model, its ranks are neighbours. Raises
        :class:`UsageError` where that size does not divide the number of ranks, and for a number of ranks
        past 2**24; :class:`UnsupportedError` where the file states that many.
        """
        sharded = text.policy in TRANSFORMERS
        inner = text.model_ranks if sharded else 1
        count = num_devices or inner
        _check_count(num_devices, inner, path)
        if count % inner:
            raise UsageError(
                f"{count:,} ranks cannot be split into groups of {inner:,}, which the workload states",
                path=path,
                hint=f"make --num-devices a multiple of {inner:,}",
            )
        groups = cls(count, num_devices is not None)
        if num_devices is not None:
            groups.sets[Role.WORLD] = StridedGroups.all_ranks(count)
        if sharded:
            groups.sets[Role.INNER] = StridedGroups(((count // inner, inner),), ((inner, 1),))
        if sharded and num_devices is not None:
            groups.sets[Role.OUTER] = StridedGroups(((inner, 1),), ((count // inner, inner),))
        return groups

    def is_alone(self, role: Role) -> bool:
        """Whether a collective of this role surely has one member only."""
        found = self.sets.get(role)
        return (found is not None and found.group_size == 1) or (self.is_stated and self.num_ranks == 1)


def _check_count(num_devices: int | None, inner: int, path: str) -> None:
    if num_devices is not None and num_devices > MAX_DEVICES:
        raise UsageError(f"{num_devices:,} devices asked for", hint=f"1 to {MAX_DEVICES:,}")
    if inner > MAX_DEVICES:
        raise UnsupportedError(
            f"a copy of the model on {inner:,} ranks (limit {MAX_DEVICES:,})",
            path=path,
            position="line 1",
            hint="state the model_parallel_NPU_group of one job",
        )
