"""The matrix over all fixtures is the one the documents show: ``python -m tools.roundtrip`` makes both. That
takes minutes; the quick part asks of the small programs that nothing is lost unreported.
"""

from __future__ import annotations

import json
from pathlib import Path

from hespas.validators.roundtrip import roundtrip
from tools.roundtrip import GOLDEN, golden_document, roundtrip_document

ROOT = Path(__file__).parents[3]
_SMALL_BYTES = 2_000


def test_every_pair_keeps_what_the_documents_say() -> None:
    done = roundtrip([ROOT / "fixtures"])
    assert done.valid
    assert json.loads(golden_document(done)) == json.loads(GOLDEN.read_text("utf-8"))
    assert roundtrip_document(done) == (ROOT / "docs" / "accuracy" / "roundtrip.md").read_text("utf-8")


def test_small_programs_lose_nothing_unreported() -> None:
    programs = [
        path
        for folder in ("stablehlo", "hlo")
        for path in sorted((ROOT / "fixtures" / folder).iterdir())
        if path.stat().st_size < _SMALL_BYTES
    ]
    assert len(programs) > 10
    assert roundtrip(programs[::4], jobs=1).valid
