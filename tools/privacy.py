"""Attack 20 public models at each level of obfuscation: ``python -m tools.privacy [--quick]``.

The attacker has every model in four layouts; the victims are the models in two other layouts and batches,
with three keys each. The table shows how often the attacker names the model, without and with knowledge of
the program that obfuscates, how often it names the model if it holds the same layout, and how much the
simulated time changes (first key). About 15 CPU minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

import numpy as np

from hespas import simulate
from hespas.generators.obfuscate import Key, Level, Obfuscate
from hespas.graph import Diagnostics, Workload
from hespas.report import Column, table_from_rows
from hespas.validators.privacy.attacker import Attacker, Reference
from hespas.validators.privacy.fingerprint import fingerprint
from hespas.validators.privacy.library import HELD, PUBLIC_MODELS, UNSEEN, references, training_step

__all__ = ["main"]

_KEYS = 3
_HEADER = (
    Column("hidden"),
    Column("named", kind="share"),
    Column("named, attacker obfuscates too", kind="share"),
    Column("same layout held", kind="share"),
    Column("mean change of the step", kind="share"),
    Column("largest change", kind="share"),
)


def _share(attacker: Attacker, seen: Sequence[tuple[str, Workload]]) -> float:
    """Return the share of workloads whose model the attacker names."""
    return float(np.mean([attacker.ranking(fingerprint(step))[0][0] == model for model, step in seen]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of levels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="attack five models only")
    models = PUBLIC_MODELS[::4] if parser.parse_args(arguments).quick else PUBLIC_MODELS
    victims = [(model, training_step(model, *layout)) for model in models for layout in UNSEEN]
    held = [(model, training_step(model, *layout)) for model in models for layout in HELD]
    times = [simulate(step).step_ns for _, step in victims]
    plain = Attacker.trained(list(references(models)))
    rows: list[tuple[str, float, float | None, float, float | None, float | None]] = [
        ("nothing", _share(plain, victims), None, _share(plain, held), None, None)
    ]
    levels: tuple[Level, ...] = get_args(Level)
    for level in levels:

        def hidden(steps: Sequence[tuple[str, Workload]], level: Level = level) -> list[tuple[str, Workload]]:
            keys = [Key(f"key {number} of victims".encode()) for number in range(_KEYS)]
            return [
                (model, Obfuscate(key=key, level=level)(step, Diagnostics()))
                for key in keys
                for model, step in steps
            ]

        seen = hidden(victims)
        knowing = Attacker.trained(list[Reference](references(models, level)))
        changes = [
            simulate(step).step_ns / before - 1.0 for (_, step), before in zip(seen, times, strict=False)
        ]
        rows.append(
            (
                level,
                _share(plain, seen),
                _share(knowing, seen),
                _share(knowing, hidden(held)),
                float(np.mean(np.abs(changes))),
                float(np.max(np.abs(changes))),
            )
        )
    sys.stdout.write(table_from_rows(_HEADER, rows).to_markdown() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
