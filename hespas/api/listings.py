"""Lists of what ships or is installed: devices, systems, models, estimators and formats."""

from __future__ import annotations

from hespas.report.tables import Column, Table, columns, table_from_rows
from hespas.report.texts import count_text

__all__ = ["list_devices", "list_estimators", "list_formats", "list_models", "list_systems"]

_MAX_ALIASES_WIDTH = 30


def list_devices() -> Table:
    """Return one row per device, the user's own devices last.

    Rates are dense peaks with float32 accumulators [FLOP/s], as frameworks use them; memory is the main
    memory [bytes/s, bytes]. ``hespas hardware show NAME`` prints all figures of a device and their sources.

    Examples:
        >>> table = hespas.list_devices().to_pandas()
        >>> "H100-SXM" in set(table["device"])
        True
    """
    from hespas.hardware import all_device_names, load_device

    rows: list[tuple[object, ...]] = []
    for name in all_device_names():
        device = load_device(name)
        # GeForce is faster with float16 accumulators, which frameworks do not use.
        rates = [
            peak.flops_per_s
            for peak in device.peaks
            if peak.dtype in {"bf16", "f16"} and peak.unit == "matrix" and peak.accumulator != "f16"
        ]
        memory = device.main_memory
        rows.append((
            device.name,
            device.vendor,
            max(rates) if rates else None,
            memory.bandwidth_bytes_per_s,
            memory.capacity_bytes,
            device.family,
            device.kind,
            device.tdp_w,
            ", ".join(device.aliases),
        ))  # fmt: skip
    header = (
        *columns("text", "device", "vendor"),
        Column(
            "flops_per_s",
            "dense bf16/f16",
            "number",
            write=lambda rate: f"{rate / 1e12:,.1f} TFLOP/s",
            unknown="-",
        ),
        Column("memory_bytes_per_s", "memory", "number", write=lambda rate: f"{rate / 1e9:,.0f} GB/s"),
        Column("memory_bytes", "capacity", "number", write=lambda size: f"{size / 1e9:,.0f} GB"),
        Column("family", detail=1),
        Column("kind", detail=1),
        Column("tdp_w", kind="number", detail=1),
        Column("aliases", write=_first_aliases),
    )
    return table_from_rows(header, rows)


def _first_aliases(aliases: str) -> str:
    """Return the aliases that fit into the column."""
    if len(aliases) <= _MAX_ALIASES_WIDTH:
        return aliases
    return aliases[: _MAX_ALIASES_WIDTH + 1].rpartition(", ")[0]


def list_systems() -> Table:
    """Return one row per system, the user's own systems last: its device, the largest number of devices (NaN:
    no limit), and the dimensions of its network with their bandwidth per device and direction, innermost
    first.

    Examples:
        >>> "dgx-h100" in set(hespas.list_systems().to_pandas()["system"])
        True
    """
    from hespas.hardware import all_system_names, load_system

    rows = [
        (
            system.name,
            system.device or "any",
            system.most if system.most > 0 else None,
            ", ".join(
                f"{dimension.name} {dimension.bandwidth_bytes_per_s / 1e9:,.4g} GB/s"
                for dimension in system.dimensions
            ),
            system.description,
        )
        for system in map(load_system, all_system_names())
    ]
    header = (
        *columns("text", "system", "device"),
        Column("devices", kind="number", write=lambda most: f"up to {most:,}", unknown="any"),
        Column("dimensions", "dimensions, inner first"),
        Column("description", detail=1),
    )
    return table_from_rows(header, rows)


def list_models() -> Table:
    """Return one row per built-in language model: the number of parameters, the number of layers, and the
    source of its configuration.

    Examples:
        >>> "Llama-3-70B" in set(hespas.list_models().to_pandas()["model"])
        True
    """
    from hespas.generators.llm import load_model, model_names
    from hespas.generators.llm.model import model_parameters

    rows = [
        (name, model_parameters(model), len(model.layers), model.source)
        for name, model in ((name, load_model(name)) for name in model_names())
    ]
    header = (
        Column("model"),
        Column("parameters", kind="count", write=count_text),
        Column("layers", kind="number", write=str),
        Column("source"),
    )
    return table_from_rows(header, rows)


def list_estimators() -> Table:
    """Return one row per estimator: whether it is available on this machine, what it is, its version or the
    reason why it is not available, the command that installs it, and its options.

    Examples:
        >>> "composite" in set(hespas.list_estimators().to_pandas()["estimator"])
        True
    """
    from hespas.estimators import registry

    rows = [
        (row.name, row.available, row.what, row.detail, "" if row.available else row.install,
         ", ".join(row.options))
        for row in registry.list_estimators()
    ]  # fmt: skip
    header = (
        Column("estimator"),
        Column("available", kind="flag", write=lambda available: "yes" if available else "no"),
        *columns("text", "description", "detail"),
        *columns("text", "install", "options", detail=1),
    )
    return table_from_rows(header, rows)


def list_formats() -> Table:
    """Return one row per format: its content, the suffixes of its files, whether it can be read and written,
    and the extra that it needs.

    Examples:
        >>> "chakra" in set(hespas.list_formats().to_pandas()["format"])
        True
    """
    from hespas.converters import format_names, load_format

    rows = [
        (entry.name, entry.title, " ".join(entry.suffixes), entry.read is not None, entry.write is not None,
         entry.extra)
        for entry in map(load_format, format_names())
    ]  # fmt: skip
    header = (*columns("text", "format", "content", "suffixes"), *columns("flag", "read", "write"),
              Column("extra"))  # fmt: skip
    return table_from_rows(header, rows)
