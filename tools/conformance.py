"""Write the archive of the conformance kit: ``python -m tools.conformance KIT.zip [--seed N]``.

With ``--astra-bin PATH`` it runs ASTRA-sim on the cases that finish, and writes the times of their ranks to
the package, which copies them into every kit. ``{Backend}`` in PATH is replaced by Unaware or Aware.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from hespas.validators.conformance import ForeignTool, kit_bytes, make_kit
from hespas.validators.conformance.own import own_times

__all__ = ["main"]

TIMES = Path(__file__).parents[1] / "hespas" / "validators" / "conformance" / "times.json"


def _record(command: str) -> None:
    """Write the times that ASTRA-sim prints, or those of mode ``astra`` for cases that it does not finish."""
    tool = ForeignTool(command, "astra-sim", 60.0, 4 << 30)
    times: dict[str, list[int]] = {}
    for entry in make_kit().cases:
        if entry.case.run != "finish":
            continue
        with TemporaryDirectory() as temporary:
            folder = Path(temporary, "case")
            folder.mkdir()
            for name, content in entry.files.items():
                (folder / name).write_bytes(content)
            found: list[int] | str = tool.finish_ns(folder, Path(temporary), entry.case)
            if not found:
                found = own_times(folder, entry.case)
                sys.stdout.write(f"{entry.case.name}: ASTRA-sim does not finish; {found} by Hespas\n")
        assert isinstance(found, list), found
        times[entry.case.name] = found
    lines = [f" {json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(times.items())]
    TIMES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> int:
    """Write the archive, or the times of ASTRA-sim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", nargs="?", type=Path, help="file to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random cases")
    parser.add_argument("--astra-bin", default="", help="record the times of this ASTRA-sim")
    options = parser.parse_args()
    if options.astra_bin:
        _record(options.astra_bin)
    if options.archive is not None:
        kit = make_kit(options.seed)
        content = kit_bytes(kit)
        options.archive.write_bytes(content)
        size_mb = len(content) / 1e6
        sys.stdout.write(
            f"{options.archive}: kit {kit.manifest.kit}, {len(kit.cases)} cases, {size_mb:.3f} MB\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
