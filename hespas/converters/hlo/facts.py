"""HLO attributes -> the facts that the shared cost table asks for, one entry per opcode that has any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from hespas.converters.costs import (
    Body,
    BroadcastFacts,
    ConvFacts,
    CustomFacts,
    DotFacts,
    Facts,
    FftFacts,
    MapFacts,
    Precision,
    RaggedDotFacts,
    ReduceFacts,
    ScatterFacts,
    SelectScatterFacts,
    SolveFacts,
    SortFacts,
    Tensor,
    TopKFacts,
    UpdateFacts,
    WindowFacts,
    config_precision,
    named_algorithm,
    with_macs,
)
from hespas.converters.hlo.attributes import dim_labels, fields, integer, ints, is_true, names, window
from hespas.converters.hlo.scan import unquote

__all__ = ["FACTS", "Asked"]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a facts function may use. ``bodies`` are the scalar costs of the module's computations.

    ``in_place``: the first operand's buffer dies here. ``materialised``: the program is compiled, so what
    stands outside fusions is a kernel of its own.
    """

    attributes: Mapping[str, str]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    bodies: Mapping[str, Body]
    in_place: bool = False
    materialised: bool = False

    def body(self, key: str = "to_apply") -> Body:
        """The scalar computation an attribute names. Raises ``ValueError`` where it is absent."""
        named = names(self.attributes.get(key))
        if not named or named[0] not in self.bodies:
            raise ValueError(f"expected an attribute {key} that names a computation")
        return self.bodies[named[0]]

    def number(self, key: str, default: int) -> int:
        """An integer attribute."""
        return integer(self.attributes[key]) if key in self.attributes else default


def _precision(asked: Asked) -> Precision:
    """How exactly an instruction multiplies, and what its frontend states beside the specification."""
    return with_macs(_multiplying(asked), fields(asked.attributes.get("frontend_attributes", "")))


def _multiplying(asked: Asked) -> Precision:
    algorithm = asked.attributes.get("algorithm", "dot_unset")
    if algorithm != "dot_unset":
        return named_algorithm(algorithm)
    levels = names(asked.attributes.get("operand_precision"))
    return config_precision(levels) if levels else Precision()


def _dot(asked: Asked) -> DotFacts:
    keys = ("lhs_batch_dims", "rhs_batch_dims", "lhs_contracting_dims", "rhs_contracting_dims")
    places = [ints(asked.attributes.get(key)) for key in keys]
    for place, (dims, operand) in enumerate(zip(places, (0, 1, 0, 1), strict=True)):
        if any(not 0 <= dim < len(asked.operands[operand].shape) for dim in dims):
            raise ValueError(f"expected dimensions of the operand in {keys[place]}")
    return DotFacts(places[0], places[1], places[2], places[3], _precision(asked))


def _ragged_dot(asked: Asked) -> RaggedDotFacts:
    ragged = ints(asked.attributes.get("lhs_ragged_dims"))
    return RaggedDotFacts(_dot(asked), ragged[0] if ragged else 0)


def _spatial(places: Mapping[str, int]) -> tuple[int, ...]:
    """Places of the spatial dimensions 0, 1, ... of one operand."""
    return tuple(
        places[label] for label in sorted(places, key=lambda text: (len(text), text)) if label.isdigit()
    )


def _convolution(asked: Asked) -> ConvFacts:
    source, kernel, output = dim_labels(asked.attributes.get("dim_labels", ""))
    dims = window(asked.attributes.get("window"))
    if len(dims) != len(_spatial(kernel)):
        raise ValueError(f"expected a window of {len(_spatial(kernel))} dimensions")
    return ConvFacts(
        input_batch=source["b"],
        input_feature=source["f"],
        input_spatial=_spatial(source),
        kernel_in=kernel["i"],
        kernel_out=kernel["o"],
        kernel_spatial=_spatial(kernel),
        output_batch=output["b"],
        output_feature=output["f"],
        output_spatial=_spatial(output),
        window=dims,
        feature_groups=asked.number("feature_group_count", 1),
        batch_groups=asked.number("batch_group_count", 1),
        precision=_precision(asked),
    )


def _reduce(asked: Asked) -> ReduceFacts:
    return ReduceFacts(asked.body(), max(len(asked.operands) // 2, 1))


def _reduce_window(asked: Asked) -> WindowFacts:
    return WindowFacts(asked.body(), window(asked.attributes.get("window")), max(len(asked.operands) // 2, 1))


def _select_and_scatter(asked: Asked) -> SelectScatterFacts:
    elements = prod(dim.size for dim in window(asked.attributes.get("window")))
    return SelectScatterFacts(asked.body("select"), asked.body("scatter"), elements)


def _scatter(asked: Asked) -> ScatterFacts:
    return ScatterFacts(asked.body(), max((len(asked.operands) - 1) // 2, 1), asked.in_place)


def _sort(asked: Asked) -> SortFacts:
    along = ints(asked.attributes.get("dimensions"))
    shape = asked.operands[0].shape
    extent = shape[along[0]] if along else shape[-1]
    return SortFacts(extent, asked.body())


def _fft(asked: Asked) -> FftFacts:
    return FftFacts(asked.attributes.get("fft_type", "FFT"), ints(asked.attributes.get("fft_length")))


def _custom_call(asked: Asked) -> CustomFacts:
    target = unquote(asked.attributes.get("custom_call_target", ""))
    config = unquote(asked.attributes.get("backend_config", ""))
    conv = _convolution(asked) if "dim_labels" in asked.attributes else None
    return CustomFacts(target, config, conv)


FACTS: dict[str, Callable[[Asked], Facts]] = {
    "dot": _dot,
    "scaled-dot": _dot,
    "ragged-dot": _ragged_dot,
    "convolution": _convolution,
    "reduce": _reduce,
    "reduce-window": _reduce_window,
    "select-and-scatter": _select_and_scatter,
    "scatter": _scatter,
    "sort": _sort,
    "map": lambda asked: MapFacts(asked.body()),
    "fft": _fft,
    "topk": lambda asked: TopKFacts(asked.number("k", asked.results[0].shape[-1])),
    "triangular-solve": lambda asked: SolveFacts(is_true(asked.attributes.get("left_side", "true"))),
    "dynamic-update-slice": lambda asked: UpdateFacts(asked.in_place),
    "broadcast": lambda asked: BroadcastFacts(asked.materialised),
    "custom-call": _custom_call,
}
"""Opcode -> facts. Opcodes that are not here cost what their tensor types say."""
