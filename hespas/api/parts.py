"""Where the parts of a large job go: shares of a folder, and what an interrupted run has left of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from hespas._version import __version__
from hespas.converters import Format, Value, WriteOptions
from hespas.files.partial import Share
from hespas.graph import Workload
from hespas.graph.equality import content_key
from hespas.graph.errors import UsageError

__all__ = ["Parts", "Placement", "check_parts", "placement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How the files of a large job are written: fields of :class:`hespas.converters.WriteOptions`."""

    only_classes: bool = False
    shard: tuple[int, int] | None = None
    resume: bool = False
    cluster: str = ""

    def options(
        self,
        ranks: range | None = None,
        version: str = "",
        jobs: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> WriteOptions:
        """All options of writing."""
        return WriteOptions(
            ranks=ranks,
            version=version,
            jobs=jobs,
            only_classes=self.only_classes,
            shard=self.shard,
            resume=self.resume,
            cluster=self.cluster,
            progress=progress,
        )


class Placement(NamedTuple):
    """The ``key`` of what is kept when a run is interrupted, empty where nothing is; the ``share`` of a
    folder that is written, None for all of it.
    """

    key: str = ""
    share: Share | None = None


def check_parts(options: WriteOptions, chosen: Format) -> None:
    """Raise ``UsageError`` for options that a format does not take, or that contradict each other."""
    named = {
        "only_classes": options.only_classes,
        "shard": options.shard is not None,
        "resume": options.resume,
        "cluster": bool(options.cluster),
    }
    given = [name for name, is_given in named.items() if is_given]
    if given and not chosen.in_parts:
        raise UsageError(
            f"format {chosen.name!r} is not written in parts: `{given[0]}`",
            hint="leave it out, or write chakra traces",
        )
    if options.only_classes and (options.shard or options.cluster or options.ranks is not None):
        raise UsageError(
            "one file per class stands for all ranks: `only_classes` goes neither with `ranks`, `shard` nor "
            "`cluster`",
            hint="leave the others out",
        )
    if options.shard is not None:
        number, shares = options.shard
        if not 1 <= number <= shares:
            raise UsageError(
                f"`shard={number}/{shares}`: shares are counted from 1 to {max(shares, 1)}",
                hint="the first of four is 1/4, the last 4/4",
            )


def placement(value: Value, chosen: Format, options: WriteOptions) -> Placement:
    """Where the files go. Raises ``UsageError`` for more shares than ranks. O(bytes of the value)."""
    if not isinstance(value, Workload) or not (options.resume or options.shard):
        return Placement()
    from hespas.converters.chakra.writer import chosen_ranks, rank_file_name, share_of

    ranks = chosen_ranks(value, options)
    if not chosen.writes_directory(value, options):
        if options.shard is None:
            return Placement()
        raise UsageError(
            "one rank is one file, which has no parts", path=options.name, hint="leave `shard` out"
        )
    name = rank_file_name(value, options)
    stated = (name, options.name, options.version, options.only_classes)
    key = content_key(__version__, chosen.name, value, list(ranks), *stated)
    kept = key if options.resume else ""
    if options.shard is None:
        return Placement(kept)
    number, shares = options.shard
    if shares > len(ranks):
        raise UsageError(
            f"{shares:,} shares of {len(ranks):,} ranks: some would be empty",
            path=options.name,
            hint=f"`shard` with at most {len(ranks):,} shares",
        )
    chosen_of = [ranks[share_of(len(ranks), place, shares)] for place in range(1, shares + 1)]
    spans = tuple((int(mine[0]), int(mine[-1])) for mine in chosen_of)
    return Placement(kept, Share(number, spans, name, key))
