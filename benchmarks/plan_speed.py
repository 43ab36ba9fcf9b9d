"""CPU time of ``hespas plan`` against one simulation of the best layout: ``python -m benchmarks.plan_speed``.

Each search, and the simulation of the layout that it returns, run in separate processes; both figures include
the start of Python. Prints the number of layouts, the CPU seconds of both, and their ratio (the cost of the
search in simulations). Exits with 1 if a search takes more CPU time than its bound or than simulations of all
layouts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.process import run

__all__ = ["main"]

_ALL_AXES: dict[str, Any] = {"model": "llama-3-70b", "devices": 256, "global_batch": 512}
_SEARCHES: dict[str, tuple[dict[str, Any], float]] = {
    "8B on 64, some axes": (
        {"model": "llama-3-8b", "devices": 64, "global_batch": 128, "zero": [1], "vp": [1], "cp": [1, 2]},
        20.0,
    ),
    "70B on 256, all axes": (_ALL_AXES, 120.0),
    "70B, six clusters": (_ALL_AXES | {"devices": [32, 64, 128, 256, 384, 512], "global_batch": 768}, 600.0),
}
"""Settings and bound [CPU s] of each search, by name."""

_SYSTEM = {"hardware": "H100-SXM", "system": "dgx-h100"}
_SEARCH = """
import json, sys
import hespas
settings = json.loads(sys.argv[1])
found = hespas.plan(**settings).to_dict()
with open(sys.argv[2], "w") as file:
    json.dump([found["proof"]["layouts"], found["rows"][0]["settings"]], file)
"""
_SIMULATION = """
import json, sys
import hespas
settings, system, best = map(json.loads, sys.argv[1:])
best = {name: value for name, value in best.items() if value}
hespas.generate(hespas.llm_step(settings["model"], global_batch=settings["global_batch"], **best), **system)
"""


def main() -> int:
    """Measure and print. Return 1 if a bound is exceeded, else 0."""
    print("search                 layouts   CPU s   one simulation   ratio")
    missed = False
    with TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        for name, (settings, most_s) in _SEARCHES.items():
            search = run([sys.executable, "-c", _SEARCH, json.dumps(settings | _SYSTEM), str(found)])
            layouts, best = json.loads(found.read_text())
            one = run([sys.executable, "-c", _SIMULATION, *map(json.dumps, (settings, _SYSTEM, best))])
            spent_s, one_s = (each.user_s + each.system_s for each in (search, one))
            ratio = spent_s / one_s
            print(f"{name:22} {layouts:7,}  {spent_s:6.1f}  {one_s:15.2f}  {ratio:6.1f}")
            missed |= spent_s > most_s or ratio > layouts
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
