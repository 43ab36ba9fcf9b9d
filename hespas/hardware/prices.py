"""Prices of device-hours and power of devices: files of the user, and assumed shares of the design power.

The power of a device depends on its work. A step has three kinds of time: matmuls and attention, other
kernels with communication (mostly bound by memory or links), and waits. Each has a share of the thermal
design power (TDP). The default shares are assumptions. Their intervals are wide, because measured power of
busy devices lies far below the TDP for work that is bound by memory. A file replaces them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, hypot, isnan, log, nan
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from hespas.graph.errors import UsageError
from hespas.hardware.devices import Device
from hespas.hardware.library import load_device
from hespas.hardware.typed_toml import (
    FileKind,
    PositiveOrNan,
    Text,
    TomlRow,
    read_rows,
    toml_error,
)

__all__ = ["ASSUMED_POWER", "DeviceTerms", "PowerShares", "Prices", "read_prices"]

_Share = Annotated[float, Meta(ge=0.0, le=2.0, description="a share of the TDP from 0 to 2")]
_Range = tuple[_Share, _Share, _Share]


class PowerShares(TomlRow, frozen=True, kw_only=True):
    """Power of a device in shares of its thermal design power, each with an interval: lowest, expected and
    highest value.
    """

    compute: _Range = (0.75, 0.90, 1.0)
    memory: _Range = (0.43, 0.65, 0.85)
    idle: _Range = (0.15, 0.30, 0.43)
    source: str = ""

    def energy_j(
        self, tdp_w: float, times_ns: tuple[float, float, float], time_interval: tuple[float, float]
    ) -> tuple[float, float, float]:
        """Return the energy of a device over some time in matmuls, in other work and in waits: lowest,
        expected and highest [J].

        ``time_interval`` has the ends of the interval of the whole time, relative to the time (NaN: unknown,
        ignored). The two sources of error are independent: logarithms of their ends add in quadrature.
        """
        ranges = self.compute, self.memory, self.idle
        low_j, expected_j, high_j = (
            tdp_w
            * sum(time_ns * shares[index] for time_ns, shares in zip(times_ns, ranges, strict=True))
            / 1e9
            for index in range(3)
        )
        if not expected_j:
            return low_j, expected_j, high_j
        ends = zip((low_j / expected_j, high_j / expected_j), time_interval, strict=True)
        below, above = (hypot(log(power), 0.0 if isnan(time) else log(time)) for power, time in ends)
        return expected_j * exp(-below), expected_j, expected_j * exp(above)


ASSUMED_POWER = PowerShares(
    source="assumed 90 % in matmuls and attention, 65 % in other kernels, 30 % in waits"
)
"""Shares for devices without own ones."""


class _DeviceRow(TomlRow, frozen=True, kw_only=True):
    name: Text
    price_per_hour: PositiveOrNan = nan
    tdp_w: PositiveOrNan = nan
    power: PowerShares | None = None
    source: str = ""


class _PriceFile(TomlRow, frozen=True, kw_only=True):
    currency: Text = "USD"
    device: tuple[_DeviceRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTerms:
    """Price per device-hour (NaN: unknown), design power [W] (NaN: unknown) and shares of power of a device,
    with their sources.
    """

    price_per_hour: float = nan
    tdp_w: float = nan
    power: PowerShares = ASSUMED_POWER
    price_source: str = ""
    power_source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Terms of the devices of a file by device name."""

    currency: str = ""
    path: str = ""
    rows: Mapping[str, DeviceTerms]

    def of_device(self, device: Device) -> DeviceTerms:
        """Return the terms of a device; what the file does not state is assumed or unknown."""
        if device.name in self.rows:
            return self.rows[device.name]
        return DeviceTerms(tdp_w=device.tdp_w, power_source=_power_source(device, ASSUMED_POWER, nan))

    def unknown(self, device: Device, what: str, key: str) -> UsageError:
        """Return the error for a device whose ``key`` the file does not state. ``what`` names it in words."""
        return UsageError(
            f"the {what} of {device.name} is unknown",
            path=self.path or None,
            hint=f'write a row [[device]] with name = "{device.name}" and {key} in a file, and name the '
            "file by `prices`",
        )


def _power_source(device: Device, shares: PowerShares, tdp_w: float) -> str:
    power_text = f"{tdp_w:g} W as stated" if tdp_w > 0 else f"TDP of {device.tdp_w:g} W"
    return f"{power_text}; {shares.source or 'shares as stated'}"


_ABOUT = FileKind(
    "a price file",
    where="check the path",
    example='currency = "USD", then [[device]] with name = "H100-SXM" and price_per_hour = 2.5',
)


def read_prices(path: Path, own_devices: Iterable[Device] = ()) -> Prices:
    """Read a price file (TOML): ``currency``, and ``[[device]]`` rows with ``name``, ``price_per_hour``,
    ``tdp_w``, ``source``, and ``[device.power]`` with ``compute``, ``memory`` and ``idle``, each
    ``[lowest, expected, highest]``. Names are those of ``own_devices``, of the library, and of the user.

    Raises ``FormatError`` for a malformed file, and ``UsageError`` for an unknown or repeated device.
    """
    _, file = read_rows(path, _PriceFile, _ABOUT)
    own = {device.name: device for device in own_devices}
    rows: dict[str, DeviceTerms] = {}
    for index, row in enumerate(file.device):
        try:
            device = own.get(row.name) or load_device(row.name)
        except UsageError as error:
            raise UsageError(
                error.message, path=str(path), position=f"device[{index}].name", hint=error.hint
            ) from error
        if device.name in rows:
            raise UsageError(f"{device.name} has several rows", path=str(path), hint="keep one of them")
        shares = row.power or ASSUMED_POWER
        for name in ("compute", "memory", "idle"):
            values: _Range = getattr(shares, name)
            if not values[0] <= values[1] <= values[2]:
                raise toml_error(
                    path,
                    f"device[{index}].power.{name}",
                    f"expected three rising shares, got {list(values)}",
                    "write [lowest, expected, highest]",
                )
        if not shares.idle[1] <= shares.memory[1] <= shares.compute[1]:
            raise toml_error(
                path,
                f"device[{index}].power",
                "expected idle <= memory <= compute",
                "order the expected shares so",
            )
        rows[device.name] = DeviceTerms(
            price_per_hour=row.price_per_hour,
            tdp_w=row.tdp_w if row.tdp_w > 0 else device.tdp_w,
            power=shares,
            price_source=row.source or f"{path.name}, without a source",
            power_source=_power_source(device, shares, row.tdp_w),
        )
    return Prices(currency=file.currency, path=str(path), rows=rows)
