"""Learned: gradient-boosted trees on the logarithm of time over a data-sheet time.

    time = base(sizes, data sheet) x exp(sum of trees(log sizes, log ratios, device descriptors))

Trees that never see what a device is called speak of devices that were not in the fit. The interval holds
90 % of outcomes: fitted quantiles, widened until that was so on rows left out of the fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hespas.estimators.by_operation import Prediction, estimate_by_operation
from hespas.estimators.learned.applied import Answer
from hespas.estimators.learned.asking import Library
from hespas.estimators.learned.stored import cards_at, cards_in, shipped_folder
from hespas.estimators.operations import Operations
from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device

__all__ = ["Learned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The models that the device's file names, and those that come with the package: of one operation and
    number format the first of the device's own speaks. Fields are options:
    ``models``: a folder of models that alone is asked; ``shipped``: whether those of the package are asked;
    ``num_ranks``: size of collectives over all ranks where the graph does not say.
    """

    models: str = ""
    num_ranks: int = -1
    shipped: bool = True

    @property
    def name(self) -> str:
        """``learned``."""
        return "learned"

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Time of each operation; NaN with a reason where no model covers its kind, number format or sizes.

        O(ops x trees): about 2 us per operation and 300 trees. Raises ``FormatError`` for a model that is
        damaged or gone, ``UsageError`` where there is none at all.
        """
        answer = Answer.none(len(ops))
        for library in self._libraries(device):
            rows = np.flatnonzero(np.isnan(answer.duration_ns))
            if not len(rows):
                break
            said = library.ask(ops.take(rows), device, diagnostics)
            for column, heard in zip(_columns(answer), _columns(said), strict=True):
                column[rows] = heard
            answer.reasons.clear()  # who comes after may cover it
            answer.reasons.update(said.reasons)
        for reason, count in answer.reasons.items():
            if diagnostics is not None and count:
                diagnostics.warning("learned.refused", device.name, f"no duration, {reason}", count=count)
        return Prediction.of(self.name, answer.duration_ns, answer.low_ns, answer.high_ns)

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each node; distinct operations are asked once."""
        return estimate_by_operation(self, graph, device, diagnostics, num_ranks=self.num_ranks)

    def _libraries(self, device: Device) -> list[Library]:
        """Who is asked, the first first: all together, then each part of what that leaves.

        Together, so that the package's model of a number format comes before one of the device's own that
        only stands in for it.
        """
        folder = Path(self.models) if self.models else shipped_folder()
        own = () if self.models else cards_at(device.learned_models)
        others = cards_in(folder) if self.models or self.shipped else ()
        if not own and not others:
            where = f"in {folder}" if self.models or self.shipped else f"named by the file of {device.name}"
            raise UsageError(f"no learned model {where}", hint="name a folder of cards and trees")
        together = Library((*own, *others), ranked=len(own))
        if not own or not others:
            return [together]
        return [together, Library(own, ranked=len(own)), Library(others)]


def _columns(answer: Answer) -> tuple[FloatArray, FloatArray, FloatArray]:
    return answer.duration_ns, answer.low_ns, answer.high_ns
