"""Which of the devices a user names a recording was made on: each event is compared with its own device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.columns import IntArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device, canonical
from hespas.validators.accuracy.sources import events_of

__all__ = ["by_device"]

_ANY_CPU = "CPU"
"""What recordings of a host call their device; a CPU that a user describes has a name of its own."""


def by_device(
    profile: Profile | Workload, named: Mapping[str, Device], diagnostics: Diagnostics
) -> list[tuple[Profile | Workload, str]]:
    """The parts of a profile, each with the spelling of its device; ``named`` is by the user's spellings.

    A profile of a single device is taken for the only one named, with a warning where it states a name that
    this one does not have; of several devices, events of those that are not named are left out with a
    warning. Raises ``UsageError`` where none fits and there is a choice.
    """
    if isinstance(profile, Workload):
        stated = profile.metadata.get("device", "")
        fitting = _fitting(stated, named)
        return [(profile, fitting or _taken_for(profile.name, [stated], named, diagnostics))]
    texts = (*profile.devices, "")
    place = _places(profile)
    used: list[int] = np.unique(place).tolist() if len(place) else list(range(len(profile.devices)))
    fits = {each: spelling for each in used if (spelling := _fitting(texts[each], named))}
    if not fits:
        return [(profile, _taken_for(profile.name, [texts[each] for each in used], named, diagnostics))]
    chosen = list(dict.fromkeys(fits.values()))
    if len(chosen) == 1:
        fits |= {each: chosen[0] for each in used if not texts[each]}
    missing = [each for each in used if each not in fits]
    diagnostics.warning(
        "accuracy.other-device",
        profile.name,
        f"events are of {', '.join(texts[each] or 'an unnamed device' for each in missing)}, which no "
        "--hardware names: they are left out",
        count=int(np.isin(place, missing).sum()),
    )
    if len(chosen) == 1 and not missing:
        return [(profile, chosen[0])]
    parts: list[tuple[Profile | Workload, str]] = []
    for spelling in chosen:
        rows = np.flatnonzero(np.isin(place, [each for each in used if fits.get(each) == spelling]))
        parts.append((events_of(profile, rows, f"{profile.name} on {named[spelling].name}"), spelling))
    return parts


def _places(profile: Profile) -> IntArray:
    """The device of each event; the number of devices for those without."""
    count = len(profile.devices)
    stated = profile.device_index.astype(np.int64)
    return np.where((stated >= 0) & (stated < count), stated, count)


def _fitting(text: str, named: Mapping[str, Device]) -> str:
    """The spelling of the device that a profile calls ``text``; empty where it is none of them."""
    shipped = canonical(text)
    for spelling, device in named.items():
        own = {name.casefold() for name in (device.name, *device.aliases)}
        if text and (text.casefold() in own or shipped.casefold() in own):
            return spelling
    return ""


def _taken_for(name: str, texts: Sequence[str], named: Mapping[str, Device], diagnostics: Diagnostics) -> str:
    """The device of a profile whose own names fit none."""
    known = {shipped for text in texts if (shipped := canonical(text))}
    if len(known) > 1:
        raise _unfit(name, texts)
    spelling = _only(name, texts, named)
    device = named[spelling].name
    stated = next((text for text in texts if text), "")
    if known:
        told = f"recorded on {known.pop()}, and compared with estimates for {device}"
        diagnostics.warning("accuracy.other-device", name, told)
    elif stated and (stated != _ANY_CPU or canonical(device)):
        told = f"recorded on {stated}, and compared with estimates for {device}, which has no such name"
        diagnostics.warning("accuracy.other-device", name, told)
    return spelling


def _only(name: str, texts: Sequence[str], named: Mapping[str, Device]) -> str:
    if len(named) > 1:
        raise _unfit(name, texts)
    return next(iter(named))


def _unfit(name: str, texts: Sequence[str]) -> UsageError:
    stated = ", ".join(text for text in texts if text)
    return UsageError(
        f"measured on {stated or 'an unnamed device'}: which --hardware is that?",
        path=name,
        hint="give one --hardware per device, or a hardware file that has this name among its aliases",
    )
