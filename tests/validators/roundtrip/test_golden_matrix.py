"""The matrix over all fixtures is the one the documents show: ``python -m docs.roundtrip`` makes both."""

from __future__ import annotations

import json
from pathlib import Path

from docs.roundtrip import GOLDEN, golden_document, roundtrip_document
from hespas.validators import roundtrip

ROOT = Path(__file__).parents[3]


def test_every_pair_keeps_what_the_documents_say() -> None:
    done = roundtrip([ROOT / "fixtures"])
    assert done.valid
    assert json.loads(golden_document(done)) == json.loads(GOLDEN.read_text("utf-8"))
    assert roundtrip_document(done) == (ROOT / "docs" / "roundtrip.md").read_text("utf-8")
