"""Pictures of the concept pages, drawn from samples: ``python -m tools.concepts [--check]``.

The pictures are SVGs that a page includes in its own text, so their colours follow the scheme of the page.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

import hespas
from hespas.api.samples import FILES
from hespas.graph import OpClass, OpGraph, Workload
from tools.documents import ROOT, document_command

__all__ = ["FOLDER", "main", "pictures"]

FOLDER = ROOT / "docs" / "assets"
_WIDTH = 560
_DEVICE = "H100-SXM"


def pictures() -> Mapping[Path, str]:
    """Return the pictures by their paths."""
    return {
        FOLDER / "op-graph.svg": _op_graph(),
        FOLDER / "rank-class.svg": _rank_classes(),
        FOLDER / "estimate.svg": _estimates(),
        FOLDER / "exposed.svg": _exposed(),
    }


def _svg(name: str, title: str, description: str, height: float, parts: Iterable[str]) -> str:
    """Return an SVG with a title and a description for screen readers."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" viewBox="0 0 {_WIDTH} {height:.0f}" '
        f'role="img" aria-labelledby="{name}-title {name}-text">'
    )
    texts = (
        f'<title id="{name}-title">{escape(title)}</title>',
        f'<desc id="{name}-text">{escape(description)}</desc>',
    )
    return "\n".join((head, *texts, *parts, "</svg>")) + "\n"


def _text(x: float, y: float, text: str, *, style: str = "", anchor: str = "middle") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="5" class="{style}"/>'


def _path(points: str, style: str) -> str:
    return f'<path d="{points}" class="{style}"/>'


def _arrow(x: float, y: float, right: float, down: float) -> str:
    """Return the head of an arrow at a point; ``right`` and ``down`` are its direction, of length 1."""
    left_x, left_y = x - 8 * right + 4 * down, y - 8 * down - 4 * right
    other_x, other_y = x - 8 * right - 4 * down, y - 8 * down + 4 * right
    return _path(f"M{x:.1f} {y:.1f}L{left_x:.1f} {left_y:.1f}L{other_x:.1f} {other_y:.1f}Z", "head")


def _levels(graph: OpGraph) -> list[list[int]]:
    """Return the nodes by the length of the longest chain of dependencies before them."""
    depth: list[int] = []
    for node in range(len(graph)):
        depth.append(1 + max((depth[int(other)] for other in graph.data_deps.row(node)), default=-1))
    return [[node for node, level in enumerate(depth) if level == wanted] for wanted in range(max(depth) + 1)]


def _op_graph() -> str:
    done = hespas.estimate(str(FILES / "mlp_train.mlir"), _DEVICE)
    graph, times = done.workload.classes[0], done.estimates[0].duration_ns
    levels = _levels(graph)
    width, tall, step, top = 150, 38, 64, 46
    at: dict[int, tuple[float, float]] = {}
    level_of: dict[int, int] = {}
    for level, nodes in enumerate(levels):
        for place, node in enumerate(nodes):
            at[node] = ((place + 0.5) * _WIDTH / len(nodes), top + level * step)
            level_of[node] = level
    parts: list[str] = []
    lane = 4.0
    for node, (x, y) in at.items():
        for other in map(int, graph.data_deps.row(node)):
            from_x, from_y = at[other]
            if level_of[node] == level_of[other] + 1:
                start, end, middle = from_y + tall, y, (from_y + tall + y) / 2
                bend = f"{from_x:.1f} {middle:.1f} {x:.1f} {middle:.1f}"
                parts.append(_path(f"M{from_x:.1f} {start:.1f}C{bend} {x:.1f} {end - 6:.1f}", "edge"))
                parts.append(_arrow(x, end, 0, 1))
            else:  # past other levels: along the left border
                side, to_x = from_x - width / 2, x - width / 4
                up = f"M{side:.1f} {from_y + tall / 2:.1f}H{lane:.1f}V{y - 16:.1f}"
                parts.append(_path(f"{up}H{to_x:.1f}V{y - 6:.1f}", "edge"))
                parts.append(_arrow(to_x, y, 0, 1))
                lane += 6
    for node, (x, y) in at.items():
        is_product = graph.op_class[node] == OpClass.CONTRACTION
        parts.append(_box(x - width / 2, y, width, tall, "one" if is_product else "two"))
        parts.append(_text(x, y + 16, graph.node_name(node)))
        work = f"{graph.flops[node] / 1e6:.3g} MFLOP, " if graph.flops[node] >= 1e4 else ""
        parts.append(_text(x, y + 31, f"{work}{times[node] / 1e3:.1f} us", style="small"))
    legend = [
        _box(8, 8, 16, 16, "one"),
        _text(30, 21, "matmul", anchor="start"),
        _box(100, 8, 16, 16, "two"),
        _text(122, 21, "fusion of elementwise operations", anchor="start"),
    ]
    description = (
        f"{len(graph)} nodes with FLOPs and their estimated time on {_DEVICE}; arrows lead from a node to "
        "the nodes that depend on its result."
    )
    title = "Op graph of a training step of a small MLP"
    return _svg("op-graph", title, description, top + len(levels) * step, [*legend, *parts])


