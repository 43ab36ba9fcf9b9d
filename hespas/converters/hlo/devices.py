"""How many devices a module is for: what its header says, what the caller says, or what its groups name.

A serialised module states no counts (they belong to the compiler's configuration), nor does a module
converted from StableHLO; there the largest device id that a collective names gives the count, and a
diagnostic says so.
"""

from __future__ import annotations

from hespas.converters.format import ReadOptions
from hespas.converters.hlo.attributes import int_rows, integer
from hespas.converters.hlo.groups import header_meshes, parse_groups
from hespas.converters.hlo.module import HloModule
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.graph import Diagnostics, ExplicitGroups
from hespas.graph.errors import UnsupportedError

__all__ = ["device_counts"]

_COUNTS = ("replica_count", "num_partitions")


def device_counts(module: HloModule, options: ReadOptions, diagnostics: Diagnostics) -> tuple[int, int]:
    """(replicas, partitions). Raises ``FormatError`` for faulty counts, ``UnsupportedError`` past 2**24."""
    replicas, partitions = (_count(module, key) for key in _COUNTS)
    wanted = options.num_devices
    if not any(key in module.attributes for key in _COUNTS):
        number = wanted if wanted is not None else _named_devices(module)
        if wanted is None and number > 1:
            diagnostics.warning(
                "hlo.inferred-devices",
                module.name,
                f"the module does not say for how many devices it is; its collectives name {number}",
                path=module.source.path,
            )
        replicas, partitions = (1, number) if _has_channels(module) else (number, 1)
    elif wanted is not None and wanted != replicas * partitions:
        diagnostics.warning(
            "hlo.num-devices",
            module.name,
            f"the module says {replicas * partitions} devices; the {wanted} asked for are not used",
            path=module.source.path,
        )
    if replicas * partitions > MAX_DEVICES:
        raise UnsupportedError(
            f"{replicas * partitions:,} devices (limit {MAX_DEVICES:,})",
            path=module.source.path,
            position="module header",
            hint="state the replica_count and num_partitions of one job",
        )
    return replicas, partitions


def _count(module: HloModule, key: str) -> int:
    try:
        number = integer(module.attributes.get(key, "1"))
    except ValueError as error:
        raise module.source.error(0, f"{key} to be a number: {error}") from error
    if number < 1:
        raise module.source.error(0, f"{key} to be at least 1, not {number}")
    return number


def _has_channels(module: HloModule) -> bool:
    """Whether collectives run across partitions; without a channel they run across replicas."""
    return any("channel_id" in given for body in module.computations.values() for given in body.attributes)


def _named_devices(module: HloModule) -> int:
    """One more than the largest id any collective names, at least 1. Spellings that do not parse name none:
    they are reported where the collective is read.
    """
    found = {
        (key, given[key])
        for body in module.computations.values()
        for given in body.attributes
        for key in ("replica_groups", "source_target_pairs")
        if key in given
    }
    return max((_named(module, key, text) for key, text in found), default=1)


def _named(module: HloModule, key: str, text: str) -> int:
    try:
        if key == "source_target_pairs":
            return max((rank for row in int_rows(text) for rank in row), default=0) + 1
        groups = parse_groups(text, MAX_DEVICES, header_meshes(module.attributes))
    except ValueError:
        return 1
    if groups is None:
        return 1
    if isinstance(groups, ExplicitGroups):
        return max((rank for row in groups.rows for rank in row), default=0) + 1
    return groups.base + groups.num_ranks
