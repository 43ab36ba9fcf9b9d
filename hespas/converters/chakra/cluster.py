"""Rank files written by the workers of a dask.distributed cluster: https://distributed.dask.org.

All workers must see the folder under the same path. If a worker dies, another one writes its share again.
Each file appears in one atomic step, and the worker that wrote it flushes it to disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from hespas._version import __version__
from hespas.converters.chakra.comm_groups import GroupIds
from hespas.converters.chakra.job_traces import Change, RankTraces, TraceAccount
from hespas.converters.chakra.rank_files import RankFolder, write_ranks
from hespas.converters.chakra.wire import Longs
from hespas.files.trust import refuse_in_untrusted
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import MissingExtraError, OutputError, UsageError

__all__ = ["write_on_cluster"]

_PARTS_PER_THREAD = 4
_LEAST_RANKS = 64
"""Smallest share of ranks: each share encodes its classes again."""
_CONNECT_S = 30


@dataclass(frozen=True, slots=True, eq=False)
class _ClusterWork:
    """Inputs of writing rank files that every worker of a cluster needs: the workload, its process groups and
    the folder. They are sent to each worker once.
    """

    version: str
    workload: Workload
    groups: GroupIds
    change: Change
    folder: RankFolder


_ADDRESS = re.compile(r"(tcp|tls|ucx|ws|wss)://[^/:]+|inproc://.")


def write_on_cluster(
    job: RankTraces,
    ranks: Longs,
    folder: RankFolder,
    address: str,
    *,
    progress: Callable[[int], None] | None = None,
) -> TraceAccount:
    """Write rank files as :func:`write_ranks` does, on the workers of the dask scheduler at ``address``.

    Raises :class:`MissingExtraError` without dask.distributed, :class:`UsageError` if no scheduler answers,
    :class:`OutputError` if no worker can write its share of the files, and ``UnsupportedError`` if inputs are
    untrusted.
    """
    refuse_in_untrusted("`cluster` runs code from a scheduler")
    if not _ADDRESS.match(address):  # the library would retry forever
        raise UsageError(
            "expected the address of a dask scheduler", path=address, hint="name it as tcp://HOST:PORT"
        )
    try:
        distributed: Any = import_module("distributed")
    except ImportError as error:
        raise MissingExtraError("writing on a cluster", "cluster", detail=str(error)) from error
    for number in np.unique(job.workload.rank_class[ranks]).tolist():
        job.graph(number)  # reports its diagnostics once, on the client
    account = TraceAccount()
    with _client(distributed, address) as client:
        threads = sum(client.nthreads().values())
        if not threads:
            raise UsageError(
                "the cluster has no workers", path=address, hint=f"start one: dask worker {address}"
            )
        work = _ClusterWork(__version__, job.workload, job.groups, job.change, folder)
        shared = client.submit(_received, work, pure=False)
        count = max(1, min(len(ranks) // _LEAST_RANKS, threads * _PARTS_PER_THREAD))
        parts = np.array_split(ranks, count)
        futures = (client.submit(_write_part, shared, part, pure=False) for part in parts)
        for done, future in enumerate(distributed.as_completed(futures, loop=client.loop), start=1):
            account.join(_result(distributed, future, address))
            future.release()  # otherwise the part is written again if its worker dies
            if progress:
                progress(len(ranks) * done // len(parts))
    return account


@contextmanager
def _client(distributed: Any, address: str) -> Generator[Any]:
    try:
        client = distributed.Client(address, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no scheduler answers: {error}", path=address, hint="start one: dask scheduler"
        ) from error
    try:
        yield client
    finally:
        client.close()


def _result(distributed: Any, future: Any, address: str) -> TraceAccount:
    """Return the counts that a worker reports for its ranks. Errors of Hespas are raised unchanged."""
    try:
        account: TraceAccount = future.result()
    except distributed.KilledWorker as error:
        raise OutputError(
            "workers died repeatedly while writing the same ranks",
            path=address,
            hint="check in the workers' log that they have enough memory",
        ) from error
    except ImportError as error:
        raise UsageError(
            f"a worker cannot load this program: {error}",
            path=address,
            hint=f"install hespas {__version__} on all workers",
        ) from error
    return account


def _received(work: _ClusterWork) -> _ClusterWork:
    """Store the inputs of :class:`_ClusterWork` on a worker. If the worker dies, the scheduler sends them
    again.
    """
    if work.version != __version__:
        raise UsageError(
            f"a worker has hespas {__version__}, the client has {work.version}",
            hint="install the same version everywhere, so that files are identical",
        )
    return work


def _write_part(work: _ClusterWork, ranks: Longs) -> TraceAccount:
    if not work.folder.path.is_dir():
        raise OutputError(
            "the folder does not exist on a worker",
            path=str(work.folder.path),
            hint="write to a shared file system, and give its full path",
        )
    job = RankTraces(work.workload, work.groups, Diagnostics(keep=0), work.change)
    return write_ranks(job, ranks, work.folder)