def _rank_classes() -> str:
    workload = hespas.read(FILES / "pipeline_2x2")
    assert isinstance(workload, Workload)
    box, wide, top = 150, 60, 74
    at = {rank: (70 + (rank % 2) * 270, top + (rank // 2) * 176) for rank in range(workload.num_ranks)}
    parts: list[str] = []
    for index in range(len(workload.classes)):
        ranks = [rank for rank in at if workload.rank_class[rank] == index]
        left, upper = at[ranks[0]]
        right = at[ranks[-1]][0] + box
        parts.append(_box(left - 24, upper - 36, right - left + 48, wide + 54, "group"))
        listed = " and ".join(map(str, ranks))
        parts.append(_text((left + right) / 2, upper - 16, f"rank class {index}: ranks {listed}"))
        y = upper + wide / 2
        parts.append(_path(f"M{left + box + 8:.1f} {y:.1f}H{at[ranks[-1]][0] - 8:.1f}", "edge"))
        parts += [_arrow(left + box, y, -1, 0), _arrow(at[ranks[-1]][0], y, 1, 0)]
        parts.append(_text((left + box + at[ranks[-1]][0]) / 2, y - 8, "all-reduce", style="small"))
    for x, y in (at[0], at[1]):
        parts.append(_path(f"M{x + 50:.1f} {y + wide:.1f}V{at[2][1] - 8:.1f}", "edge"))
        parts.append(_arrow(x + 50, at[2][1], 0, 1))
        parts.append(_path(f"M{x + 100:.1f} {at[2][1]:.1f}V{y + wide + 8:.1f}", "edge"))
        parts.append(_arrow(x + 100, y + wide, 0, -1))
        parts.append(_text(x + 44, y + wide + 46, "activations", style="small", anchor="end"))
        parts.append(_text(x + 106, y + wide + 46, "gradients", style="small", anchor="start"))
    for rank, (x, y) in at.items():
        parts.append(_box(x, y, box, wide, "one" if workload.rank_class[rank] == 0 else "two"))
        parts.append(_text(x + box / 2, y + 27, f"rank {rank}"))
        nodes = len(workload.classes[int(workload.rank_class[rank])])
        parts.append(_text(x + box / 2, y + 46, f"{nodes} nodes", style="small"))
    description = (
        "Four ranks in two rank classes. The ranks of a class are joined by all-reduces; rank 0 exchanges "
        "activations and gradients with rank 2, and rank 1 with rank 3."
    )
    return _svg("rank-class", "Rank classes of a pipeline of two stages", description, top + 266, parts)


def _estimates() -> str:
    sizes = [2**power for power in range(7, 15)]
    rows = "".join(f"matmul,bf16,{size},{size},{size}\n" for size in sizes)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "sizes.csv"
        table.write_text(f"kind,dtype,m,n,k\n{rows}", encoding="utf-8")
        estimated = hespas.estimate_table(table, _DEVICE).to_pandas()
        roof = hespas.estimate_table(table, _DEVICE, estimator="roofline").to_pandas()
    left, bottom, upper, right = 70.0, 300.0, 20.0, 540.0
    low, high = 1e3, 2e7

    def x_of(size: float) -> float:
        return left + 20 + (math.log2(size) - 7) / 7 * (right - left - 40)

    def y_of(duration_ns: float) -> float:
        return bottom - math.log10(duration_ns / low) / math.log10(high / low) * (bottom - upper)

    def line(values: Sequence[float], *, backwards: bool = False) -> str:
        points = [f"{x_of(size):.1f} {y_of(value):.1f}" for size, value in zip(sizes, values, strict=True)]
        return "L".join(reversed(points) if backwards else points)

    parts = [_path(f"M{left} {upper}V{bottom}H{right}", "axis")]
    for power, label in ((3, "1 us"), (4, "10 us"), (5, "100 us"), (6, "1 ms"), (7, "10 ms")):
        parts.append(_path(f"M{left} {y_of(10**power):.1f}H{right}", "grid"))
        parts.append(_text(left - 8, y_of(10**power) + 4, label, style="small", anchor="end"))
    parts += [_text(x_of(size), bottom + 18, f"{size:,}", style="small") for size in sizes]
    parts.append(_text((left + right) / 2, bottom + 38, "M = N = K of a bf16 matmul", style="small"))
    columns = {name: list(map(float, estimated[name])) for name in ("duration_ns", "low_ns", "high_ns")}
    band = f"M{line(columns['high_ns'])}L{line(columns['low_ns'], backwards=True)}Z"
    parts.append(_path(band, "band"))
    parts.append(_path(f"M{line(columns['duration_ns'])}", "line-one"))
    parts.append(_path(f"M{line(list(map(float, roof['duration_ns'])))}", "line-two"))
    for place, (style, text) in enumerate(
        (("line-one", "estimate (learned) with 90 % interval"), ("line-two", "roofline of the data sheet"))
    ):
        parts.append(_path(f"M{left + 16:.1f} {upper + 14 + 20 * place}h26", style))
        parts.append(_text(left + 50, upper + 18 + 20 * place, text, style="small", anchor="start"))
    description = (
        f"Time of square bf16 matmuls on {_DEVICE} against their size, both logarithmic. The estimate is "
        "above the roofline at every size, by the largest factor for small matmuls."
    )
    return _svg("estimate", "Estimate and roofline of matmuls", description, bottom + 50, parts)


def _exposed() -> str:
    done = hespas.simulate(str(FILES / "hand_gpu_async.hlo.txt"), "A100-SXM-80GB")
    timeline, graph = done.timeline, done.workload.classes[0]
    step = float(done.step_ns)
    left, top, tall, gap = 122.0, 30.0, 44.0, 24.0
    shown = [name for name in timeline.resources if name in {"compute", "communication"}]
    rows = {name: top + place * (tall + gap) for place, name in enumerate(shown)}

    def x_of(time_ns: float) -> float:
        return left + time_ns / step * (_WIDTH - left - 12)

    parts = [_text(left - 10, y + tall / 2 + 4, name, anchor="end") for name, y in rows.items()]
    computing: list[tuple[float, float]] = []
    communicating: list[tuple[float, float]] = []
    for event in range(len(timeline.node)):
        start, end = float(timeline.start_ns[event]), float(timeline.end_ns[event])
        resource = timeline.resources[int(timeline.resource[event])]
        if end <= start or resource not in rows:
            continue
        (computing if resource == "compute" else communicating).append((start, end))
        y, width = rows[resource], x_of(end) - x_of(start)
        style = "one" if resource == "compute" else "two"
        parts.append(
            _box(x_of(start), y, width, tall, f"{style} critical" if timeline.critical[event] else style)
        )
        label = graph.node_name(int(timeline.node[event])).removesuffix("-start")
        if width > 7 * len(label):
            parts.append(_text(x_of(start) + width / 2, y + tall / 2 + 4, label, style="small"))
    below = top + len(rows) * (tall + gap)
    parts.append(_text(left - 10, below + 14, "exposed", anchor="end"))
    for start, end in _outside(communicating, computing):
        parts.append(_box(x_of(start), below, x_of(end) - x_of(start), 20, "exposed"))
    axis = below + 44
    parts.append(_path(f"M{left:.1f} {axis - 12:.1f}H{_WIDTH - 12}", "axis"))
    parts.append(_text(left, axis + 4, "0", style="small"))
    parts.append(_text(_WIDTH - 12, axis + 4, f"{step / 1e3:.1f} us", style="small", anchor="end"))
    exposed = float(timeline.exposed_comm_ns[0])
    description = (
        f"Timeline of a rank: computation and communication overlap. During {exposed / 1e3:.1f} us of "
        f"{step / 1e3:.1f} us the rank communicates and computes nothing. Operations with an outline are on "
        "the critical path."
    )
    return _svg("exposed", "Exposed communication in a simulated step", description, axis + 14, parts)


def _outside(
    spans: Sequence[tuple[float, float]], covered: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return the parts of spans that no other span covers. Spans of a list do not overlap each other."""
    free: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        at = start
        for other_start, other_end in sorted(covered):
            if other_start < end and other_end > at:
                if other_start > at:
                    free.append((at, other_start))
                at = max(at, other_end)
        if at < end:
            free.append((at, end))
    return free


def main() -> int:
    """Write the pictures; return 1 if one is stale with ``--check``."""
    return document_command(__doc__, pictures)


if __name__ == "__main__":
    sys.exit(main())
