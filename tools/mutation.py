"""Mutation tests of the numerical modules: the share of mutants that the tests detect.

``python -m tools.mutation [MODULE...] [--sample 60] [--seed 1] [--least 0.85]`` copies the checkout to a
temporary folder, changes one operator, number or condition of a module at a time there (cosmic-ray), and runs
the tests of that module. It prints the share of mutants that fail a test, and the surviving
changes. The exit code is 1 if a module's share is below ``--least``. The packages are in the dependency group
``mutation``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

__all__ = ["MODULES", "MutationScore", "main", "score_of"]

ROOT = Path(__file__).parents[1]

MODULES = {
    "hespas/analysis/device_use.py": (
        "tests/analysis/test_device_use.py",
        "tests/analysis/test_memory.py",
        "tests/analysis/test_breakdown.py",
        "tests/analysis/test_idle.py",
    ),
    "hespas/converters/linking.py": ("tests/converters/test_linking.py",),
    "hespas/costs/contraction.py": (
        "tests/costs/test_contraction_costs.py",
        "tests/costs/test_convolution_costs.py",
        "tests/costs/test_cost_table.py",
        "tests/costs/test_low_precision_costs.py",
    ),
    "hespas/estimators/forms.py": (
        "tests/estimators/test_form_terms.py",
        "tests/estimators/test_array_form.py",
        "tests/estimators/test_forms.py",
    ),
    "hespas/estimators/roofline.py": (
        "tests/estimators/test_roofline_operations.py",
        "tests/estimators/test_network_costs.py",
        "tests/estimators/test_low_precision_times.py",
        "tests/estimators/test_roofline.py",
    ),
    "hespas/generators/llm/memory.py": (
        "tests/generators/llm/test_memory_bytes.py",
        "tests/generators/llm/test_memory.py",
    ),
    "hespas/graph/groups.py": ("tests/graph/test_group_membership.py", "tests/graph/test_groups.py"),
    "hespas/hardware/peaks.py": (
        "tests/hardware/test_hardware_peaks.py",
        "tests/hardware/test_hardware_products.py",
        "tests/hardware/test_hardware_energy.py",
        "tests/hardware/test_hardware_rates.py",
    ),
    "hespas/operations/from_graph.py": ("tests/operations",),
    "hespas/simulator/interference.py": ("tests/simulator/test_interference_factors.py",),
    "hespas/simulator/memory/buffers.py": (
        "tests/simulator/memory/test_buffers.py",
        "tests/simulator/memory/test_memory_use.py",
        "tests/simulator/memory/test_xla_buffer_assignment.py",
    ),
    "hespas/simulator/network/algorithms.py": (
        "tests/simulator/network/test_algorithm_terms.py",
        "tests/simulator/network/test_algorithms.py",
        "tests/simulator/network/test_traffic.py",
    ),
}
"""Modules with the tests that protect them."""

_EXCLUDED = ("core/ReplaceBinaryOperator_BitOr", "core/RemoveDecorator", "core/ReplaceUnaryOperator_Delete")
"""Operators whose mutants are mostly equal programs: unions of types, decorators for type checkers."""


class MutationScore(NamedTuple):
    """Numbers of tested and killed mutants, and the difference of each survivor."""

    tested: int
    killed: int
    survivors: tuple[str, ...]

    @property
    def share(self) -> float:
        """Share of killed mutants; 1 without mutants."""
        return self.killed / self.tested if self.tested else 1.0


def score_of(module: str, tests: Sequence[str], *, sample: int, seed: int, checkout: Path) -> MutationScore:
    """Return the score of a random sample of mutants of a module in ``checkout``; the call changes the
    checkout.
    """
    options = ("-x", "-q", "-p", "no:cacheprovider", "--sample", "300")
    command = [sys.executable, "-m", "pytest", *options, *tests]
    with tempfile.TemporaryDirectory() as folder:
        settings, session = Path(folder) / "mutation.toml", Path(folder) / "session.sqlite"
        quoted = " ".join(f"'{word}'" for word in command)
        settings.write_text(
            f"[cosmic-ray]\nmodule-path = {json.dumps(module)}\ntimeout = 120.0\nexcluded-modules = []\n"
            f'test-command = {json.dumps(quoted)}\n[cosmic-ray.distributor]\nname = "local"\n',
            encoding="utf-8",
        )
        subprocess.run(command, cwd=checkout, check=True, capture_output=True)
        _cosmic_ray("init", settings, session, checkout)
        _keep_sample(session, sample, seed)
        _cosmic_ray("exec", settings, session, checkout)
        with sqlite3.connect(session) as database:
            rows = database.execute("SELECT test_outcome, diff FROM work_results").fetchall()
    survivors = tuple(str(diff) for outcome, diff in rows if str(outcome).upper().endswith("SURVIVED"))
    return MutationScore(len(rows), len(rows) - len(survivors), survivors)


def _cosmic_ray(action: str, settings: Path, session: Path, checkout: Path) -> None:
    command = [sys.executable, "-m", "cosmic_ray.cli", action, str(settings), str(session)]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)


def _keep_sample(session: Path, sample: int, seed: int) -> None:
    """Remove all mutants but a random sample of those with useful operators."""
    with sqlite3.connect(session) as database:
        rows = database.execute("SELECT job_id, operator_name FROM mutation_specs ORDER BY job_id").fetchall()
        places = database.execute(
            "SELECT job_id FROM mutation_specs "
            "ORDER BY operator_name, occurrence, start_pos_row, start_pos_col"
        ).fetchall()
        useful = {job for job, operator in rows if not str(operator).startswith(_EXCLUDED)}
        listed = [job for (job,) in places if job in useful]
        chosen = set(Random(seed).sample(listed, min(sample, len(listed))))
        for job, _ in rows:
            if job not in chosen:
                database.execute("DELETE FROM mutation_specs WHERE job_id = ?", (job,))
                database.execute("DELETE FROM work_items WHERE job_id = ?", (job,))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the scores; return 1 if one is too low."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="modules to test (default: all)")
    parser.add_argument("--sample", type=int, default=60, help="mutants per module (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the random sample (default: %(default)s)"
    )
    parser.add_argument(
        "--least", type=float, default=0.85, help="least share of killed mutants (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    unknown = [module for module in options.modules if module not in MODULES]
    if unknown:
        parser.error(f"unknown module {unknown[0]}: choose from {', '.join(MODULES)}")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    low = False
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder)
        for name in files.stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, checkout / name)
        for module in options.modules or MODULES:
            score = score_of(
                module, MODULES[module], sample=options.sample, seed=options.seed, checkout=checkout
            )
            low |= score.share < options.least
            for difference in score.survivors:
                sys.stdout.write(f"{difference}\n")
            sys.stdout.write(f"{module}: {score.killed} of {score.tested} killed, {score.share:.0%}\n")
            sys.stdout.flush()
    return int(low)


if __name__ == "__main__":
    sys.exit(main())
