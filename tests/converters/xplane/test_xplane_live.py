"""A program that is profiled during the test, and the generator of the written traces."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pytest

from hespas.converters import find_format
from hespas.converters.format import ReadOptions
from hespas.graph import Diagnostics, Profile
from tests.limits import SAFETY_S

ROOT = Path(__file__).parents[3]
_PROGRAM = """
import sys
import jax, jax.numpy as jnp
step = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ x), x))
other = jax.jit(lambda x: jnp.sort(x, axis=0))
x = jnp.ones((64, 64))
jax.block_until_ready((step(x), other(x)))
with jax.profiler.trace(sys.argv[1]):
    for _ in range(4):
        jax.block_until_ready((step(x), other(x)))
"""


def _jax_version() -> str:
    try:
        return version("jaxlib")
    except PackageNotFoundError:
        return ""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recorded trace; the profiler runs in a process of its own."""
    if not _jax_version():
        pytest.skip("jax is not installed")
    folder = tmp_path_factory.mktemp("trace")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=SAFETY_S,
        env={"JAX_PLATFORMS": "cpu", "HOME": str(folder), "PATH": ""},
    )
    if done.returncode or not list(folder.rglob("*.xplane.pb")):
        pytest.skip(f"the profiler of jax does not work here: {done.stderr[-300:]}")
    return folder


def read(path: Path) -> Profile:
    form = find_format(path, None)
    assert form.read is not None
    profile = form.read(path, ReadOptions(), Diagnostics())
    assert isinstance(profile, Profile)
    return profile


def test_a_live_profile_has_every_run(recorded: Path) -> None:
    profile = read(next(recorded.rglob("*.xplane.pb")))
    assert profile.metadata["format"] == "xplane"
    assert sorted(set(profile.run.tolist())) == [0, 1, 2, 3]
    assert len(set(profile.module_id.tolist())) == 2
    assert profile.devices == ("CPU",)
    modules = {profile.strings[row] for row in profile.module_id.tolist()}
    assert {f"hlo/{module}" for module in modules} <= set(profile.attachments)
    categories = {profile.strings[row] for row in profile.category_id.tolist()}
    assert "thunk" in categories
    assert bool((profile.duration_ns >= 0).all())


def test_the_json_of_a_live_profile_says_the_same(recorded: Path) -> None:
    space, trace = read(next(recorded.rglob("*.xplane.pb"))), read(next(recorded.rglob("*.trace.json.gz")))
    assert trace.metadata["format"] == "jax-trace"
    assert len(trace) == len(space)
    assert len(trace.host) == len(space.host)
    assert float(trace.duration_ns.sum()) == float(space.duration_ns.sum())
    assert np.array_equal(np.sort(trace.start_ns), np.sort(space.start_ns))


@pytest.mark.skipif(_jax_version() != "0.10.2", reason="the HLO in the file was written by jaxlib 0.10.2")
def test_the_written_traces_are_those_of_the_generator() -> None:
    script = "\n".join(
        (
            "import gzip",
            "from pathlib import Path",
            "from fixtures.make.xla_traces import FILES",
            "for name, make in FILES.items():",
            "    data = (Path('fixtures/profiles') / name).read_bytes()",
            "    assert (gzip.decompress(data) if name.endswith('.gz') else data) == make(), name",
        )
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=SAFETY_S,
    )
    assert done.returncode == 0, done.stderr
