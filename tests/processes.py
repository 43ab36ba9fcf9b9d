"""Commands in processes forked from one that has loaded them, so that a start takes milliseconds.

Each has its own streams, folder, environment and limits, and ends as an interpreter ends. Where the start
itself is tested (what is on the path, which streams are closed, signals), a test starts Python itself.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

from tests.limits import SAFETY_S

__all__ = ["run_command"]

ROOT = Path(__file__).parents[1]
MODULES = {"hespas": "main", "hespas-convert": "convert", "hespas-validate": "validate"}

_SERVER = """
import json, os, resource, signal, socket, sys
from functools import cache
from importlib import import_module
import typer.main
import numpy, hespas.api, hespas.estimators, rich.console, rich.table
from hespas.converters import format_names, load_format
for name in format_names():
    load_format(name)
commands = {name: import_module("hespas.cli." + name) for name in ("convert", "main", "validate")}
mains = {name: module.main for name, module in commands.items()}
vars(typer.main).update(get_command=cache(typer.main.get_command))
for module in commands.values():
    typer.main.get_command(module.app)
orders, parent = socket.socket(fileno=int(sys.argv[1])), True
while parent:
    order, streams, _, _ = socket.recv_fds(orders, 1 << 24, 3)
    if not order:
        sys.exit()
    child = os.fork()
    if child:
        for stream in streams:
            os.close(stream)
        orders.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    parent = bool(child)
module, arguments, folder, environment, limits, alarm_s = json.loads(order)
orders.close()
for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
signal.alarm(alarm_s)
for number, most in limits:
    resource.setrlimit(number, (most, most))
sys.argv = ["hespas", *arguments]
mains[module]()
"""
_ALARM_S = int(SAFETY_S)
"""A command that waits for something takes no processor time: it is ended after so long (exit code -14)."""


@cache
def _server() -> socket.socket:
    """Start the server process of this process, and return the socket of its requests."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", "-c", _SERVER, str(there.fileno())]
    # Standard output is buffered, as users have it: an empty text counts as unset.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment,
        pass_fds=[there.fileno()],
    )
    there.close()

    def end() -> None:
        here.close()
        server.wait()

    atexit.register(end)
    return here


def run_command(
    command: str,
    *arguments: str | Path,
    stdin: str = "",
    stdout: str = "",
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    limits: Mapping[int, int] | None = None,
) -> subprocess.CompletedProcess[str]:
    """A command by its name (``hespas-convert``) to its end.

    Args:
        command: ``hespas``, ``hespas-convert`` or ``hespas-validate``.
        arguments: its arguments.
        stdin: what it reads.
        stdout: a file to which standard output goes; kept and returned where none is named.
        cwd: its folder.
        environment: variables beside those of this process.
        limits: of ``resource`` (``RLIMIT_AS``: bytes).
    """
    limits = {resource.RLIMIT_CORE: 0, **(limits or {})}
    words = [os.fspath(argument) for argument in arguments]
    variables = {**os.environ, **(environment or {})}
    order = json.dumps([MODULES[command], words, str(cwd), variables, list(limits.items()), _ALARM_S])
    # What a command says goes through a pipe: a limit of the size of files holds for what it writes alone.
    reads, writes = os.pipe()
    with TemporaryFile() as given, TemporaryFile() as output, os.fdopen(reads, encoding="utf-8") as errors:
        given.write(stdin.encode())
        given.seek(0)
        target = os.open(stdout, os.O_WRONLY) if stdout else os.dup(output.fileno())
        try:
            socket.send_fds(_server(), [order.encode()], [given.fileno(), target, writes])
        finally:
            os.close(target)
            os.close(writes)
        said = errors.read()
        code = int(_server().recv(64))
        output.seek(0)
        return subprocess.CompletedProcess([command, *words], code, output.read().decode(), said)
