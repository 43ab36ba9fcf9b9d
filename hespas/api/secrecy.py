"""Obfuscation of a conversion's result, and the way back."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from hespas.api.documents import STANDARD_STREAM
from hespas.api.lowering import MergedOps
from hespas.converters import Value
from hespas.generators.obfuscate import Level, VisibleFact
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import CheckFailedError, UnsupportedError, UsageError
from hespas.graph.hints import OUTPUT, Option
from hespas.graph.progress import Progress

if TYPE_CHECKING:
    from hespas.generators.obfuscate import Key

__all__ = [
    "ObfuscationKey",
    "ObfuscationLevel",
    "ReportsVisible",
    "RevealingKey",
    "Secrecy",
    "simulated_ns",
]

_MOST_CHANGE = 0.04
"""Largest change of the simulated step by the level ``layers``."""
_REFERENCE_DEVICE = "H100-SXM"
_FALLBACKS: tuple[tuple[Level, bool, str], ...] = (
    ("layers", True, "the number of layers"),
    ("shapes", False, "the sequence of operations"),
)
"""Levels to use if a step changes too much: level, whether all layers stay, and what stays visible."""

ObfuscationKey = Annotated[
    str | Path | None,
    Option(
        "Replace names by tokens of the secret key in KEYFILE, which is made if it does not exist.",
        metavar="KEYFILE",
        panel=OUTPUT,
        access="reads",
    ),
]
ObfuscationLevel = Annotated[
    Level,
    Option(
        "With `obfuscate`: hide names; also exact shapes and costs; also the number of layers (recommended).",
        panel=OUTPUT,
    ),
]
ReportsVisible = Annotated[
    bool,
    Option(
        "With `obfuscate`: list what stays visible, and how many built-in models agree with it.",
        panel=OUTPUT,
    ),
]
RevealingKey = Annotated[
    str | Path | None,
    Option(
        "Replace the tokens of an obfuscated SRC by its original names, with the key in this file.",
        metavar="KEYFILE",
        panel=OUTPUT,
        access="reads",
    ),
]


@dataclass(frozen=True, slots=True)
class Secrecy:
    """Obfuscation of the value to write, or the way back if ``level`` is None."""

    key: Key
    level: Level | None
    report: bool = False

    @classmethod
    def of(
        cls,
        obfuscate: str | Path | None,
        level: Level,
        reveal: str | Path | None,
        *,
        report: bool,
        destination: str = STANDARD_STREAM,
    ) -> Secrecy | None:
        """Return what the options request, None for an ordinary conversion. Writes a missing key file, which
        must not be ``destination`` or in it, because the output replaces its files and is shared.
        """
        if obfuscate is None and reveal is None and not report and level == "names":
            return None
        from hespas.generators.obfuscate import load_key

        key_file = Path(reveal or "") if obfuscate is None else Path(obfuscate)
        output = Path(destination)
        if str(key_file) == STANDARD_STREAM:
            raise UsageError("a key is not read from standard input", hint="name a file: trace.key")
        if destination != STANDARD_STREAM and output.resolve() in (
            key_file.resolve(),
            *key_file.resolve().parents,
        ):
            raise UsageError(
                f"the key file {str(key_file)!r} is part of the output {destination!r}",
                hint="store the key elsewhere, because the output is shared",
            )
        if obfuscate is None:
            if report or level != "names":
                option = "report" if report else "obfuscate_level"
                raise UsageError(f"`{option}` requires `obfuscate`", hint="`obfuscate=trace.key`")
            return cls(load_key(key_file, create=False), None)
        if reveal is not None:
            raise UsageError("`obfuscate` and `reveal` exclude each other", hint="leave one of them out")
        return cls(load_key(key_file, create=True), level, report)

    def visible(self, value: Value) -> tuple[VisibleFact, ...]:
        """Return what an obfuscated workload shows, if a report was requested."""
        if not self.report or not isinstance(value, Workload):
            return ()
        from hespas.validators.privacy.visible import visible_facts

        return visible_facts(value)

    def applied(self, value: Value, diagnostics: Diagnostics) -> tuple[Value, tuple[MergedOps, ...]]:
        """Return the value to write, and what it lacks. Findings are added to ``diagnostics``."""
        own = Diagnostics()
        changed = self._changed(value, own)
        diagnostics.extend(own)
        return changed, tuple(MergedOps(entry.code, entry.message, count) for entry, count in own.tallies())

    def _changed(self, value: Value, diagnostics: Diagnostics) -> Value:
        from hespas.generators.obfuscate import Obfuscate, hide_profile_names, reveal_names

        if self.level is None:
            value, revealed, foreign = reveal_names(value, self.key)
            if not revealed:
                raise UsageError(
                    f"no name of the input was made with this key ({foreign:,} look like tokens of another)",
                    hint="name the key file with which the input was obfuscated",
                )
            if foreign:
                message = "names are tokens of another key, and stay"
                diagnostics.warning("obfuscate.other-key", value.name, message, count=foreign)
            return value
        if isinstance(value, Workload):
            own = Diagnostics()
            hidden = Obfuscate(key=self.key, level=self.level)(value, own)
            if self.level == "layers":
                hidden, own = self._close(value, hidden, own)
            diagnostics.extend(own)
            return hidden
        if self.level != "names":
            raise UnsupportedError(
                "shapes and layers of a profile cannot be hidden, because its events are what was measured",
                hint="convert to a trace, such as DST.et, or use `obfuscate_level=names`",
            )
        return hide_profile_names(value, self.key, diagnostics)

    def _close(
        self, original: Workload, hidden: Workload, found: Diagnostics
    ) -> tuple[Workload, Diagnostics]:
        """Return ``hidden`` with its findings if its simulated step is as long as that of ``original``.

        Otherwise, return the original obfuscated with all its layers (fewer layers have fewer launches, which
        may limit a step), or at level ``shapes``. Steps without durations are simulated on a reference
        device.
        """
        from hespas.generators.obfuscate import Obfuscate

        untimed = all(np.isnan(graph.duration_ns).all() for graph in original.classes)
        device = _REFERENCE_DEVICE if untimed else None
        before_ns = simulated_ns(original, device)
        if not before_ns > 0:
            message = "the step cannot be simulated, so the change of its time was not checked"
            found.warning("obfuscate.unchecked", original.name, message)
            return hidden, found
        message = ""
        for level, keeps_layers, visible in _FALLBACKS:
            change = simulated_ns(hidden, device) / before_ns - 1.0
            if abs(change) <= _MOST_CHANGE:
                break
            found = Diagnostics()
            message = f"{visible} stays visible: otherwise, the simulated step changes by {change:+.1%}"
            hidden = Obfuscate(key=self.key, level=level, keeps_layers=keeps_layers)(original, found)
        if message:
            found.warning("obfuscate.kept-layers", original.name, message)
        return hidden, found


def simulated_ns(workload: Workload, hardware: str | None = None, progress: Progress | None = None) -> float:
    """Return the simulated time of a step, NaN if no operation has a duration or ranks never finish."""
    from hespas.api.simulation import simulate

    durations = np.concatenate([graph.duration_ns for graph in workload.classes])
    if hardware is None and np.isnan(durations).all():
        return nan
    try:
        return float(simulate(workload, hardware, progress=progress).step_ns)
    except CheckFailedError:
        return nan
