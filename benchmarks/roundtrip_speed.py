"""CPU time of round trips through every pair of formats, against reading each file once.

``python -m benchmarks.roundtrip_speed [PATH]`` (default: ``fixtures``) prints CPU seconds, and wall seconds
with two processes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.process import run

__all__ = ["main"]

_FIXTURES = Path(__file__).parents[1] / "fixtures"

_FLOOR = """
import sys
from pathlib import Path
from hespas import api
from hespas.converters import is_recognised
given = Path(sys.argv[1])
for path in [given] if given.is_file() else sorted(given.rglob("*")):
    if path.is_file() and is_recognised(path):
        api.read(path)
"""


def main() -> None:
    """Measure and print the round trips and the floor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "path", nargs="?", default=str(_FIXTURES), help="file or folder to convert (default: fixtures)"
    )
    path: str = parser.parse_args().path
    validate = str(Path(sys.executable).with_name("hespas-validate"))
    started = time.perf_counter()
    ours = run([validate, "roundtrip", path, "--jobs", "2", "--no-progress"])
    wall_s = time.perf_counter() - started
    floor = run([sys.executable, "-c", _FLOOR, path])
    print(f"{path}: round trips through every pair of formats, against reading every file once")
    for name, usage in (("roundtrip", ours), ("floor", floor)):
        print(f"  {name:9}  {usage.user_s + usage.system_s:6.1f} s CPU  {usage.peak_mb:6.0f} MB peak")
    print(f"  {wall_s:.1f} s wall with two processes; CPU ratio {ours.user_s / floor.user_s:.1f}")


if __name__ == "__main__":
    main()
