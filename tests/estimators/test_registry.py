"""Estimators that input files may name: those that declare it for their own code."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hespas.estimators import registry
from hespas.estimators.registry import check_stated_estimator, estimator_factory
from hespas.estimators.roofline import Roofline
from hespas.files.trust import allowing_programs
from hespas.graph.errors import BoundaryError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlugIn(Roofline):
    """An estimator of another package, whose base class declares ``inert_options``."""


def refused(spelling: str) -> bool:
    try:
        check_stated_estimator(spelling, "grid.toml", "estimator")
    except BoundaryError:
        return True
    return False


@pytest.mark.parametrize(
    ("spelling", "is_refused"),
    [
        ("roofline", False),
        ("roofline:algorithm=ring,sort_passes=2", False),
        ("systolic:array=8x8,dataflow=ws", False),
        ("composite", False),
        ("no such estimator", False),
        ("auto", False),
        ("composite:order=roofline", True),
        ("composite:path=order.toml", True),
        ("database:path=table.csv", True),
        ("database:split=calib,path=table.csv", True),
        ("learned:models=folder", True),
        ("training:base=roofline", True),
        ("xla", True),
        ("scalesim:array=8x8", True),
    ],
)
def test_an_estimator_that_a_file_states(spelling: str, is_refused: bool) -> None:
    assert refused(spelling) == is_refused
    with allowing_programs():
        assert not refused(spelling)


def test_estimators_that_run_programs_declare_nothing() -> None:
    names = {name for name in registry.BUILTIN if not hasattr(estimator_factory(name), "inert_options")}
    assert names == {"xla", "iree", "scalesim", "zigzag", "onnxim", "cocossim"}


def test_a_plug_in_declares_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{__name__}:PlugIn"
    monkeypatch.setitem(registry.BUILTIN, "mine", target)
    assert refused("mine")
