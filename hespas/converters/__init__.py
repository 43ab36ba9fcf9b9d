"""Readers and writers of file formats. A converter imports neither an estimator nor another format's
converter.
"""

from __future__ import annotations

from hespas.converters.format import Format, Head, ReadOptions, RunTimeUnit, Value, WriteOptions
from hespas.converters.registry import (
    find_format,
    format_for_output,
    format_names,
    is_flat,
    is_recognised,
    load_format,
    note_unread_files,
    refuse_unused_options,
    sniff,
    usable_formats,
)

__all__ = [
    "Format",
    "Head",
    "ReadOptions",
    "RunTimeUnit",
    "Value",
    "WriteOptions",
    "find_format",
    "format_for_output",
    "format_names",
    "is_flat",
    "is_recognised",
    "load_format",
    "note_unread_files",
    "refuse_unused_options",
    "sniff",
    "usable_formats",
]
