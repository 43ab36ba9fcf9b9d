"""CPU time and peak memory of the Chakra codec, as ratios to the protobuf library in the same run.

    python benchmarks/et_codec.py [--nodes 1000000]

Both codecs write and read all fields of the same synthetic trace. Each runs in its own process, so that peak
memory is of that codec alone. The benchmark then writes 1,024 ranks of one class and copies the same files.
Exits with 1 if a target is missed: write >= 5x and read-all >= 3x the library's speed, peak at most 300 MB,
files of all ranks at least half as fast as the copy.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hespas.converters.chakra.expansion import encoded
from hespas.converters.chakra.wire import AttributeColumns, ByteRows, EtColumns, IoColumns
from hespas.converters.chakra.wire.codec import read_columns
from hespas.converters.chakra.writer import write_chakra
from hespas.converters.format import WriteOptions
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    GraphBuilder,
    NodeKind,
    OpClass,
    Permutation,
    StridedGroups,
    Workload,
    dtype,
)
from hespas.schemas.chakra.tables import AttributeField, NodeType
from tests.chakra_messages import reference_messages

_WRITE_TARGET, _READ_TARGET, _MEMORY_TARGET_MB, _COPY_TARGET = 5.0, 3.0, 300.0, 0.5
_RANKS = 1024


_PART = 4096
"""Number of nodes that are encoded at once, as in the writer."""


def synthetic(nodes: range) -> EtColumns:
    """Return the given nodes of a synthetic trace. Every tenth node is an all-reduce, the others compute. A
    node has up to two dependencies and three attributes.
    """
    chance = np.random.default_rng(1 + nodes.start)
    number = np.arange(nodes.start, nodes.stop)
    index = number.astype(np.uint64)
    collective = index % 10 == 0
    counts = np.minimum(number, 2)
    offsets = np.zeros(len(nodes) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    # Node i depends on nodes i-1 and i-2 if they exist.
    place = np.arange(int(offsets[-1]), dtype=np.int64) - np.repeat(offsets[:-1], counts)
    deps = (np.repeat(number, counts) - 1 - place).astype(np.uint64)
    key = np.tile(np.array([0, 1, 2], np.int32), len(nodes))
    key[np.repeat(collective, 3) & (key > 0)] += 2
    fields = np.array(
        [
            AttributeField.BOOL,
            AttributeField.INT64,
            AttributeField.UINT64,
            AttributeField.INT64,
            AttributeField.INT64,
        ],
        np.uint8,
    )
    bits = chance.integers(0, 1 << 24, 3 * len(nodes)).astype(np.uint64)
    bits[(key == 0) | (key == 3)] = 0
    return EtColumns(
        version="0.0.4",
        metadata=AttributeColumns.empty(1),
        id=index,
        name=ByteRows.from_text(f"layer{i % 97}/op_{i % 1000}" for i in nodes),
        type=np.where(collective, NodeType.COMM_COLL, NodeType.COMP).astype(np.int32),
        ctrl_offsets=np.zeros(len(nodes) + 1, np.int64),
        ctrl_deps=np.empty(0, np.uint64),
        data_offsets=offsets,
        data_deps=deps,
        start_micros=np.zeros(len(nodes), np.uint64),
        duration_micros=chance.integers(1, 5000, len(nodes)).astype(np.uint64),
        inputs=IoColumns.empty(),
        outputs=IoColumns.empty(),
        attrs=AttributeColumns(
            ("is_cpu_op", "num_ops", "tensor_size", "comm_type", "comm_size"),
            np.arange(len(nodes) + 1, dtype=np.int64) * 3,
            key,
            fields[key],
            bits,
            ByteRows.blank(0),
            np.empty(0, np.int64),
            ByteRows.blank(0),
        ),
        position=np.zeros(len(nodes), np.int64),
    )


def parts_of(nodes: int) -> list[EtColumns]:
    """Return the whole synthetic trace in parts of 4,096 nodes."""
    return [synthetic(range(first, min(first + _PART, nodes))) for first in range(0, nodes, _PART)]


def write_with_hespas(parts: list[EtColumns], path: Path) -> None:
    """Write the parts with the encoder of the Chakra writer."""
    with path.open("wb") as stream:
        for piece in encoded(parts):
            stream.write(piece.data)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def write_with_library(parts: list[EtColumns], path: Path) -> None:
    """Write the parts with the protobuf library, one message object per node."""
    messages = reference_messages()
    members = {27: "bool_val", 9: "int64_val", 13: "uint64_val"}
    with path.open("wb") as stream:
        head = messages.metadata(version=parts[0].version).SerializeToString()
        stream.write(_varint(len(head)) + head)
        for columns in parts:
            attrs = columns.attrs
            keys, fields, bits = attrs.key.tolist(), attrs.field.tolist(), attrs.bits.tolist()
            bounds: list[int] = columns.data_offsets.tolist()
            deps: list[int] = columns.data_deps.tolist()
            rows = zip(
                columns.id.tolist(),
                columns.name,
                columns.type.tolist(),
                columns.duration_micros.tolist(),
                strict=True,
            )
            for place, (node_id, name, kind, duration) in enumerate(rows):
                node = messages.node(id=node_id, name=name.decode(), type=kind, duration_micros=duration)
                node.data_deps.extend(deps[bounds[place] : bounds[place + 1]])
                for row in range(3 * place, 3 * place + 3):
                    attribute = node.attr.add(name=attrs.keys[keys[row]])
                    setattr(attribute, members[fields[row]], bits[row])
                body = node.SerializeToString()
                stream.write(_varint(len(body)) + body)


def read_with_library(path: Path) -> int:
    """Parse every message with the protobuf library and read all fields. Return the number of nodes."""
    messages = reference_messages()
    data = path.read_bytes()
    at, count = 0, -1
    while at < len(data):
        length, shift = 0, 0
        while data[at] > 0x7F:
            length |= (data[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
        length |= data[at] << shift
        at += 1
        body = data[at : at + length]
        at += length
        count += 1
        if count:
            _read_all_fields(messages.node.FromString(body))
    return count


def _read_all_fields(node: Any) -> tuple[object, ...]:
    attributes = [(a.name, a.doc_string, getattr(a, a.WhichOneof("value"))) for a in node.attr]
    scalars = (node.id, node.name, node.type, node.start_time_micros, node.duration_micros)
    io = [(side.values, side.shapes, side.types) for side in (node.inputs, node.outputs)]
    return scalars, list(node.ctrl_deps), list(node.data_deps), io, attributes


def spmd_step(ranks: int) -> Workload:
    """Return a job of 60 layers on an (N / 8, 8) mesh. A layer has ten matmuls and one communication: an
    all-reduce over either mesh axis, or (every eighth layer) a permute.
    """
    builder = GraphBuilder("step")
    mesh = [ranks // 8, 8]
    groups = [builder.group_set(StridedGroups.from_mesh(mesh, [axis])) for axis in (1, 0)]
    way = builder.permutation(Permutation.from_pairs([(r, (r + 8) % ranks) for r in range(ranks)], ranks))
    tensor = builder.types.add(dtype("bf16"), [4096, 4096])
    names = builder.strings
    last: list[int] = []
    for layer in range(60):
        for place in range(10):
            node = builder.add_node(
                name_id=names.add(f"dot.{layer}.{place}"),
                op_id=names.add("stablehlo.dot_general"),
                op_class=OpClass.CONTRACTION,
                data_deps=last,
                operands=[tensor, tensor],
                results=[tensor],
                flops=1e9 + place,
                bytes_read=1e6,
                bytes_written=5e5,
            )
            builder.set(node, duration_ns=1234.5 + place)
            last = [node]
        kind = NodeKind.COLLECTIVE if layer % 8 else NodeKind.PERMUTE
        op_id, op_class = names.add("stablehlo.collective"), OpClass.COLLECTIVE
        node = builder.add_node(
            name_id=names.add(f"comm.{layer}"), op_id=op_id, op_class=op_class, kind=kind, data_deps=last
        )
        if kind is NodeKind.PERMUTE:
            builder.add_p2p(node, permutation=way, comm_bytes=1 << 20)
        else:
            chosen = groups[layer % 2]
            builder.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=chosen, comm_bytes=1 << 20)
        last = [node]
    return Workload.spmd(builder.build(), ranks)


def _write_ranks(folder: Path) -> dict[str, float]:
    """Return copy time over write time of the files of all ranks: median, minimum and maximum of five rounds,
    and the bytes of all files.
    """
    workload = spmd_step(_RANKS)
    speeds: list[float] = []
    size = 0
    for turn in range(5):
        written, copied = folder / f"ranks{turn}", folder / f"copy{turn}"
        start = time.perf_counter()
        write_chakra(workload, written, WriteOptions(name="step"), Diagnostics())
        middle = time.perf_counter()
        shutil.copytree(written, copied)
        speeds.append((time.perf_counter() - middle) / (middle - start))
        size = sum(file.stat().st_size for file in written.iterdir())
        shutil.rmtree(written)
        shutil.rmtree(copied)
    return {"speed": statistics.median(speeds), "low": min(speeds), "high": max(speeds), "bytes": size}


def _timed(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def _side(name: str, folder: Path, nodes: int) -> dict[str, float]:
    """Run one codec and direction in this process. Return CPU seconds, nodes/s and peak memory [MB]."""
    if name == "write-hespas":
        parts = parts_of(nodes)
        seconds = _timed(lambda: write_with_hespas(parts, folder / "hespas.et"))
    elif name == "write-protobuf":
        parts = parts_of(nodes)
        seconds = _timed(lambda: write_with_library(parts, folder / "protobuf.et"))
    elif name == "read-hespas":
        seconds = _timed(lambda: read_columns(folder / "hespas.et", Diagnostics()))
    else:
        seconds = _timed(lambda: read_with_library(folder / "hespas.et"))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cpu_s": seconds, "nodes_per_s": nodes / seconds, "peak_mb": peak_mb}


def _run(name: str, folder: Path, nodes: int) -> dict[str, float]:
    """Run one codec and direction in a new process, and print its figures."""
    command = [sys.executable, __file__, "--side", name, "--folder", str(folder), "--nodes", str(nodes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    print(
        f"{name:15s} {result['cpu_s']:7.2f} s  {result['nodes_per_s'] / 1e3:7.0f} k nodes/s"
        f"  {result['peak_mb']:5.0f} MB"
    )
    return result


def main() -> int:
    """Run the comparison, or one codec of it (``--side``). Return 1 if a target is missed, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nodes", type=int, default=1_000_000, help="nodes of the trace (default: %(default)s)"
    )
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(_side(options.side, options.folder, options.nodes)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sides = ("write-hespas", "write-protobuf", "read-hespas", "read-protobuf")
        results = {side: _run(side, folder, options.nodes) for side in sides}
        size = (folder / "hespas.et").stat().st_size
        ranks = _write_ranks(folder)
        same = (folder / "hespas.et").read_bytes() == (folder / "protobuf.et").read_bytes()
    write = results["write-protobuf"]["cpu_s"] / results["write-hespas"]["cpu_s"]
    read = results["read-protobuf"]["cpu_s"] / results["read-hespas"]["cpu_s"]
    peak = max(results["write-hespas"]["peak_mb"], results["read-hespas"]["peak_mb"])
    print(f"{size / 1e6:.1f} MB, byte-identical: {same}")
    print(
        f"write: {write:.1f}x (target {_WRITE_TARGET:g}x)   read all: {read:.1f}x (target {_READ_TARGET:g}x)"
    )
    print(f"peak: {peak:.0f} MB (target {_MEMORY_TARGET_MB:g} MB)")
    speed = ranks["speed"]
    print(
        f"{_RANKS} ranks, {ranks['bytes'] / 1e6:.0f} MB: {speed:.2f}x the speed of a plain copy "
        f"(min {ranks['low']:.2f}, max {ranks['high']:.2f}; target {_COPY_TARGET:g}x)"
    )
    met = (
        same
        and write >= _WRITE_TARGET
        and read >= _READ_TARGET
        and peak <= _MEMORY_TARGET_MB
        and speed >= _COPY_TARGET
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
