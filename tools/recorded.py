"""Figure in the README, drawn by ``python -m tools.recorded``. It predicts one recording in fixtures/recorded
from the other, before and after calibration, and shows the longest operations.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from tools.documents import ROOT, document_command

__all__ = ["drawing", "main", "predicted"]

RECORDED = ROOT / "fixtures" / "recorded"
DEVICE = RECORDED / "recorded-cpu.toml"
PICTURE = ROOT / "docs" / "recorded.svg"
_SHOWN = 10
_WIDTH, _LEFT, _BAR, _GAP, _TOP = 860, 190, 9, 14, 64
_SERIES = (
    ("measured", "#333f50"),
    ("predicted from a recording of a smaller model", "#2a9d8f"),
    ("predicted from the device's peaks alone", "#d9a441"),
)


def predicted(device: Path, folder: Path) -> Mapping[str, tuple[float, float]]:
    """Return the measured and predicted time [ns] of each operation of the larger recording on ``device``."""
    recording = str(RECORDED / "train-larger.xplane.pb.gz")
    _hespas("accuracy", "--measured", recording, "--hardware", str(device), "--report", str(folder))
    with (folder / "report.csv").open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["estimator"] == "composite"]
    return {row["label"]: (float(row["measured_ns"]), float(row["predicted_ns"])) for row in rows}


def _hespas(*arguments: str) -> None:
    command = [sys.executable, "-c", "from hespas.cli.validate import main; main()", *arguments, "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def drawing(rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return an SVG of horizontal bars in ms, one group per operation, readable on light and dark pages."""
    longest = max(max(values) for _, values in rows)
    scale = (_WIDTH - _LEFT - 80) / longest
    height = _TOP + len(rows) * (len(_SERIES) * _BAR + _GAP) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/><g font-size="11">',
    ]
    for place, (name, colour) in enumerate(_SERIES):
        y = 14 + 16 * place
        parts.append(f'<rect x="{_LEFT}" y="{y - 9}" width="12" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + 18}" y="{y}">{escape(name)}</text>')
    for place, (label, values) in enumerate(rows):
        top = _TOP + place * (len(_SERIES) * _BAR + _GAP)
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 17}" text-anchor="end">{escape(label)}</text>')
        for number, (value, (_, colour)) in enumerate(zip(values, _SERIES, strict=True)):
            y, width = top + number * _BAR, max(value * scale, 1.0)
            parts.append(
                f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 1}" fill="{colour}"/>'
            )
            parts.append(
                f'<text x="{_LEFT + width + 4:.1f}" y="{y + 8}" font-size="9">{value / 1e6:.2f} ms</text>'
            )
    return "\n".join([*parts, "</g></svg>\n"])


def _documents() -> Mapping[Path, str]:
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "calibrated.toml"
        recording = str(RECORDED / "train-small.xplane.pb.gz")
        _hespas("calibrate", "--measured", recording, "--hardware", str(DEVICE), "--out", str(own))
        peaks = predicted(DEVICE, Path(folder) / "peaks")
        fitted = predicted(own, Path(folder) / "fitted")
    longest = sorted(fitted, key=lambda label: -fitted[label][0])[:_SHOWN]
    rows = [(label, (fitted[label][0], fitted[label][1], peaks[label][1])) for label in longest]
    return {PICTURE: drawing(rows)}


def main() -> int:
    """Write the figure; return 1 if it is stale with ``--check``."""
    return document_command(__doc__, _documents)


if __name__ == "__main__":
    sys.exit(main())
