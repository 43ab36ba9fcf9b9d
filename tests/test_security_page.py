"""Tests of each statement of SECURITY.md: a table names them; those without another place are here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import sleep

import msgspec
import pytest

from hespas.converters.chakra.cluster import write_on_cluster
from hespas.costs.aten import custom
from hespas.estimators.result_cache import ResultCache, content_key
from hespas.files.limits import untrusted
from hespas.graph.errors import FormatError, UnsupportedError
from tests.limits import SAFETY_S

ROOT = Path(__file__).parents[1]
_STATED = "no behaviour of the program"
"""For a heading, advice, or a statement of what is trusted."""
_PLANTED = "tests/test_planted_keys.py:test_no_program_runs_and_no_file_outside_is_opened"
_REFUSED = "tests/test_planted_keys.py:test_refusals_name_file_key_and_option"
_TYPED = "tests/test_planted_keys.py:test_what_the_user_types_runs_and_opens"
_SHADOWED = "tests/test_planted_code.py:test_commands"
_HERE = "tests/test_security_page.py"

TESTS: Mapping[str, str] = {
    "The installed package, its dependencies": _STATED,
    "Plug-ins: packages that register": "tests/converters/test_registry.py:"
    "test_a_format_of_another_package_is_found_by_name_and_content",
    "They run with all your rights.": _STATED,
    "One that does not load": "tests/converters/test_registry.py:"
    "test_a_broken_plug_in_is_told_once_and_fails_alone",
    "`PYTHONPATH` and the other environment": "tests/files/test_sandbox.py:"
    "test_a_child_imports_what_its_parent_does",
    "A folder that `PYTHONPATH` names": "tests/files/test_sandbox.py:"
    "test_the_current_folder_is_imported_from_where_it_is_spelled_out",
    "With a relative or empty entry": "tests/files/test_sandbox.py:"
    "test_the_current_folder_is_imported_from_where_it_is_spelled_out",
    "This affects the command itself": "tests/files/test_sandbox.py:"
    "test_the_current_folder_is_imported_from_where_it_is_spelled_out",
    "What you type.": _STATED,
    "`scalesim:command=...` and the other": "tests/test_planted_code.py:test_simulators_that_are_programs",
    "If the program is a Python interpreter": "tests/test_planted_code.py:test_simulators_that_are_programs",
    "`--out`, `--json` and other options": _STATED,
    "The module that `hespas capture` names.": _STATED,
    "It is imported and runs": "tests/cli/test_capture_command.py:"
    "test_what_a_program_prints_in_any_way_is_no_part_of_the_answer",
    "On Ctrl-C, `SIGTERM` and `SIGHUP`": f"{_HERE}:test_what_a_captured_program_starts_ends_with_the_command",
    "The scheduler and the workers": _STATED,
    "The connection is that of dask": _STATED,
    "Use it only in a network": _STATED,
    "The files that `HESPAS_COST_RULES` names": _STATED,
    "They are data: formulas": f"{_HERE}:test_rules_for_costs_are_data",
    "Their figures decide": "tests/costs/test_user_rules.py:test_a_users_rule_answers_before_ours",
    "The cache of results": "tests/estimators/test_result_cache.py:test_the_folder_is_the_standard_one",
    "An entry is found by a hash": "tests/cli/test_league_command.py:"
    "test_an_edited_device_file_changes_what_was_kept",
    "Entries are written with permissions": f"{_HERE}:test_entries_of_the_cache_are_private",
    "One that is damaged, larger": f"{_HERE}:test_entries_that_others_may_have_written_count_as_absent",
    "Any other entry is used": "tests/estimators/test_result_cache.py:"
    "test_what_is_put_is_got_and_nothing_else",
    "Every input file: programs": _STATED,
    "Their content is data": _PLANTED,
    "Programs that an input file names.": _STATED,
    "An estimator in a sweep file": _REFUSED,
    "Permit it with `--allow-programs`": _TYPED,
    "Paths that an input file names.": _STATED,
    "A path in a key or cell": _PLANTED,
    "Absolute paths, `..` and links": "tests/test_planted_keys.py:"
    "test_outputs_repeat_nothing_of_what_was_refused",
    "Tables of measurements name": _PLANTED,
    "Formats that are a set of files": "tests/cli/test_league_command.py:"
    "test_an_edited_table_of_models_changes_what_was_kept",
    "Only files of these names": _PLANTED,
    "Every text in input files": _STATED,
    "They reach terminals": "tests/files/test_documents.py:test_what_begins_a_formula_is_text",
    "The folders of input files": _SHADOWED,
    "**Reading.** Sizes are bounded": "tests/test_resource_limits.py:test_a_gzip_bomb_is_refused_early",
    "Nothing recurses": "tests/test_malformed.py:test_deep_nesting",
    "Reading one input is limited": "tests/test_untrusted.py:test_reading_has_a_budget_of_processor_time",
    "Pipes, devices and sockets": "tests/test_resource_limits.py:"
    "test_what_is_no_file_is_refused_and_never_waited_for",
    "The limits are listed": "tests/tools_tests/test_documents.py:test_what_has_changed_is_written_once",
    "**Native parsers**": "tests/files/test_sandbox.py:test_a_child_imports_what_its_parent_does",
    "The child has Python's isolated mode": "tests/files/test_sandbox.py:"
    "test_memory_is_bounded_within_and_free_again_after",
    "It dies with its parent.": "tests/files/test_sandbox.py:test_a_child_ends_with_a_parent_that_is_killed",
    "A crash, a hang": "tests/files/test_sandbox.py:"
    "test_how_a_child_ends_is_a_message_and_the_next_input_has_another",
    "The child reads StableHLO": "tests/converters/stablehlo/test_stablehlo_trial.py:"
    "test_a_child_reads_what_this_process_would_read",
    "No byte of a program": "tests/test_malformed_process.py:test_much_damaged_programs",
    "Tables and op graphs in": "tests/test_resource_limits.py:test_a_long_text_of_many_rows_is_held_once",
    "**Writing.** Every output": "tests/files/test_output.py:test_a_failing_writer_leaves_the_old_file",
    "If one of several results": "tests/files/test_output.py:"
    "test_results_go_back_where_one_of_them_cannot_be_placed",
    "A signal (Ctrl-C": "tests/faults/test_faults.py:test_an_interrupt_leaves_nothing",
    "**Other programs** that Hespas": "tests/files/test_sandbox.py:"
    "test_other_programs_end_with_their_parent_too",
    "They run in a temporary folder": "tests/test_planted_code.py:test_simulators_that_are_programs",
    "**Failing.** Malformed input": "tests/test_malformed.py:test_faults",
    "It gets its final name once": "tests/files/test_output.py:test_a_failing_writer_leaves_the_old_file",
    "Each error has the file": "tests/test_malformed.py:test_faults",
    "Exit code 70": "tests/fuzzing/test_fuzzing.py:test_what_is_wrong_ends_in_a_message",
    "**Tests** change": _STATED,
    "`make test`, `make fuzz`.": _STATED,
    "`--untrusted` is for services": _STATED,
    "This option of every command": "tests/test_untrusted.py:test_every_command_has_the_switch",
    "A command that exceeds": "tests/test_untrusted.py:test_beyond_a_limit_a_command_names_the_option",
    "Native parsers run in their own": "tests/test_untrusted.py:test_parsers_share_the_limits",
    "No other program runs": "tests/test_untrusted.py:test_no_estimator_runs_programs",
    "A link that leads out": "tests/test_untrusted.py:"
    "test_links_that_lead_out_of_their_folder_are_not_opened",
    "`HESPAS_UNTRUSTED=cpu_s=20": "tests/test_untrusted.py:test_limits_by_the_environment",
    "In Python, `with hespas": "tests/test_untrusted.py:test_an_inner_budget_leaves_the_outer_one",
    "Bounds of processor time": _STATED,
    "These limits are not a sandbox": _STATED,
    "Input files of one command": _STATED,
    "A folder that others may": _STATED,
    "Estimators that run other programs": "tests/test_planted_code.py:test_simulators_in_another_python",
    "They execute what you chose": _STATED,
    "They open the files": _STATED,
}
"""By how it begins, the test of each sentence of the page."""


def _sentences() -> Iterator[str]:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (?!Reporting)", text, flags=re.MULTILINE)[1:]
    for part in parts:
        body = re.sub(r"^(\||## Reporting).*(\n|$)", "", part.partition("## Reporting")[0].partition("\n")[2])
        body = re.sub(r"^\|.*\n", "", body, flags=re.MULTILINE)
        for block in re.split(r"\n\n|\n(?=- )", body):
            line = " ".join(block.split()).removeprefix("- ")
            yield from filter(None, re.split(r"(?<=[.:]) (?=[A-Z`])", line))


def test_every_sentence_has_its_test() -> None:
    beginnings = tuple(TESTS)
    sentences = list(_sentences())
    assert [each for each in sentences if not each.startswith(beginnings)] == []
    assert [each for each in beginnings if not any(line.startswith(each) for line in sentences)] == []


@pytest.mark.parametrize("test", sorted(set(TESTS.values()) - {_STATED}))
def test_the_tests_are_there(test: str) -> None:
    file, _, name = test.partition(":")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


class _Kept(msgspec.Struct):
    value: int


def test_entries_of_the_cache_are_private(tmp_path: Path) -> None:
    cache, key = ResultCache(tmp_path, _Kept), content_key(["a"])
    cache.put(key, _Kept(1))
    (entry,) = tmp_path.glob("*/*.json")
    assert entry.stat().st_mode & 0o777 == 0o600
    assert cache.get(key) == _Kept(1)


def test_entries_that_others_may_have_written_count_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, key = ResultCache(tmp_path, _Kept), content_key(["a"])
    cache.put(key, _Kept(1))
    (entry,) = tmp_path.glob("*/*.json")
    for mode, expected in ((0o666, None), (0o620, None), (0o644, _Kept(1))):
        entry.chmod(mode)
        assert cache.get(key) == expected
    monkeypatch.setattr(os, "getuid", lambda: entry.stat().st_uid + 1)
    assert cache.get(key) is None


def test_rules_for_costs_are_data(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for text in (f"open('{ran}', 'w')", "__import__('os').getpid()", "().__class__", "numel.__init__"):
        path = tmp_path / "rules.toml"
        path.write_text(f'[[op]]\nname = "x"\nflops = "{text}"\n')
        with pytest.raises(FormatError):
            custom.read_rules(path)
    assert not ran.exists()


def test_no_scheduler_is_asked_where_inputs_are_untrusted() -> None:
    with untrusted(cpu_s=600), pytest.raises(UnsupportedError, match="scheduler"):
        write_on_cluster("tcp://127.0.0.1:1", None, None, None)  # type: ignore[arg-type] # pyright: ignore


_STARTS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open({told!r}, "w") as file:
    file.write(str(child.pid))
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists processes")
def test_what_a_captured_program_starts_ends_with_the_command(tmp_path: Path) -> None:
    told = tmp_path / "told"
    (tmp_path / "mine.py").write_text(_STARTS.format(told=str(told)))
    command = [
        "-c",
        "from hespas.cli.main import main; main()",
        "capture",
        f"{tmp_path / 'mine.py'}:f",
        "--mesh",
        "x=2",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, *command], env=environment, stderr=subprocess.DEVNULL)
    try:
        while not (told.exists() and told.read_text()):
            assert process.poll() is None
            sleep(0.05)
        started = int(told.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(SAFETY_S) == 130
        while _is_running(started):
            sleep(0.05)
    finally:
        process.kill()


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
