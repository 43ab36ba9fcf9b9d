"""A few damaged inputs of each reader, and inputs of earlier faults; ``make fuzz`` tests many."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from io import BytesIO
from itertools import repeat
from pathlib import Path
from random import Random

import numpy as np
import pytest

from hespas import api
from hespas.converters import format_names, load_format
from hespas.converters.registry import BUILTIN
from tests.fuzzing import stages, worker
from tests.fuzzing.__main__ import is_one_file
from tests.fuzzing.mutate import CODECS, Input, Kind, codec_of, mutated
from tests.fuzzing.seeds import NOT_FUZZED, READERS
from tests.fuzzing.stages import Judged
from tests.fuzzing.subjects import SUBJECTS, Subject, seeds, warm_up
from tests.fuzzing.trees import Document, Group, changed
from tests.fuzzing.worker import Job, fuzz, judge

FEW: dict[Kind, int] = {"fields": 7, "bytes": 2}
MANY: dict[Kind, int] = {"fields": 1_500, "bytes": 500}
FOUND = Path(__file__).parent / "found"


def complaints(name: str, kind: Kind, count: int, seed: int) -> list[tuple[int, str]]:
    """Return the failures of a subject for ``count`` inputs."""
    outcome = fuzz(Job(subject=SUBJECTS[name], seeds=seeds(name), numbers=range(count), seed=seed, kind=kind))
    assert outcome.failures or outcome.answers.total() == count
    return [(failure.number, failure.what) for failure in outcome.failures]


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_is_wrong_ends_in_a_message(name: str) -> None:
    assert [complaints(name, kind, count, 0) for kind, count in FEW.items()] == [[], []]


@pytest.mark.parametrize("kind", ["fields", "bytes"])
@pytest.mark.parametrize("name", list(SUBJECTS))
def test_much_that_is_wrong_ends_in_messages(name: str, kind: Kind) -> None:
    assert complaints(name, kind, MANY[kind], 2) == []


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_sound_inputs_are_borne(name: str, tmp_path: Path) -> None:
    warm_up(SUBJECTS[name])
    for number, seed in enumerate(seeds(name)[:3]):
        judged = judge(seed, SUBJECTS[name], tmp_path, number)
        assert (judged.answer, judged.failures) == ("read", [])


def test_every_readable_format_is_fuzzed_or_has_a_reason_not_to_be() -> None:
    readable = {name for name in format_names() if name in BUILTIN and load_format(name).read}
    fuzzed = {reader.format for reader in READERS.values()}
    assert readable - fuzzed == set(NOT_FUZZED)
    assert set(NOT_FUZZED) <= set(SUBJECTS)


@pytest.mark.parametrize("name", list(SUBJECTS))
def test_sound_inputs_are_taken_apart_and_put_together(name: str) -> None:
    """A decoded seed is encoded to the same file, or to a file with the same fields."""
    for file, data in seeds(name)[0].items():
        decode, encode = codec_of(file)
        again = encode(decode(data))
        assert again == data or repr(leaves(decode(again))) == repr(leaves(decode(data)))


def leaves(tree: Group) -> list[object]:
    """Return the values of a tree, and the kinds of its groups."""
    return [tree.kind, *(leaves(part) if isinstance(part, Group) else part for part in tree.parts)]


def test_every_codec_takes_any_tree() -> None:
    """Whatever a change has made of a tree can be written."""
    for name in SUBJECTS:
        for file, data in seeds(name)[-1].items():
            decode, encode = codec_of(file)
            try:
                document = Document(decode(data))
            except ValueError:
                continue  # an envelope around bytecode
            before = repr(leaves(document.tree))
            for number in range(20):
                with changed(document, Random(number)) as tree:
                    assert isinstance(encode(tree), bytes)
            assert repr(leaves(document.tree)) == before
    met = {file[file.rindex(".") :] for name in SUBJECTS for file in seeds(name)[0]}
    assert met == set(CODECS)


def _busy(path: Path, **_: object) -> None:
    del path
    while True:
        try:
            sum(range(1_000))
        except Exception:  # as careless code does
            continue


def _large(path: Path, **_: object) -> None:
    del path
    np.empty(3 << 30, np.uint8)


def _crash(path: Path, **_: object) -> None:
    del path
    os.kill(os.getpid(), signal.SIGSEGV)


def _native_hang(path: Path, **_: object) -> None:
    del path
    signal.signal(signal.SIGPROF, signal.SIG_IGN)  # native code does not see the alarm either
    any(repeat(0))


@pytest.mark.parametrize(
    ("what", "told"),
    [(_busy, "slow"), (_large, "MemoryError"), (_crash, "SIGSEGV"), (_native_hang, "hangs")],
)
def test_the_fuzzer_finds(what: Callable[..., None], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(SUBJECTS["op-graph"])
    monkeypatch.setattr(api, "read", what)
    monkeypatch.setattr(stages, "LEAST_SECONDS", 0.2)
    monkeypatch.setattr(worker, "HARD_LIMIT_S", 1.0 if what is _native_hang else 100.0)
    outcome = fuzz(Job(subject=SUBJECTS["op-graph"], seeds=seeds("op-graph")[:1], numbers=range(1)))
    assert told in outcome.failures[0].what


_WORKER = """
import sys, time
for line in sys.stdin:
    begun = time.process_time()
    while time.process_time() - begun < float(line):
        pass
    print("done", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what children are doing")
@pytest.mark.parametrize(("seconds", "found"), [("0", []), ("0.4", ["slow"])])
def test_what_another_process_takes_counts(
    seconds: str, found: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stages, "LEAST_SECONDS", 0.2 / stages.pace())
    judged = Judged(0, tmp_path / "out")
    with subprocess.Popen(
        [sys.executable, "-I", "-c", _WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin
        assert other.stdout
        print("0", file=other.stdin, flush=True)
        told = [other.stdout.readline()]

        def ask() -> None:
            assert other.stdin
            assert other.stdout
            print(seconds, file=other.stdin, flush=True)
            told.append(other.stdout.readline())

        judged.attempt("ask", ask)
        other.stdin.close()
    assert told == ["done\n"] * 2
    assert [what.split()[1] for what in judged.failures] == found


def test_the_number_of_an_input_is_that_of_its_failure() -> None:
    def stages(judged: Judged, folder: Path, number: int) -> None:
        def work() -> None:
            if number == 3:
                raise ZeroDivisionError(number)

        judged.attempt("work", work)
        judged.attempt("again", (folder / "input.txt").read_bytes)

    subject = Subject("x", list, stages)
    outcome = fuzz(Job(subject=subject, seeds=({"input.txt": b"a 1 b 2\n"},), numbers=range(6)))
    assert [failure.number for failure in outcome.failures] == [3]
    assert "ZeroDivisionError" in outcome.failures[0].what
    assert outcome.answers == {"read": 5, "failure": 1}


def test_what_is_written_is_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def silent(*_: object) -> list[str]:
        return ["flops"]

    monkeypatch.setattr("tests.fuzzing.stages.unreported", silent)
    judged = judge(seeds("op-graph")[0], SUBJECTS["op-graph"], tmp_path, 1)
    assert [what.partition(":")[0] for what in judged.failures] == ["not equal"]


@pytest.mark.parametrize("kind", ["fields", "bytes"])
def test_inputs_are_the_same_every_time_and_mostly_new(kind: Kind) -> None:
    given = seeds("op-graph")
    made = [mutated(given, number, 3, kind) for number in range(50)]
    assert made == [mutated(given, number, 3, kind) for number in range(50)]
    whole = {seed["input.json"] for seed in given}
    assert len({each["input.json"] for each in made} - whole) > 45


def _unpacked(name: str, data: bytes) -> Input:
    """A kept input: a file, or a ZIP file of those of a set."""
    if is_one_file(seeds(name)):
        return {next(iter(seeds(name)[0])): data}
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return {file: archive.read(file) for file in archive.namelist()}


@pytest.mark.parametrize("path", sorted(FOUND.glob("*")), ids=lambda path: path.name)
def test_what_was_found_ends_in_a_message(path: Path, tmp_path: Path) -> None:
    name, _, digits = path.name.rpartition("-")
    judged = judge(_unpacked(name, path.read_bytes()), SUBJECTS[name], tmp_path, int(digits))
    assert judged.failures == []
