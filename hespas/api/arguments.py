"""Arguments of public functions: checks against their type hints, and options that several of them share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, cast, get_type_hints

from hespas.api.lowering import STEP_ESTIMATOR, Granularity, Missing
from hespas.converters import ReadOptions, WriteOptions
from hespas.graph import Workload
from hespas.graph.errors import UsageError
from hespas.graph.hints import (
    DEVICE,
    INPUT,
    AtLeast,
    AtMost,
    Option,
    OptionsOf,
    check_fields,
    check_value,
    is_option_class,
)

__all__ = [
    "Array",
    "Captures",
    "ChosenEstimator",
    "ChosenGranularity",
    "ComparedEstimator",
    "Dataflow",
    "Destination",
    "DestinationFormat",
    "EstimatedOn",
    "MissingPolicy",
    "ModelFlops",
    "ProfiledProgram",
    "ReadingProgram",
    "ReadingRecording",
    "ReadingTrace",
    "Seed",
    "StepFactorChoice",
    "Tables",
    "Tokens",
    "WritingJob",
    "checked",
    "hardware_option",
    "with_array",
]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def checked(
    **lazily: str,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Return a decorator that raises ``UsageError`` if the type hint of an argument, or of a field of an
    option object, does not allow its value.

    ``lazily`` maps names that are imported only for type checkers to their module and name
    (``FitMemory="hespas.fitting.approaches:FitMemory"``).
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        signature = inspect.signature(function)

        @cache
        def hints() -> Mapping[str, object]:
            names: dict[str, object] = {}
            for name, target in lazily.items():
                module, _, attribute = target.partition(":")
                names[name] = getattr(import_module(module), attribute)
            return get_type_hints(function, localns=names, include_extras=True)

        @wraps(function)
        def call(*positional: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
            for name, value in signature.bind_partial(*positional, **named).arguments.items():
                kind = signature.parameters[name].kind
                if kind not in {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
                    check_value(name, value, hints().get(name, Any))
                    if is_option_class(cast("type[object]", type(value))):
                        check_fields(value)
            return function(*positional, **named)

        return call

    return decorate


def hardware_option(help_text: str, *, repeats: bool = False) -> Option:
    """Return the declaration of the option ``--hardware``. If it ``repeats``, several values compare
    devices.
    """
    return Option(help_text, metavar="NAME|FILE", panel=DEVICE, completes="devices", repeats=repeats)


def with_array(estimator: str, array: str, dataflow: str) -> str:
    """Return the spelling of an estimator with the options of its systolic array. Raises ``UsageError`` if it
    has no array.
    """
    parts = {option: value for option, value in (("array", array), ("dataflow", dataflow)) if value}
    if not parts:
        return estimator
    name, _, given = estimator.partition(":")
    if name != "systolic":
        listed = " and ".join(f"`{option}`" for option in parts)
        raise UsageError(f"estimator {name!r} has no option {listed}", hint="use `estimator=systolic`")
    added = [f"{option}={value}" for option, value in parts.items()]
    return f"{name}:{','.join([given, *added] if given else added)}"


EstimatedOn = Annotated[
    str,
    hardware_option(
        "Estimate durations on this device (see 'hespas hardware list'); repeat to compare.", repeats=True
    ),
]
Array = Annotated[
    str,
    Option("Set the shape of the systolic array (default: the device's).", metavar="RxC", panel=DEVICE),
]
Dataflow = Annotated[
    str,
    Option(
        "Set the dataflow: output-, weight- or input-stationary (default: the device's).",
        metavar="os|ws|is",
        panel=DEVICE,
    ),
]
ReadingProgram = Annotated[
    ReadOptions | None,
    OptionsOf(("num_devices", "num_replicas", "default_dtype", "dims", "comm_groups", "run_time_unit")),
]
"""Options of commands that read a workload."""
ReadingRecording = Annotated[ReadOptions | None, OptionsOf(("recover",))]
ReadingTrace = Annotated[ReadOptions | None, OptionsOf(("default_dtype", "comm_groups", "run_time_unit"))]
"""Options of commands that read measurements of a workload."""
Captures = Annotated[
    str | Path | Sequence[str | Path] | None,
    Option(
        "Read CUDA graph captures from this PyTorch trace, or folder of traces; repeatable.",
        flag="capture",
        metavar="CAPTURE",
        panel=INPUT,
    ),
]
Tables = Annotated[
    str | Path | Sequence[str | Path],
    Option(
        "Read measured operations from a table (CSV, Parquet); repeatable.",
        metavar="T",
        panel=INPUT,
        label="an input",
    ),
]
ProfiledProgram = Annotated[
    str | Path | Workload | None,
    Option(
        "Read the program that was profiled (default: operations in the profile).",
        metavar="W",
        panel=INPUT,
        label="an input",
    ),
]
Seed = Annotated[int, AtLeast(0), AtMost(2**32 - 1), Option("Set the random seed.", metavar="N")]
Destination = Annotated[
    str | Path | None,
    Option(
        "Write the workload to DST: a folder of traces, one per rank, or a file.",
        flag="out",
        metavar="DST",
        access="writes",
    ),
]
DestinationFormat = Annotated[
    str | None,
    Option(
        "Write DST in this format (default: by suffix).",
        flag="to",
        metavar="FORMAT",
        completes="formats",
    ),
]
WritingJob = Annotated[WriteOptions | None, OptionsOf(("jobs", "only_classes", "shard", "resume", "cluster"))]
"""Options of commands that write the files of a large job."""
Tokens = Annotated[
    float | None,
    Option("Set tokens per step over all ranks, to report tokens/s.", metavar="N", panel=DEVICE),
]
ModelFlops = Annotated[
    float | None,
    Option("Set model FLOPs per step over all ranks, to report MFU.", metavar="N", panel=DEVICE),
]
ChosenEstimator = Annotated[
    str,
    Option(
        "Estimate durations with this estimator (see 'hespas estimators').",
        metavar="NAME",
        panel=DEVICE,
        completes="estimators",
    ),
]
ComparedEstimator = Annotated[
    str,
    Option(
        "Estimate durations with this estimator (see 'hespas estimators'); repeat to compare.",
        metavar="NAME",
        panel=DEVICE,
        completes="estimators",
        repeats=True,
        default_text=f"{STEP_ESTIMATOR}: by kind of workload",
    ),
]
StepFactorChoice = Annotated[
    str,
    Option(
        "Apply this step factor of the device file, such as torch:training, or none "
        "(see hespas-validate calibrate --end-to-end).",
        metavar="FRAMEWORK:PHASE",
        panel=DEVICE,
        default_text="auto: by the workload",
    ),
]
ChosenGranularity = Annotated[
    Granularity | None,
    Option(
        "Use one node per operation, elementwise chain, or region between collectives "
        "(default: fused if durations are estimated and no compiler has fused the program, else op).",
        panel=DEVICE,
        default_text="",
    ),
]
MissingPolicy = Annotated[
    Missing,
    Option(
        "Handle unknown durations and trip counts: warn, fail, or count as zero.",
        flag="missing",
        panel=DEVICE,
    ),
]
