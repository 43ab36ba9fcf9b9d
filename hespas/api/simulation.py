"""Simulation of a step: on the engine (mode ``hespas``), or on ASTRA-sim's analytical simulator (mode
``astra``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from hespas.api.arguments import (
    ChosenGranularity,
    ComparedEstimator,
    MissingPolicy,
    ReadingProgram,
    StepFactorChoice,
    checked,
    hardware_option,
)
from hespas.api.lowering import STEP_ESTIMATOR, Mode
from hespas.converters.format import SourceFormat
from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.deprecation import renamed_arguments
from hespas.graph.errors import UsageError
from hespas.graph.hints import OUTPUT, AtLeast, AtMost, NonNegativeInt, Option
from hespas.graph.progress import Progress
from hespas.simulator.astra.configuration import Backend
from hespas.simulator.astra.external import DEFAULT_TIMEOUT_S
from hespas.simulator.job.matching import Protocol

if TYPE_CHECKING:
    from hespas.api.simulation_result import SimulationResult
    from hespas.hardware import System
    from hespas.simulator import Simulator

__all__ = ["simulate"]

_NETWORK, _RANKS, _ASTRA = "System and network", "Ranks and order", "ASTRA-sim"
"""Headings of ``--help``."""


def _stragglers_of(texts: Sequence[str]) -> dict[int, float]:
    """Parse slow ranks: ``3=1.2``."""
    slow: dict[int, float] = {}
    for text in texts:
        rank, _, factor = text.partition("=")
        try:
            rank_number, factor_value = int(rank), float(factor)
        except ValueError:
            raise UsageError(
                f"invalid `stragglers` {text}: expected RANK=FACTOR", hint="`stragglers=3=1.2`"
            ) from None
        if rank_number in slow:
            raise UsageError(f"`stragglers` names rank {rank_number} twice", hint="give each rank once")
        slow[rank_number] = factor_value
    return slow


def _config_option(help_text: str) -> Option:
    return Option(help_text, metavar="FILE", panel=_ASTRA, label="a configuration")


_Source = Annotated[
    str | Path | Workload | Profile,
    Option(
        "Workload in any readable format.",
        metavar="SRC",
        is_argument=True,
        is_required=False,
        default_text="",
    ),
]
_Hardware = Annotated[
    str | None,
    hardware_option(
        "Estimate durations on this device (default: durations in SRC); repeat to compare.", repeats=True
    ),
]
_System = Annotated[
    "str | Path | System | None",
    Option(
        "Use the network of this system, and its device unless `hardware` is given.",
        metavar="NAME|FILE",
        panel=_NETWORK,
        completes="systems",
        label="a configuration",
        is_text=True,
    ),
]
_Messages = Annotated[
    Protocol, Option("Complete a send at once (eager) or on receipt (rendezvous).", panel=_NETWORK)
]
_Jitter = Annotated[
    float,
    AtLeast(0),
    AtMost(10),
    Option(
        "Set the jitter of kernels and copies (coefficient of variation), drawn independently per rank.",
        metavar="SIGMA",
        panel=_RANKS,
    ),
]
_Seed = Annotated[NonNegativeInt, Option("Set the random seed of `jitter`.", metavar="N", panel=_RANKS)]
_Stragglers = Annotated[
    Mapping[int, float] | None,
    Option(
        "Slow down rank RANK by FACTOR; repeatable.",
        flag="straggler",
        metavar="RANK=FACTOR",
        panel=_RANKS,
        repeats=True,
        parse=_stragglers_of,
    ),
]
_Alone = Annotated[
    bool, Option("Simulate each rank class alone, without waits for other ranks.", panel=_RANKS)
]
_OverlapTrips = Annotated[
    bool,
    Option(
        "Start a loop iteration as soon as its inputs are ready (software pipelining), not after the "
        "previous iteration ends.",
        panel=_RANKS,
    ),
]
_Interference = Annotated[
    bool,
    Option(
        "Model contention between concurrent kernels and collectives.",
        flag="interference/no-interference",
        panel=_RANKS,
    ),
]
_Launches = Annotated[
    bool,
    Option(
        "Model the host that launches the kernels of a training step one by one; steps of XLA and whole "
        "CUDA graphs have no launch overhead.",
        flag="launches/no-launches",
        panel=_RANKS,
    ),
]
_Timeline = Annotated[
    str | Path | None,
    Option(
        "Write the simulated timeline: FILE.json, .pftrace or .csv.",
        metavar="FILE",
        panel=OUTPUT,
        access="writes",
        opens=(".json", ".pftrace", ".perfetto-trace", ".perfetto"),
    ),
]
_Overlay = Annotated[
    str | Path | Profile | Sequence[str | Path | Profile],
    Option(
        "Add this measured profile, or folder of rank profiles, to the timeline.",
        metavar="PROFILE",
        panel=OUTPUT,
    ),
]
_MemorySnapshot = Annotated[
    str | Path | None,
    Option(
        "Write the allocations of each rank class as FILE.pickle for PyTorch's memory viewer.",
        metavar="FILE",
        panel=OUTPUT,
        access="document",
    ),
]
_Mode = Annotated[
    Mode,
    Option(
        "Simulate with the Hespas engine, or with its exact model of ASTRA-sim's analytical simulator.",
        panel=_ASTRA,
    ),
]
_SystemConfig = Annotated[str | Path | None, _config_option("Read ASTRA-sim's system.json (mode astra).")]
_NetworkConfig = Annotated[str | Path | None, _config_option("Read ASTRA-sim's network.yml (mode astra).")]
_MemoryConfig = Annotated[
    str | Path | None, _config_option("Read ASTRA-sim's remote memory file (mode astra).")
]
_Backend = Annotated[
    Backend, Option("Use the congestion-unaware or -aware network backend (mode astra).", panel=_ASTRA)
]
_Queues = Annotated[
    int,
    AtLeast(1),
    AtMost(1024),
    Option("Set the number of queues per network dimension (mode astra).", metavar="N", panel=_ASTRA),
]
_Simulator = Annotated[
    "Simulator | Literal['hespas', 'astra-sim'] | None",
    Option("astra-sim: also run your ASTRA-sim binary (`astra_bin`) on the same traces.", panel=_ASTRA),
]
_AstraBin = Annotated[
    str | Path | None,
    Option(
        "Set the path of ASTRA-sim's analytical binary (`simulator=astra-sim`).",
        metavar="PATH",
        panel=_ASTRA,
    ),
]
_AstraTimeout = Annotated[
    float,
    Option(
        "Limit the run time of ASTRA-sim in seconds (default: 3600).",
        metavar="SECONDS",
        panel=_ASTRA,
        default_text="",
    ),
]


@renamed_arguments(missing="on_unknown", beside="overlay")
@checked(
    SimulationResult="hespas.api.simulation_result:SimulationResult",
    Simulator="hespas.simulator:Simulator",
    System="hespas.hardware:System",
)
def simulate(
    source: _Source,
    hardware: _Hardware = None,
    *,
    estimator: ComparedEstimator = STEP_ESTIMATOR,
    step_factor: StepFactorChoice = "auto",
    granularity: ChosenGranularity = None,
    on_unknown: MissingPolicy = "warn",
    system: _System = None,
    messages: _Messages = "eager",
    jitter: _Jitter = 0.0,
    seed: _Seed = 0,
    stragglers: _Stragglers = None,
    alone: _Alone = False,
    overlap_trips: _OverlapTrips = False,
    interference: _Interference = True,
    launches: _Launches = True,
    timeline: _Timeline = None,
    overlay: _Overlay = (),
    memory_snapshot: _MemorySnapshot = None,
    overwrite: bool = False,
    format: SourceFormat = None,  # noqa: A002 # the word users know
    options: ReadingProgram = None,
    mode: _Mode = "hespas",
    system_config: _SystemConfig = None,
    network_config: _NetworkConfig = None,
    memory_config: _MemoryConfig = None,
    backend: _Backend = "unaware",
    queues_per_dim: _Queues = 1,
    simulator: _Simulator = "hespas",
    astra_bin: _AstraBin = None,
    astra_timeout: _AstraTimeout = DEFAULT_TIMEOUT_S,
    diagnostics: Diagnostics | None = None,
    progress: Progress | None = None,
) -> SimulationResult:
    """Simulate one step of all ranks in the workload: see :func:`hespas.simulator.simulate`.

    With ``hardware`` (a name or a TOML file), operations take the time that ``estimator`` gives them there;
    without it, the times of the workload, or of the device events of a profile. ``step_factor`` selects a
    factor of the device file on the time of the step
    (:func:`hespas.estimators.step_intervals.applied_factor`). With ``system`` (a name, a
    TOML file or a value), communication is timed on its network by the position of the ranks
    (:mod:`hespas.simulator.network`). ``simulator`` is a scheduler with its own options, such as
    :class:`hespas.simulator.JobScheduler`, instead of ``messages`` to ``launches``.

    Mode ``astra`` gives the nanoseconds of ASTRA-sim's analytical simulator for its configuration files, or
    for those of ``system`` (:func:`hespas.simulator.astra.simulate_astra`). Raises ``CheckFailedError`` if
    ranks never finish, ``UsageError`` for an unknown name, ``UnsupportedError`` for a profile without device
    events, and what :func:`check_timeline` and :func:`read_profiles` raise for ``timeline`` and ``overlay``.
    ``memory_snapshot`` raises ``UnsupportedError`` if no rank class states the results of its operations.

    Examples:
        >>> done = hespas.simulate("samples/mlp.mlir", "H100-SXM")
        >>> f"{done.step_ns:,.0f} ns, {done.interval_ns[0]:,.0f} to {done.interval_ns[1]:,.0f} ns"
        '18,878 ns, 8,665 to 27,714 ns'
    """
    from hespas.api.simulation_job import AstraRequest, Scheduling, StepFiles, StepJob

    if simulator == "astra-sim":
        if astra_bin is None:
            raise UsageError("`simulator=astra-sim` requires `astra_bin`", hint="`astra_bin=PATH`")
        mode = "astra"
    scheduling = Scheduling(
        jitter, seed, stragglers or {}, messages, alone, overlap_trips, interference, launches
    )
    scheduler = scheduling.scheduler(mode)
    if simulator is not None and not isinstance(simulator, str):
        if scheduler is not None:
            raise UsageError(
                "`simulator` is a scheduler, which cannot be combined with options of the simulation",
                hint="set `jitter`, `messages` and so on in the scheduler itself",
            )
        scheduler = simulator
    files = (system_config, network_config, memory_config)
    request = AstraRequest(mode, scheduler, *files, backend, queues_per_dim, astra_bin, astra_timeout)
    overlays = [overlay] if isinstance(overlay, str | Path | Profile) else list(overlay)
    paths = [None if path is None else Path(path) for path in (timeline, memory_snapshot)]
    written = StepFiles(paths[0], paths[1], overlays, overwrite)
    sink = diagnostics if diagnostics is not None else Diagnostics()
    job = StepJob(hardware, estimator, granularity, on_unknown, sink, progress, step_factor=step_factor)
    return job.of_source(source, (format, options), request, written, system)
