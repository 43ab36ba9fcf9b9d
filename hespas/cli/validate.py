"""``hespas-validate``: checks of workloads, round trips and captures; accuracy and calibration."""

from __future__ import annotations

from hespas.cli.entry import CommandSource, program
from hespas.cli.entry import run as run_app

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = {
    "check": CommandSource(
        "hespas.cli.check",
        "check",
        "Check the structure of any workload: ids, dependencies, cycles, sizes, matching across ranks.",
        epilog="Exit codes: 0 valid, 1 not valid, 2 wrong usage, 3 malformed input, "
        "4 understood but unsupported.",
    ),
    "roundtrip": CommandSource(
        "hespas.cli.check",
        "roundtrip",
        "Convert files through every pair of formats and back; report what each pair keeps, as a matrix.",
        epilog="Exit codes: 0 all losses are reported, 1 some are not, 2 wrong usage, 3 malformed input.",
    ),
    "capture": CommandSource(
        "hespas.cli.check",
        "capture",
        "Verify a captured program against a trace of its run: operations, order, collectives and bytes.",
        epilog="Exit codes: 0 capture and run agree, 1 they differ, 2 wrong usage, 3 malformed input.",
    ),
    "privacy": CommandSource(
        "hespas.cli.check",
        "privacy",
        "Attack obfuscated workloads with 20 public models, and compare their simulated times.",
    ),
    "conform": CommandSource(
        "hespas.cli.check",
        "conform",
        "Test a tool with 200 sets of execution traces whose results are known; name each case that fails.",
        epilog="Exit codes: 0 all cases passed, 1 some failed, 2 wrong usage, 3 malformed kit.",
    ),
    "noise": CommandSource(
        "hespas.cli.check",
        "noise",
        "Run a program with noise at its contractions; report accuracy or SNR over sigma.",
    ),
    "accuracy": CommandSource(
        "hespas.cli.accuracy",
        "accuracy",
        "Compare estimates with measurements, naive baselines and the noise of the measurement.",
    ),
    "calibrate": CommandSource(
        "hespas.cli.calibrate",
        "calibrate",
        "Fit estimators to measurements and write a hardware file with the fits.",
    ),
    "compare": CommandSource(
        "hespas.cli.accuracy", "compare", "Compare two accuracy reports: errors that grew or shrank."
    ),
    "league": CommandSource(
        "hespas.cli.published_runs",
        "league",
        "Predict the step of every run of a table from its settings, and compare with the measured step.",
    ),
    "serving": CommandSource(
        "hespas.cli.published_runs",
        "serving",
        "Compare measured runs of LLM servers with their predicted TTFT and TPOT.",
    ),
}

app = program(
    "hespas-validate",
    "Check workloads, measure accuracy and calibrate. See also hespas-convert and hespas.",
    COMMANDS,
    {"convert": "hespas-convert", "validate": "hespas-validate check"}
    | {name: f"hespas {name}" for name in ("estimate", "simulate", "view", "hardware", "estimators")},
)


def main() -> None:
    """Run ``hespas-validate``."""
    run_app(app)
