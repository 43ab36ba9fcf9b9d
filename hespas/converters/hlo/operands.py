"""How many operands HLO operations have, of those that always have the same number.

Source: https://openxla.org/xla/operation_semantics. Operations of which printed programs have several forms
(``dot`` with sparsity, variadic ``reduce`` and ``sort``) are left out.
"""

from __future__ import annotations

__all__ = ["NUM_OPERANDS"]

_UNARY = """
abs acos acosh asin asinh atan atanh bitcast bitcast-convert broadcast cbrt ceil cholesky convert copy cosine
cosh count-leading-zeros erf exponential exponential-minus-one fft floor get-dimension-size
get-tuple-element imag is-finite log log-plus-one logistic negate not popcnt real reduce-precision reshape
reverse round-nearest-afz round-nearest-even rsqrt sign sine sinh slice sqrt tan tanh transpose while
"""
_BINARY = """
add add-dependency and atan2 compare complex convolution divide gather maximum minimum multiply or pad power
remainder set-dimension-size shift-left shift-right-arithmetic shift-right-logical stochastic-convert subtract
triangular-solve xor
"""
_TERNARY = "clamp select select-and-scatter"

NUM_OPERANDS: dict[str, int] = {
    **dict.fromkeys(_UNARY.split(), 1),
    **dict.fromkeys(_BINARY.split(), 2),
    **dict.fromkeys(_TERNARY.split(), 3),
}
