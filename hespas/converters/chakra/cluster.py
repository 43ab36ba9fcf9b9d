"""Rank files written by the workers of a dask.distributed cluster: https://distributed.dask.org.

All workers see the folder under the same path. The part of a worker that dies is written again by another;
a file appears at once, so that whoever comes second finds it there, and each file is seen to the disk by the
machine that wrote it.
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
from hespas.converters.chakra.job_traces import Account, Change, JobTraces
from hespas.converters.chakra.rank_files import RankFolder, write_ranks
from hespas.converters.chakra.wire import Longs
from hespas.files.trust import refuse_in_untrusted
from hespas.graph import Diagnostics, Workload
from hespas.graph.errors import MissingExtraError, OutputError, UsageError

__all__ = ["write_on_cluster"]

_PARTS_PER_THREAD = 4
_LEAST_RANKS = 64
"""Of a part: each part encodes its classes anew."""
_CONNECT_S = 30


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """What every worker needs, sent once."""

    version: str
    workload: Workload
    groups: GroupIds
    change: Change
    folder: RankFolder


_ADDRESS = re.compile(r"(tcp|tls|ucx|ws|wss)://[^/:]+|inproc://.")


def write_on_cluster(
    job: JobTraces,
    ranks: Longs,
    folder: RankFolder,
    address: str,
    *,
    progress: Callable[[int], None] | None = None,
) -> Account:
    """What :func:`write_ranks` does, on the workers of the scheduler at ``address``.

    Raises :class:`MissingExtraError` without dask.distributed, :class:`UsageError` where no scheduler
    answers, :class:`OutputError` where a part cannot be written by any worker, ``UnsupportedError`` where
    inputs are untrusted.
    """
    refuse_in_untrusted("`cluster` runs code of a scheduler")
    if not _ADDRESS.match(address):  # the library would ask for ever
        raise UsageError("is no address of a scheduler", path=address, hint="tcp://HOST:PORT")
    distributed = _distributed()
    for number in np.unique(job.workload.rank_class[ranks]).tolist():
        job.graph(number)  # what it reports is told here, once
    account = Account()
    with _client(distributed, address) as client:
        threads = sum(client.nthreads().values())
        if not threads:
            raise UsageError("the cluster has no workers", path=address, hint=f"dask worker {address}")
        work = _Work(__version__, job.workload, job.groups, job.change, folder)
        shared = client.submit(_received, work, pure=False)
        parts = _parts(ranks, threads)
        futures = (client.submit(_write_part, shared, part, pure=False) for part in parts)
        for done, future in enumerate(distributed.as_completed(futures, loop=client.loop), start=1):
            account.join(_result(distributed, future, address))
            future.release()  # or the part would be written again where a worker dies with what it gave
            if progress:
                progress(len(ranks) * done // len(parts))
    return account


def _distributed() -> Any:
    """The library, whose types say little."""
    try:
        return import_module("distributed")
    except ImportError as error:
        raise MissingExtraError("writing on a cluster", "cluster", detail=str(error)) from error


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


def _parts(ranks: Longs, threads: int) -> list[Longs]:
    count = max(1, min(len(ranks) // _LEAST_RANKS, threads * _PARTS_PER_THREAD))
    return np.array_split(ranks, count)


def _result(distributed: Any, future: Any, address: str) -> Account:
    """What a part gave. Errors of ours come as they are."""
    try:
        account: Account = future.result()
    except distributed.KilledWorker as error:
        raise OutputError(
            "workers died again and again while they wrote the same part",
            path=address,
            hint="look at the workers' log: is their memory enough?",
        ) from error
    except ImportError as error:
        raise UsageError(
            f"a worker cannot load this program: {error}",
            path=address,
            hint=f"install hespas {__version__} on all workers",
        ) from error
    return account


# --- On a worker


def _received(work: _Work) -> _Work:
    """Keep the work on a worker; where that dies, the scheduler sends it again."""
    if work.version != __version__:
        raise UsageError(
            f"a worker has hespas {__version__}, and {work.version} asks",
            hint="install the same version everywhere: files must be the same",
        )
    return work


def _write_part(work: _Work, ranks: Longs) -> Account:
    if not work.folder.path.is_dir():
        raise OutputError(
            "the folder is not there on a worker",
            path=str(work.folder.path),
            hint="write to a file system that all machines share, and name it by its full path",
        )
    job = JobTraces(work.workload, work.groups, Diagnostics(keep=0), work.change)
    return write_ranks(job, ranks, work.folder)
