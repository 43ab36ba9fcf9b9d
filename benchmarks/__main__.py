"""Command that runs benchmarks one after the other (default: all): ``python -m benchmarks [NAME ...]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

__all__ = ["BENCHMARKS", "main"]

BENCHMARKS = {
    "analyze_speed": "hespas analyze --report on a PyTorch profile of 500 MB, against a bare typed decode",
    "astra_speed": "simulator mode astra: a ring of 1,024 ranks, Llama-like steps of 256 ranks and more",
    "calibrate_speed": "hespas-validate calibrate on a table of 100,000 rows",
    "capture_scale": "capture of a training step for 8 to 65,536 devices, against the capture for 8",
    "convert_speed": "conversion of a StableHLO program to Chakra traces, against parsing alone",
    "estimate_speed": "estimates of a graph of a million operations by the composite",
    "et_codec": "the Chakra codec against the protobuf library",
    "graph_replay_peer": "matrix products of replayed CUDA graphs, against the table of TraceLens",
    "host_devices": "training steps on 1 and 4 devices of this CPU, predicted and then measured",
    "hub_memory": "memory of a graph of a million nodes",
    "interference": "slowdown of kernels that overlap collectives: factors from traces, each trace held out",
    "job_speed": "simulation of jobs of 256 and 32,768 ranks, against one rank of each class",
    "joins": "joins of JAX profiles with program text, with names, without names, and of other programs",
    "kineto_read": "reading of a PyTorch profile of 654,000 events, against a bare typed decode",
    "kernel_names": "classes and work bounds that follow from kernel names alone",
    "many_ranks": "one trace of a 65,536-rank job, and 1,024 traces against a plain copy",
    "plan_speed": "searches over 800 to 90,000 layouts, against one simulation of the best layout",
    "published_flops": "model FLOPs of published training runs against the generator, by source",
    "published_hespas": "published step times of Llama 3 and ResNets on four GPUs, from captured programs",
    "published_memory": "peak memory of published training runs, predicted against measured",
    "pytorch_link": "conversion of a profile and an execution trace to a Chakra trace, by size",
    "rank_files": "writing of rank files against a plain copy, peak memory, one file per class",
    "replayed_spans": "simulated spans of profiles and their Chakra traces, against the measured span",
    "rescale_speed": "rescaling of traces of two and four ranks to 65,536, against reading alone",
    "roundtrip_speed": "round trips of the fixtures through every pair of formats",
    "single_gpu": "transformer steps on one GPU, predicted by Hespas and by NeuSight, against measured",
    "systolic_speed": "counts of a million matmuls on a systolic array",
    "torch_capture": "capture of a PyTorch program for 16,384 ranks, against the capture for 8",
}
"""Description of each benchmark by module name. A module has ``main()`` and its own options
(``python -m benchmarks.NAME``).
"""


def main(arguments: Sequence[str]) -> int:
    """Run the named benchmarks. Return 1 if one misses its bound, else 0. Raises ``SystemExit`` for an
    unknown name.
    """
    lines = "\n".join(f"  {name:16} {about}" for name, about in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="Speed and memory against a floor measured in the same run.",
        epilog=f"benchmarks:\n{lines}\n\noptions of a benchmark: python -m benchmarks.NAME --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all)")
    names: list[str] = parser.parse_args(arguments).names or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}")
    missed = False
    sys.argv = sys.argv[:1]  # each benchmark parses sys.argv itself
    for name in names:
        print(f"== {name}", flush=True)
        missed |= bool(import_module(f"benchmarks.{name}").main())
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
