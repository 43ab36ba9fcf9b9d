"""What programs state of multiply-accumulate units beside element types: FQ-Conv (arXiv 1912.09356).

A network trained for narrow or analogue accumulators keeps ``accumulator_bits`` (a whole number) and
``mac_noise_sigma`` (a number) as attributes of its products and convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from hespas.costs.facts import Precision
from hespas.graph import ACCUMULATOR_BITS, MAC_NOISE_SIGMA

__all__ = ["with_macs"]

_MOST_BITS = 1 << 16


def with_macs(precision: Precision, stated: Mapping[str, str]) -> Precision:
    """The precision with what the attributes say; one that is no sensible number says nothing."""
    bits = _number(stated.get(ACCUMULATOR_BITS, ""))
    sigma = _number(stated.get(MAC_NOISE_SIGMA, ""))
    if bits is not None and bits.is_integer() and 0 < bits <= _MOST_BITS:
        precision = precision._replace(accumulator_bits=int(bits))
    if sigma is not None and sigma >= 0:
        precision = precision._replace(mac_noise_sigma=sigma)
    return precision


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
