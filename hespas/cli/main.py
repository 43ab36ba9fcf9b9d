"""``hespas``: view, estimate, simulate, analyze, capture, generate, plan and serve workloads."""

from __future__ import annotations

from hespas.cli.entry import CommandSource, program
from hespas.cli.entry import run as run_app

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = {
    "hardware": CommandSource(
        "hespas.cli.hardware",
        "app",
        "List, show and measure devices; show systems and write them for ASTRA-sim.",
    ),
    "sample": CommandSource(
        "hespas.cli.sample",
        "sample",
        "Write small input files of every kind to a folder; without names, list them.",
    ),
    "generate": CommandSource(
        "hespas.cli.generate",
        "app",
        "Generate workloads from settings: models at any parallelism, collectives, random jobs.",
    ),
    "estimate": CommandSource(
        "hespas.cli.estimate",
        "estimate",
        "Estimate the time of each operation class of a step, or of each operation of a table, on a device.",
    ),
    "estimators": CommandSource(
        "hespas.cli.estimate",
        "estimators",
        "List the estimators, their availability on this machine and the packages that they need.",
    ),
    "mcp": CommandSource(
        "hespas.cli.mcp",
        "mcp",
        "Offer view, check, estimate, simulate, analyze, accuracy and others to a language model as tools.",
    ),
    "bundle": CommandSource(
        "hespas.cli.bundle",
        "bundle",
        "Pack the PyTorch traces of a job into one archive that ui.perfetto.dev opens as one timeline.",
    ),
    "view": CommandSource(
        "hespas.cli.view",
        "view",
        "Summarize a file: ranks, operations by class, communication by group, loops, depth and width.",
    ),
    "simulate": CommandSource(
        "hespas.cli.simulate",
        "simulate",
        "Simulate one step: compute, communication and copies in parallel, with memory and critical path.",
        renamed={"--beside": "--overlay"},
    ),
    "analyze": CommandSource(
        "hespas.cli.analyze",
        "analyze",
        "Analyze measured profiles: time breakdown, operations, kernels, critical path and opportunities.",
        renamed={"--against": "--baseline"},
    ),
    "capture": CommandSource(
        "hespas.cli.capture",
        "capture",
        "Capture a JAX or PyTorch program for a mesh of devices, which this machine need not have.",
    ),
    "plan": CommandSource(
        "hespas.cli.plan",
        "plan",
        "Find the fastest, cheapest or most frugal layout of a training step, with a proof.",
    ),
    "serve": CommandSource(
        "hespas.cli.serve",
        "serve",
        "Predict the TTFT, TPOT and throughput of an LLM server, or find its best configuration.",
        renamed={
            "--stack": "--engine",
            "--experts": "--expert-dtype",
            "--cache": "--kv-cache-dtype",
            "--memory-share": "--gpu-memory-utilization",
            "--max-sequences": "--max-num-seqs",
            "--cache-tokens": "--kv-cache-tokens",
            "--host-us": "--step-overhead-us",
            "--request-ms": "--request-overhead-ms",
            "--rows": "--per-request",
        },
    ),
}

app = program(
    "hespas",
    "View, estimate, simulate, analyze, capture, generate, plan and serve workloads. "
    "See also hespas-convert and hespas-validate.",
    COMMANDS,
    {"convert": "hespas-convert"}
    | {name: f"hespas-validate {name}" for name in ("check", "roundtrip", "accuracy", "calibrate", "compare")}
    | {"validate": "hespas-validate"},
)


def main() -> None:
    """Run ``hespas``."""
    run_app(app)
