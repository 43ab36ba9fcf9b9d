"""Comparison of captured programs with the results of JAX, in a separate process with eight host devices.

    python -m tests.captures.jax.beside_jax PROGRAM DATA MODEL

writes, as JSON, instructions that only the capture has, and only XLA's own partitioned module; and the
largest difference between the results of the captured module, run by devices as replicas, and those of
``jax.jit``, over the largest result.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["main"]

_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\](, device_ids=\([^)]*(?:\([^)]*\))?\))? \{([^}]*)\}")
_IDS = re.compile(r", device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)")
_PARTITION_MODE = re.compile(r" (all-to-all|collective-permute)\(")


def instructions(text: str) -> Counter[str]:
    """Instructions without their names and origins."""
    lines = (line for line in text.splitlines() if " = " in line)
    bare = (re.sub(r"%[\w.-]+", "%", re.sub(r",? metadata=\{.*?\}", "", line)) for line in lines)
    return Counter(re.sub(r"channel_id=\d+", "", line).strip() for line in bare)


def _written_out(text: str, devices: int) -> str:
    """Groups over meshes as lists: jaxlib forgets the order of their devices on the way to StableHLO."""

    def listed(found: re.Match[str]) -> str:
        axes = re.findall(r"'(\w+)'=(\d+)", found[1])
        names, sizes = [name for name, _ in axes], [int(size) for _, size in axes]
        ids = np.arange(devices)
        if found[2]:
            ordered = _IDS.fullmatch(found[2])
            assert ordered, found[2]
            ids = ids.reshape(list(map(int, ordered[1].split(","))))
            ids = ids.transpose(list(map(int, ordered[2].split(",")))) if ordered[2] else ids
        chosen = [names.index(name) for name in re.findall(r"'(\w+)'", found[3])]
        rest = [place for place in range(len(names)) if place not in chosen]
        rows = (
            ids.reshape(sizes).transpose(rest + chosen).reshape(-1, int(np.prod([sizes[i] for i in chosen])))
        )
        groups = ",".join("{" + ",".join(map(str, row)) + "}" for row in rows.tolist())
        return f"replica_groups={{{groups}}}"

    return _GROUPS.sub(listed, text)


def _as_replicas(text: str, devices: int) -> str:
    """The module for as many replicas: XLA runs partitions of its own only."""
    lines = _written_out(text, devices).split("\n")
    for place, line in enumerate(lines):
        if _PARTITION_MODE.search(line):
            lines[place] = re.sub(r"channel_id=\d+, ", "", line).replace(", use_global_device_ids=true", "")
    text = "\n".join(lines).replace("partition-id()", "replica-id()")
    return text.replace(f"num_partitions={devices}", f"replica_count={devices}")


def _run(text: str, placed: list[Any], devices: list[Any]) -> list[list[Any]]:
    """Results of the module, each as its parts on the devices."""
    jaxlib: Any = import_module("jaxlib._jax")
    hlo: Any = import_module("jaxlib._hlo")
    module = hlo.hlo_module_from_text(_as_replicas(text, len(devices)))
    program = jaxlib.mlir.hlo_to_stablehlo(module.as_serialized_hlo_module_proto())
    options = jaxlib.CompileOptions()
    build = options.executable_build_options
    options.num_replicas = build.num_replicas = len(devices)
    ids = np.arange(len(devices), dtype=np.int32).reshape(-1, 1)
    build.device_assignment = jaxlib.DeviceAssignment.create(ids)
    interpreters: Any = import_module("jax._src.interpreters.mlir")
    ir: Any = import_module("jaxlib.mlir.ir")
    with interpreters.make_ir_context():
        parsed = ir.Module.parse(program)
        executable = devices[0].client.compile_and_load(parsed, jaxlib.DeviceList(tuple(devices)), options)
    found: list[list[Any]] = executable.execute_sharded(placed).disassemble_into_single_device_arrays()
    return found


def _difference(expected: list[Any], found: list[list[Any]]) -> float:
    worst, largest = 0.0, 0.0
    for whole, parts in zip(expected, found, strict=True):
        shards = {shard.device.id: np.asarray(shard.data) for shard in whole.addressable_shards}
        for part in parts:
            (device,) = part.devices()
            mine, theirs = np.asarray(part, np.float64), np.asarray(shards[device.id], np.float64)
            assert mine.shape == theirs.shape, (mine.shape, theirs.shape)
            if mine.size:
                worst, largest = max(worst, abs(mine - theirs).max()), max(largest, abs(theirs).max())
    return worst / largest


def _values(leaf: Any, random: np.random.Generator) -> Any:
    """Numbers for an abstract array; whole numbers are small enough for any table."""
    if np.issubdtype(leaf.dtype, np.integer):
        return random.integers(0, 32, leaf.shape, np.int32)
    return np.asarray(0.1 * random.normal(size=leaf.shape), np.float32)


def main() -> int:
    name, data, model = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    devices = data * model
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={devices} --xla_dump_to={folder} "
            "--xla_dump_hlo_pass_re=spmd-partitioning --xla_dump_hlo_as_text"
        )
        from fixtures.make.untyped import jax
        from hespas.captures.jax.lowering import lower
        from hespas.captures.partition import partition
        from hespas.graph import Diagnostics
        from hespas.graph.mesh import Mesh
        from tests.captures.jax.programs import PROGRAMS

        build = PROGRAMS[name]
        lowered = lower(
            build,
            None,
            None,
            Mesh(("data", "model"), (data, model)),
            platform="cpu",
            diagnostics=Diagnostics(),
        )
        captured = partition(lowered.program)
        grid = np.array(jax.devices()).reshape(data, model)
        kinds = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.sharding.Mesh(grid, ("data", "model"), axis_types=kinds)
        with jax.set_mesh(mesh):
            step, arguments = build(mesh)
            leaves, tree = jax.tree.flatten(arguments)
            random = np.random.default_rng(0)
            placed = [jax.device_put(_values(leaf, random), leaf.sharding) for leaf in leaves]
            expected = jax.tree.leaves(jax.jit(step)(*jax.tree.unflatten(tree, placed)))
        dumps = sorted(Path(folder).glob("*after_spmd-partitioning*"), key=lambda path: path.stat().st_size)
        mine, theirs = instructions(captured), instructions(dumps[-1].read_text(encoding="utf-8"))
        answer = {
            "instructions": sum(theirs.values()),
            "mine_only": sorted((mine - theirs).elements()),
            "theirs_only": sorted((theirs - mine).elements()),
            "difference": _difference(expected, _run(captured, placed, list(jax.devices()))),
        }
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
