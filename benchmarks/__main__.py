"""All benchmarks, one after the other: ``python -m benchmarks``."""

from __future__ import annotations

import sys
from importlib import import_module

MODULES = (
    "calibrate_speed",
    "convert_speed",
    "estimate_speed",
    "et_codec",
    "hub_memory",
    "kineto_read",
    "many_ranks",
    "pytorch_link",
    "roundtrip_speed",
    "systolic_speed",
)

if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    for name in MODULES:
        print(f"== {name}")
        import_module(f"benchmarks.{name}").main()
