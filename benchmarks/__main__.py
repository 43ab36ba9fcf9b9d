"""Benchmarks one after the other: ``python -m benchmarks [NAME ...]``, by default all of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

__all__ = ["BENCHMARKS", "main"]

BENCHMARKS = {
    "analyze_speed": "a PyTorch profile of 500 MB analysed, with its page, against a bare typed decode",
    "astra_speed": "mode astra of the simulator: a ring of 1,024 ranks, a Llama-like step of 256 and more",
    "calibrate_speed": "hespas-validate calibrate on a table of 100,000 rows",
    "capture_scale": "a training step captured for 8 to 65,536 devices, against that for 8",
    "convert_speed": "a StableHLO program to Chakra traces, against parsing it only",
    "estimate_speed": "a graph of a million operations estimated by the composite",
    "et_codec": "the Chakra codec against the protobuf library",
    "graph_replay_peer": "matrix products of replayed graphs, beside a peer's table of the same recordings",
    "host_devices": "training steps on 1 and 4 devices of this CPU, predicted, then run",
    "hub_memory": "memory of a graph of a million nodes",
    "interference": "kernels beside collectives in recorded traces: factors, and each trace by the others",
    "job_speed": "jobs of 256 and 32,768 ranks that wait for each other, against one rank of each class",
    "joins": "profiled JAX programs joined to their text with names and without, and to other programs",
    "kineto_read": "a PyTorch profile of 654,000 events read, against a bare typed decode",
    "kernel_names": "what names of kernels alone say of profiles: classes, and bounds on their work",
    "many_ranks": "one trace of a 65,536-rank job, and 1,024 traces against a plain copy",
    "plan_speed": "searches for the best of 800 to 90,000 layouts, against one simulation of it",
    "published_flops": "model FLOPs of published training runs against those of the generator, by source",
    "published_hespas": "published step times of Llama 3 and ResNets on four GPUs, from captured programs",
    "published_memory": "peak memory of published training runs against the predicted, and which fit",
    "pytorch_link": "a profile and an execution trace linked and written as a Chakra trace, by size",
    "rank_files": "files of all ranks against a plain copy, memory at most ranks, one file per class",
    "replayed_spans": "profiles as graphs and Chakra traces, simulated, against the measured span",
    "rescale_speed": "traces of two and four ranks taken to 65,536, against reading them alone",
    "roundtrip_speed": "every pair of formats over the fixtures, there and back",
    "single_gpu": "transformers on one GPU against measured times, beside the predictions of NeuSight",
    "systolic_speed": "a million matmuls counted on a systolic array",
    "torch_capture": "a PyTorch program captured for 16,384 ranks, against the same for 8",
}
"""Each is a module of this folder with a ``main()`` and options of its own: ``python -m benchmarks.NAME``."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmarks that are named; 1 where one misses the bound it states. Wrong names raise
    ``SystemExit``.
    """
    lines = "\n".join(f"  {name:16} {about}" for name, about in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="Speed and memory against a floor measured in the same run.",
        epilog=f"benchmarks:\n{lines}\n\noptions of one: python -m benchmarks.NAME --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a benchmark to run (default: all)")
    names: list[str] = parser.parse_args(arguments).names or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}")
    missed = False
    sys.argv = sys.argv[:1]  # that of each benchmark, which reads its own
    for name in names:
        print(f"== {name}", flush=True)
        missed |= bool(import_module(f"benchmarks.{name}").main())
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
