"""The partition by the form of groups equals the comparison of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import hespas
from hespas.graph import Workload
from hespas.validators.checker import rank_equivalence
from hespas.validators.checker.rank_equivalence import RankEquivalence, rank_equivalence_of

FIXTURES = Path(__file__).parents[3] / "fixtures"

_PROGRAM = """HloModule m, num_partitions={ranks}, replica_count=1

add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}

ENTRY e {{
  p0 = f32[64]{{0}} parameter(0)
{lines}
}}
"""
_REDUCE = (
    "  p{next} = f32[64]{{0}} all-reduce(p{last}), replica_groups={groups}, channel_id={next}, "
    "use_global_device_ids=true, to_apply=add"
)
_PERMUTE = (
    "  p{next} = f32[64]{{0}} collective-permute(p{last}), channel_id={next}, source_target_pairs={pairs}"
)


def _program(path: Path, ranks: int, groups: Sequence[str], step: int) -> Workload:
    lines = [_REDUCE.format(next=place + 1, last=place, groups=each) for place, each in enumerate(groups)]
    if step:
        pairs = ",".join(f"{{{rank},{(rank + step) % ranks}}}" for rank in range(ranks))
        lines.append(_PERMUTE.format(next=len(lines) + 1, last=len(lines), pairs=f"{{{pairs}}}"))
    lines[-1] = lines[-1].replace("  p", "  ROOT p", 1)
    path.write_text(_PROGRAM.format(ranks=ranks, lines="\n".join(lines)))
    read = hespas.read(path)
    assert isinstance(read, Workload)
    return read


def _said(found: RankEquivalence) -> tuple[object, ...]:
    channels = [(list(each.members), each.kinds, each.absent) for each in found.channels]
    rows = (found.channel_rows, found.send_pairs, found.receive_pairs)
    return found.kind.tolist(), found.representatives, found.sizes, channels, *rows


def _never(workload: Workload) -> bool:
    del workload
    return False


@pytest.mark.parametrize(
    ("groups", "step"),
    [
        (["[1,8]<=[8]"], 0),
        (["[2,4]<=[8]", "[4,2]<=[8]"], 0),
        (["[4,2]<=[2,4]T(1,0)", "[2,4]<=[8]", "[1,8]<=[8]"], 0),
        (["[4,2]<=[2,4]T(1,0)", "[4,2]<=[2,4]T(1,0)"], 1),
        (["[2,4]<=[2,2,2]T(1,0,2)"], 1),
        (["[8,1]<=[8]"], 4),
    ],
)
def test_the_form_says_what_all_ranks_do(
    tmp_path: Path, groups: list[str], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = _program(tmp_path / "m.hlo.txt", 8, groups, step)
    by_form = _said(rank_equivalence_of(workload))
    assert rank_equivalence._is_regular(workload)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(rank_equivalence, "_is_regular", _never)
    assert _said(rank_equivalence_of(workload)) == by_form


def test_programs_whose_ranks_differ_are_compared_rank_by_rank(tmp_path: Path) -> None:
    explicit = _program(tmp_path / "m.hlo.txt", 8, ["{{0,1,2},{3,4},{5,6,7}}"], 0)
    assert len(rank_equivalence_of(explicit).representatives) == 2
