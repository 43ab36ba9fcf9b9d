"""Space of layouts of a training step: every combination of degrees and settings that the rules allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import NamedTuple

from hespas.generators.llm.layout import Layout, broken_rules
from hespas.generators.llm.model import Experts, Model
from hespas.generators.llm.settings import Recompute, ScheduleName, Training, offload_of, recompute_of
from hespas.graph.errors import UsageError

__all__ = ["AXES", "Candidate", "LayoutSpace"]

AXES = (
    "dp", "tp", "pp", "vp", "cp", "ep", "etp", "zero", "micro_batch", "recompute", "schedule", "offload",
)  # fmt: skip
"""Settings that differ between the layouts of a space, by the names of the options of a generated step."""
_MOST_CHUNKS = 8
_MOST_CONTEXT = 8
_MICRO_BATCHES = (1, 2, 4, 8)
_DEFAULTS: Mapping[str, tuple[int | str, ...]] = {
    "zero": (0, 1, 2, 3),
    "micro_batch": _MICRO_BATCHES,
    "recompute": ("none", "selective", "full"),
    "schedule": ("1f1b", "zero-bubble"),
    "offload": ("",),
}


class Candidate(NamedTuple):
    """Layout of a space: its layout and training settings, and its values on the axes."""

    layout: Layout
    training: Training
    settings: tuple[int | str, ...]

    def by_name(self) -> dict[str, int | str]:
        """Return the values on the axes by name."""
        return dict(zip(AXES, self.settings, strict=True))


@dataclass(frozen=True, kw_only=True)
class LayoutSpace:
    """Layouts of ``model`` on ``devices`` ranks. ``layout`` and ``training`` have the settings that all
    layouts share. ``axes`` has the values of the axes that are not searched in full.

    By default degrees are powers of two: tensor-parallel ranks up to ``domain``, virtual stages and
    context-parallel ranks up to 8, tensor-parallel ranks of experts 1 or ``tp``. Pipeline stages are all
    divisors of ``devices`` up to the number of layers. Settings without an effect on a layout are not varied:
    one stage has no schedule, and one replica has no ZeRO stages. Nothing is offloaded by default, because
    the time of an optimizer on the host is unknown.
    """

    model: Model
    devices: int
    layout: Layout
    training: Training
    domain: int = 8
    axes: Mapping[str, Sequence[int | str]] = field(default_factory=dict[str, Sequence[int | str]])

    def __post_init__(self) -> None:
        """Check the axes. Raises ``UsageError`` for an axis without values and for numbers out of range."""
        for axis, values in self.axes.items():
            if not values:
                example = _DEFAULTS.get(axis, (1,))[0] or "none"
                raise UsageError(f"`{axis}` has no values", hint=f"`{axis}={example}`, or leave it out")
            least, most = (0, 3) if axis == "zero" else (1, inf)
            wrong = next((v for v in values if not isinstance(v, str) and not least <= v <= most), None)
            if wrong is not None:
                expected = "0, 1, 2 or 3" if axis == "zero" else "1 or more"
                raise UsageError(f"`{axis}={wrong}`: expected {expected}", hint=f"`{axis}=1`")

    def candidates(self, failed: dict[int, str] | None = None) -> Iterator[Candidate]:
        """Yield every layout that the rules allow, in the order of the axes. ``failed`` receives the first
        broken rule of each stage of the checks; of an empty space, the highest stage is the cause.

        Raises ``UsageError`` for an unknown recomputation, schedule or offload, and for modules that the
        model does not have.
        """
        settings = self._settings()
        failed = {} if failed is None else failed
        for layout, micro_batch in self._layouts(failed):
            for schedule in self._schedules(layout):
                training = replace(self.training, micro_batch=micro_batch, schedule=schedule)
                broken = next(broken_rules(self.model, layout, training), None)
                if broken is not None:
                    failed.setdefault(4, broken.text)
                    continue  # no rule depends on recomputation, offload and a valid ZeRO stage
                zeros = [(zero, replace(layout, zero=zero)) for zero in self._zeros(layout)]
                degrees = layout.dp, layout.tp, layout.pp, layout.vp, layout.cp, layout.ep, layout.etp
                for recompute, offload, is_offloaded, parsed in settings:
                    chosen = replace(training, recompute=parsed, optimizer_offload=is_offloaded)
                    for zero, sharded in zeros:
                        values = (*degrees, zero, micro_batch, recompute, schedule, offload)
                        yield Candidate(sharded, chosen, values)

    def _settings(self) -> list[tuple[str, str, bool, Recompute]]:
        """Return the recomputations and offloads as texts and values. Default recomputations of modules that
        the model does not have are left out.
        """
        settings: list[tuple[str, str, bool, Recompute]] = []
        for recompute, offload in product(self._values("recompute"), self._values("offload")):
            is_offloaded, parsed = offload_of(str(offload), recompute_of(str(recompute)))
            training = replace(self.training, recompute=parsed)
            rules = broken_rules(self.model, Layout(), training)
            missing = next((rule for rule in rules if rule.rule == "recompute-needs-module"), None)
            if missing is None:
                settings.append((str(recompute), str(offload), is_offloaded, parsed))
            elif "recompute" in self.axes:
                raise UsageError(missing.text, code=missing.rule, hint=missing.hint)
        return settings

    def _values(self, axis: str, default: Sequence[int | str] = ()) -> Sequence[int | str]:
        return tuple(dict.fromkeys(self.axes.get(axis) or default or _DEFAULTS[axis]))

    def _degrees(self, axis: str, most: int, usual: int) -> list[int]:
        """Return the values of a degree of parallelism, by default powers of two up to ``most`` and
        ``usual``.
        """
        powers = [1 << power for power in range(max(min(usual, most), 1).bit_length())]
        return [int(value) for value in self._values(axis, powers)]

    def _layouts(self, failed: dict[int, str]) -> Iterator[tuple[Layout, int]]:
        """Yield the degrees of parallelism and the sizes of micro-batches that use all devices."""
        mixtures = [block for block in self.model.blocks() if isinstance(block, Experts)]
        experts = max((block.experts for block in mixtures), default=1)
        divisors = [
            pp for pp in range(1, min(self.devices, len(self.model.layers)) + 1) if not self.devices % pp
        ]
        data = {int(value) for value in self._values("dp", (0,))}
        for tp, cp, pp in product(
            self._degrees("tp", self.devices, self.domain),
            self._degrees("cp", self.devices, _MOST_CONTEXT),
            [int(pp) for pp in self._values("pp", divisors)],
        ):
            dp, left = divmod(self.devices, tp * cp * pp)
            if left or not dp:
                text = f"tp x cp x pp = {tp * cp * pp:,} does not divide devices = {self.devices:,}"
                failed.setdefault(0, text)
                continue
            if 0 not in data and dp not in data:
                failed.setdefault(1, f"tp x cp x pp = {tp * cp * pp:,} leaves dp = {dp:,}")
                continue
            for micro_batch in map(int, self._values("micro_batch")):
                batch, part = self.training.global_batch, dp * micro_batch
                if batch % part:
                    failed.setdefault(2, f"dp x micro-batch = {part:,} does not divide a batch of {batch:,}")
                    continue
                inner = dp * cp * tp
                for vp, ep, etp in product(
                    self._degrees("vp", len(self.model.layers), _MOST_CHUNKS if pp > 1 else 1),
                    self._degrees("ep", inner, experts),
                    [int(etp) for etp in self._values("etp", sorted({1, tp}) if mixtures else (1,))],
                ):
                    if inner % (ep * etp) == 0:
                        degrees = replace(self.layout, dp=dp, tp=tp, pp=pp, vp=vp, cp=cp, ep=ep, etp=etp)
                        yield degrees, micro_batch
                    else:
                        text = f"ep x etp = {ep * etp:,} does not divide dp x cp x tp = {inner:,}"
                        failed.setdefault(3, text)

    def _schedules(self, layout: Layout) -> list[ScheduleName]:
        names = [str(name) for name in self._values("schedule")]
        schedules: dict[str, ScheduleName] = {
            "gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved", "zero-bubble": "zero-bubble"
        }  # fmt: skip
        unknown = next((name for name in names if name not in schedules), None)
        if unknown is not None:
            raise UsageError(f"unknown schedule '{unknown}'", hint=f"choose some of {', '.join(schedules)}")
        return [schedules[name] for name in (names[:1] if layout.pp == 1 else names)]

    def _zeros(self, layout: Layout) -> list[int]:
        levels = [int(value) for value in self._values("zero")]
        return levels if layout.replicas > 1 or layout.edp > 1 else levels[:1]
