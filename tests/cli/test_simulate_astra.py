"""``hespas simulate --mode astra``: ASTRA-sim's files as input, its exact times, and clear errors."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner, Result

from fixtures.make.astra_sim import files
from hespas import api
from hespas.cli.main import app
from hespas.converters import WriteOptions, load_format
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import UsageError
from tests.validators.checker.small_jobs import Steps

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
TRACES = FIXTURES / "chakra" / "pipeline_2x2"
SYSTEMS = FIXTURES / "astra_sim"
SYSTEM, NETWORK = SYSTEMS / "system.json", SYSTEMS / "network.yml"
FLAT = ("--system-config", SYSTEMS / "system_flat.json", "--network-config", SYSTEMS / "network_flat.yml")
MODE = ("--mode", "astra", "--system-config", SYSTEM, "--network-config", NETWORK)
SCHEMA = json.loads((ROOT / "hespas" / "schemas" / "simulate.schema.json").read_text())


class _Validator(Protocol):
    def validate(self, instance: object) -> None: ...


def run(*arguments: str | Path, source: Path = TRACES) -> Result:
    return CliRunner().invoke(app, ["simulate", *(str(each) for each in (source, *arguments))])


def message_ns(size: int, hops: int, latency_ns: float, gib_per_s: float) -> int:
    return int(hops * latency_ns + size / (gib_per_s * 2**30 / 1e9))


def test_a_pipeline_with_its_document(tmp_path: Path) -> None:
    """Two forward of 100 us, two backward of 200 us; activations of 1 MiB go over the switch (2 hops of
    1,000 ns, 50 GiB/s), gradients of 4 MiB are reduced within a node (1 hop of 500 ns, 200 GiB/s).
    """
    done = run(*MODE, "--json", tmp_path / "s.json")
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "s.json").read_text())
    cast("_Validator", Draft202012Validator(SCHEMA)).validate(document)
    m = (1 << 22) // 4 // 2
    reduce_ns = 4 * (3 * 10 + 2 * message_ns(m, 1, 500.0, 200.0) + 3 * int(m / 1600.0))
    hop_ns = message_ns(1 << 20, 2, 1000.0, 50.0)
    # The last message holds the communication slot before the all-reduce, which has the higher id.
    last_ns = 100_000 + hop_ns + 2 * 100_000 + 2 * 200_000 + hop_ns + reduce_ns
    first_ns = last_ns + 200_000
    assert [row["finish_ns"] for row in document["ranks"]] == [first_ns, first_ns, last_ns, last_ns]
    assert [row["compute_ns"] for row in document["ranks"]] == [600_000.0] * 4
    assert [row["exposed_comm_ns"] for row in document["ranks"]] == [
        first_ns - 600_000, first_ns - 600_000, last_ns - 600_000, last_ns - 600_000,
    ]  # fmt: skip
    assert document["mode"] == "astra"
    assert document["step_ns"] == first_ns
    assert document["step_low_ns"] is None
    [finding] = [each for each in document["diagnostics"] if each["code"] == "simulate.unread-keys"]
    assert finding["message"] == "keys without effect: scheduling-policy, boost-mode"
    assert "4 ranks in 2 classes" in done.stdout


def test_congestion_and_queues_change_the_answer() -> None:
    plain = api.simulate(TRACES, mode="astra", system_config=FLAT[1], network_config=FLAT[3])
    aware = api.simulate(
        TRACES, mode="astra", system_config=FLAT[1], network_config=FLAT[3], backend="aware", queues_per_dim=2
    )
    assert aware.step_ns > plain.step_ns
    assert plain.to_pandas().columns.tolist()[-1] == "overlap_ns"


def test_what_is_no_trace_is_run_as_it_would_be_written(tmp_path: Path) -> None:
    source, device = FIXTURES / "hlo" / "pipeline_ring.hlo.txt", "H100-SXM"
    network = tmp_path / "network.yml"
    network.write_text("topology:\n  - Ring\nnpus_count: [8]\nbandwidth: [50]\nlatency: [500]\n")
    options = {"mode": "astra", "system_config": FLAT[1], "network_config": network}
    direct = api.simulate(source, device, **options)  # type: ignore[arg-type] # as listed
    api.convert(source, tmp_path / "traces", hardware=device)
    traces = api.simulate(tmp_path / "traces", **options)  # type: ignore[arg-type]
    assert direct.step_ns == traces.step_ns > 0
    assert direct.hardware == device


def test_a_timeline_of_the_ranks_that_differ(tmp_path: Path) -> None:
    """The two ranks of a stage do the same at the same time."""
    done = run(*MODE, "--timeline", tmp_path / "t.csv")
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
    assert [row["rank"] for row in rows] == ["0"] * 9 + ["2"] * 9


REFUSED = [
    (("--mode", "astra"), 2, "mode astra needs --system-config"),
    (("--backend", "aware"), 2, "add --mode astra"),
    (("--system-config", SYSTEM), 2, "add --mode astra"),
    (("--mode", "fast"), 2, "fast"),
    ((*MODE, "--queues-per-dim", "0"), 2, "--queues-per-dim"),
    ((*MODE, "--backend", "aware"), 4, "ET032"),
    ((*MODE[:4], "--network-config", SYSTEMS / "network_flat.yml"), 4, "ET026"),
    ((*MODE[:2], "--system-config", SYSTEMS / "no.json", *MODE[4:]), 3, "no.json"),
]


@pytest.mark.parametrize(("arguments", "code", "told"), REFUSED)
def test_wrong_requests(arguments: tuple[str | Path, ...], code: int, told: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, told in done.output) == (code, True), done.output


def test_ranks_that_never_finish_end_with_one() -> None:
    """Rank 2 is listed in a group whose all-reduce it does not have."""
    done = run(*MODE, "--comm-groups", SYSTEMS / "comm_group_wrong.json")
    assert done.exit_code == 1, done.output
    assert "ET020: 2 of 4 ranks never finish (0, 1)" in done.output
    assert "waits for rank 2, which has only 0 collectives in that group" in " ".join(done.output.split())


def test_the_configuration_fixtures_are_those_of_their_script() -> None:
    assert {path.name: path.read_text() for path in SYSTEMS.iterdir()} == files()


@pytest.mark.parametrize("name", ["mode", "backend"])
def test_unknown_words_of_the_interface(name: str) -> None:
    with pytest.raises(UsageError, match=f"`{name}=other`: 'other' is not one of "):
        api.simulate(
            TRACES,
            **{"mode": "astra", "system_config": SYSTEM, "network_config": NETWORK, name: "other"},  # type: ignore[arg-type]
        )


def test_the_document_of_ranks_whose_ids_continue_from_rank_to_rank(tmp_path: Path) -> None:
    """As in ASTRA-sim's own examples: one rank class, whose finding counts the renumbered ranks."""
    graph = Steps(2)
    graph.coll(graph.compute())
    built = graph.build()
    classes = tuple(replace(built, id=built.id + np.uint64(first)) for first in (0, 2))
    entry = load_format("chakra")
    assert entry.write is not None
    job = Workload(name="job", classes=classes, rank_class=np.arange(2, dtype=np.int32))
    entry.write(job, tmp_path / "job", WriteOptions(directory=True), Diagnostics())
    pair = tmp_path / "network.yml"
    pair.write_text("topology: [Ring]\nnpus_count: [2]\nbandwidth: [50]\nlatency: [500]\n")
    system = SYSTEMS / "system_flat.json"
    options = ("--mode", "astra", "--system-config", system, "--network-config", pair)
    done = run(*options, "--json", tmp_path / "s.json", source=tmp_path / "job")
    assert done.exit_code == 0, done.output
    [found] = [
        each for each in json.loads((tmp_path / "s.json").read_text())["diagnostics"]
        if each["code"] == "chakra.renumbered"
    ]  # fmt: skip
    assert "number the same nodes from another first id" in found["message"]
