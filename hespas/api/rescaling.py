"""A trace made larger on its way from one format to another, and the account of what that changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hespas.api.io import as_workload, read
from hespas.api.preparation import Conservation, Dropped, rank_totals
from hespas.converters import ReadOptions, Value
from hespas.generators.rescale import Rescale, parse_sizes
from hespas.graph import Diagnostics, Workload
from hespas.graph.passes import Totals

__all__ = ["Rescaled", "Rescaling", "rescaled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescaling:
    """``sizes`` of axes to be (``dp=512`` or a mapping); ``mesh`` names the trace's own, outermost first;
    ``others`` are traces of the same program, each at another size of one axis.
    """

    sizes: Mapping[str, int] | str
    mesh: str = ""
    others: Sequence[str | Path | Workload] = ()

    def run(self, workload: Workload, reading: ReadOptions, diagnostics: Diagnostics) -> Rescaled:
        """The rescaled workload with its account. Raises what the pass does, and what ``read`` does."""
        sizes = parse_sizes(self.sizes) if isinstance(self.sizes, str) else dict(self.sizes)
        others = tuple(
            other
            if isinstance(other, Workload)
            else as_workload(read(other, options=replace(reading, num_devices=None)), diagnostics)
            for other in self.others
        )
        told = Diagnostics()
        done = Rescale(sizes=sizes, mesh=self.mesh, others=others)(workload, told)
        diagnostics.extend(told)
        before = rank_totals(workload.classes, workload.class_sizes)
        return Rescaled(
            done, before, _dropped(before, workload.num_available, done, told.counts().get("rescale.work", 0))
        )


@dataclass(frozen=True, slots=True)
class Rescaled:
    """A workload of another size; ``before`` are the sums of the trace."""

    workload: Workload
    before: Totals
    dropped: tuple[Dropped, ...] = field(default=())

    def account(self, conservation: Conservation | None) -> Conservation | None:
        """The account of what was written, from the trace on."""
        if conservation is None:
            return None
        return replace(conservation, before=self.before, dropped=(*self.dropped, *conservation.dropped))


def rescaled(
    value: Value, stated: Rescaling | Mapping[str, int] | str | None, reading: ReadOptions, found: Diagnostics
) -> tuple[Value, Callable[[Conservation | None], Conservation | None]]:
    """The value in another size where somebody asks for one, and what that adds to its account."""
    if not stated or not isinstance(value, Workload):
        return value, lambda account: account
    done = (stated if isinstance(stated, Rescaling) else Rescaling(sizes=stated)).run(value, reading, found)
    return done.workload, done.account


def _dropped(before: Totals, ranks: int, done: Workload, changed: int) -> tuple[Dropped, ...]:
    """Operations of ranks that were not traced, and traffic that each rank has less because it has a smaller
    part of the work.
    """
    after = rank_totals(done.classes, done.class_sizes)
    more = Dropped("rescale.ranks", "run on ranks that the trace does not have", before.ops - after.ops)
    saved = before.bytes_moved / ranks * done.num_available - after.bytes_moved
    part = Dropped("rescale.work", "operations of a rank have other shapes, FLOPs or bytes", changed, saved)
    return tuple(row for row in (more, part) if row.count)
