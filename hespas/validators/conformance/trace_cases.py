"""Cases of single trace files: framing, schema versions, attributes, and the graph of one rank."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from msgspec import structs

from hespas.files.wire import encode_varint, field_bytes
from hespas.schemas.chakra import EARLY, LATEST_VERSIONS, READ_VERSIONS
from hespas.schemas.chakra.tables import NodeType
from hespas.validators.conformance.case import ConfiguredCases, counts_of_nodes, network_text
from hespas.validators.conformance.traces import (
    TraceNode,
    Typed,
    attribute,
    collective,
    compute,
    frame,
    message,
    trace,
)

__all__ = ["add_attributes", "add_files", "add_frames", "add_graphs", "add_malformed", "add_versions", "step"]

_LARGEST = (1 << 64) - 1
_INTEGERS = ("int32", "uint32", "uint64", "sint64")


def step(size: int = 1 << 20, micros: int = 5) -> list[TraceNode]:
    """Return one rank of a small step: a computation, an all-reduce of its result, and two computations."""
    return [
        compute(1, micros=micros),
        collective(2, 1, size=size),
        compute(3, 2, micros=3),
        replace(compute(4, 3, micros=2), control=(1,)),
    ]


def _gzip(content: bytes) -> bytes:
    """Return a gzip file with one stored block, whose bytes do not depend on a library."""
    size = struct.pack("<HH", len(content), 0xFFFF - len(content))
    trailer = struct.pack("<II", zlib.crc32(content), len(content))
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff\x01" + size + content + trailer


def _frames(content: bytes) -> list[bytes]:
    """Return the frames of a trace whose messages are shorter than 128 bytes."""
    parts: list[bytes] = []
    at = 0
    while at < len(content):
        end = at + 1 + content[at]
        parts.append(content[at:end])
        at = end
    return parts


def add_frames(kit: ConfiguredCases) -> None:
    """Add files that differ from the usual encoding but have the same nodes."""
    nodes, whole = step(), trace(step())
    usual, parts = counts_of_nodes(nodes), _frames(trace(step()))
    empty_metadata = b"\0" + b"".join(parts[1:])
    unpacked = [field_bytes(5, value) for node in nodes for value in node.data]
    bare = [replace(node, data=()) for node in nodes]
    with_unpacked = [replace(node, extra=part) for node, part in zip(bare[1:], unpacked, strict=True)]
    last = parts[-1][1:]
    swapped = field_bytes(7, 2) + last.replace(field_bytes(7, 2), b"")
    padded = bytes((parts[1][0] | 0x80, 0)) + parts[1][1:]
    same: Mapping[str, tuple[str, bytes]] = {
        "gzip": ("A whole file compressed by gzip.", _gzip(whole)),
        "gzip-members": ("Two gzip members.", _gzip(whole[:70]) + _gzip(whole[70:])),
        "unknown-node-field": ("Node fields that the schema does not define.", trace(
            [replace(node, extra=field_bytes(200, b"new") + field_bytes(201, 7)) for node in nodes])),
        "unknown-metadata-field": ("A metadata field that the schema does not define.", frame(
            field_bytes(1, b"1.0.0") + field_bytes(99, 1)) + b"".join(parts[1:])),
        "unknown-attribute": ("Attributes that no tool defines.", trace(
            [node.with_attrs(vendor_note="x", vendor_value=Typed("double", 0.5)) for node in nodes])),
        "unpacked-lists": ("Dependencies as single varints, as proto2 writes them.", trace(
            [bare[0], *with_unpacked[:2], replace(with_unpacked[2], control=(1,))])),
        "field-order": ("A node with its duration before its id.", b"".join([*parts[:-1], frame(swapped)])),
        "last-scalar-wins": ("A duration that occurs twice; the last one counts.", b"".join(
            [*parts[:-1], frame(field_bytes(7, 9) + last)])),
        "padded-length": ("A length as a varint of two bytes where one is enough.", b"".join(
            [parts[0], padded, *parts[2:]])),
        "metadata-attributes": ("Metadata with attributes.", trace(
            nodes, metadata={"schema": "1.1.1-chakra.0.0.4", "pid": Typed("uint64", _LARGEST)})),
    }  # fmt: skip
    for name, (about, content) in same.items():
        kit.add(f"frames/{name}", about, [content, whole], counts=[usual, usual])
    unlabelled = {
        "empty-metadata": ("A metadata message of 0 bytes, which protobuf allows.", empty_metadata),
        "unknown-version": ("A version label that no schema has.", trace(nodes, "7.7.7")),
    }
    for name, (about, content) in unlabelled.items():
        ranks = [content, whole]
        kit.add(f"frames/{name}", about, ranks, "ET004", check="warn", counts=[usual, usual])
    zero = [replace(compute(0, micros=4), name=""), *nodes[1:3]]
    zero = [zero[0], replace(zero[1], data=(0,)), zero[2]]
    kit.add("frames/id-zero", "A node with id 0 and no name.", [zero, step()])
    default = b"".join([*parts[:2], b"\0", *parts[2:]])
    counts = structs.replace(usual, nodes=usual.nodes + 1)
    about = "A node whose fields all have their default, so that its message has 0 bytes. Nodes follow it."
    kit.add(
        "frames/all-default-node", about, [default, whole], "ET004", "ET009",
        run="finish", counts=[counts, usual],
    )  # fmt: skip


def add_malformed(kit: ConfiguredCases, random: Random) -> None:
    """Add files that a reader has to refuse."""
    whole = trace(step())
    usual, parts, compressed = counts_of_nodes(step()), _frames(whole), _gzip(whole)
    noise = bytes(random.randrange(256) for _ in range(300))
    broken: Mapping[str, tuple[str, bytes, str]] = {
        "empty-file": ("A file of 0 bytes.", b"", "ET002"),
        "no-node": ("Metadata without a node.", parts[0], "ET002"),
        "no-metadata": ("The first message is a node.", b"".join(parts[1:]), "ET002"),
        "truncated-body": ("The last message is cut off.", whole[:-3], "ET001"),
        "truncated-half": ("The file ends in its middle.", whole[: len(whole) // 2], "ET001"),
        "truncated-length": ("The file ends within the length of a message.", whole + b"\x80", "ET001"),
        "truncated-varint-field": ("A field ends within its varint.", whole + frame(b"\x08\x80"), "ET001"),
        "length-bomb": ("A message of 2 GiB is announced.", whole + encode_varint(1 << 31) + b"ab", "ET001"),
        "long-varint": ("An id of eleven bytes.", whole + frame(b"\x08" + b"\xff" * 10 + b"\x01"), "ET001"),
        "wire-type": ("A field of the unused wire type 7.", whole + frame(b"\x0f\x01"), "ET001"),
        "trailing-bytes": ("Text after the last message.", whole + b"# end of trace\n", "ET001"),
        "gzip-cut": ("A gzip stream without its end.", compressed[:-20], "ET001"),
        "gzip-checksum": ("A wrong checksum.", compressed[:-8] + bytes(4) + compressed[-4:], "ET001"),
        "gzip-tail": ("Text after a gzip stream.", compressed + b"end", "ET001"),
        "invalid-utf-8": ("A name that is not UTF-8.", whole + frame(b"\x08\x09\x12\x02\xff\xfe"), "ET001"),
        "random-bytes": ("Random bytes.", noise, ""),
        "text": ("A JSON document.", b'{"schema": "1.0.0", "nodes": []}\n', ""),
    }  # fmt: skip
    for name, (about, content, rule) in broken.items():
        rules = [rule] if rule else []
        ranks, counts_of = [whole, content], [usual, None]
        kit.add(
            f"frames/{name}",
            about,
            ranks,
            *rules,
            read="reject",
            check="reject",
            run="fail",
            counts=counts_of,
        )


def add_versions(kit: ConfiguredCases) -> None:
    """Add a job in each schema version: all collectives that the version has, messages, and gzip."""
    dated = [label for label in READ_VERSIONS if label not in {"0.0.3", *LATEST_VERSIONS}]
    for version in (*dated, *LATEST_VERSIONS):
        kinds = ["ALL_REDUCE", "ALL_TO_ALL", "ALL_GATHER", "REDUCE_SCATTER"]
        kinds += ["BROADCAST"] if version in {"0.0.3-2023-08-07", EARLY} else []
        nodes = [compute(1, micros=7, num_ops=4096, tensor_size=1024)]
        for number, kind in enumerate(kinds, start=2):
            node = collective(number, number - 1, kind=kind, size=number << 16)
            nodes.append(replace(node, micros=11) if kind == "BROADCAST" else node)
        pair = [
            [compute(1), message("SEND", 2, 1, source=0, target=1, tag=3), compute(3, 2)],
            [compute(1), message("RECV", 2, 1, source=0, target=1, tag=3), compute(3, 2)],
        ]
        for name, ranks in (("collectives", [nodes, nodes]), ("messages", pair)):
            about = f"A job with {name} in schema {version}."
            if version == EARLY:
                kit.add(f"schema/{version}-{name}", about, ranks, "ET004", check="warn", version=version)
            elif version in LATEST_VERSIONS:
                kit.add(f"schema/{version}-{name}", about, ranks, version=version)
            else:
                kit.add(
                    f"schema/{version}-{name}", f"{about} A tool reads it as it is meant, or refuses it.",
                    ranks, "ET003", version=version, read="either", check="either", run="skip",
                )  # fmt: skip
        if version in {"0.0.1", "0.0.2"}:
            contents = [_gzip(trace(nodes, version)) for _ in range(2)]
            kit.add(
                f"schema/{version}-gzip", f"The collectives in schema {version}, compressed.", contents,
                "ET003", version=version, read="either", check="either", run="skip",
                counts=[counts_of_nodes(nodes)] * 2,
            )  # fmt: skip


def add_attributes(kit: ConfiguredCases) -> None:
    """Add attributes of every integer type, and duplicate, missing and unreadable ones."""
    other = step()
    for kind in _INTEGERS:
        nodes = step()
        nodes[1] = nodes[1].with_attrs(comm_size=Typed(kind, 1 << 20))
        about = f"comm_size as {kind} instead of int64."
        kit.add(f"attributes/comm-size-{kind}", about, [nodes, nodes], "ET010", check="warn")
    for name, value in (("comm_type", Typed("uint64", 0)), ("is_cpu_op", Typed("int32", 0))):
        nodes = step()
        nodes[1] = nodes[1].with_attrs(**{name: value})
        about = f"{name} as {value.type} instead of its canonical type."
        kit.add(f"attributes/{name.replace('_', '-')}", about, [nodes, nodes], "ET010", check="warn")
    values: dict[str, Typed] = {
        f"as_{kind}": Typed(kind, value)
        for kind, value in (
            ("double", 1.5), ("float", 0.5), ("int32", -1), ("int64", -(1 << 63)), ("uint32", (1 << 32) - 1),
            ("uint64", _LARGEST), ("sint32", -(1 << 31)), ("sint64", -(1 << 63)), ("fixed32", 7),
            ("fixed64", _LARGEST), ("sfixed32", -7), ("sfixed64", -7), ("bool", 1), ("string", "\u00b5s"),
            ("bytes", b"\xff\0"), ("int64_list", [1, -1]), ("string_list", ["a", ""]),
            ("bool_list", [True, False]),
        )
    }  # fmt: skip
    kit.add(
        "attributes/all-types", "An attribute of each type, with extreme values.",
        [[node.with_attrs(**values) for node in step()], other],
    )  # fmt: skip
    sized = step()
    sized[1] = sized[1].with_attrs(comm_operand_bytes=4096, comm_result_bytes=4096)
    about = "A collective whose operand has other bytes than comm_size."
    kit.add("attributes/two-sizes", about, [sized, sized], "GR002", check="warn")
    text = step()
    text[1] = text[1].with_attrs(comm_size=Typed("string", "1048576"))
    kit.add("attributes/comm-size-text", "comm_size as text.", [text, text], "ET010", read="either",
            counts=[None, None])  # fmt: skip
    twice = step()
    twice[1] = replace(twice[1], extra=field_bytes(10, attribute("comm_size", 2048)))
    kit.add("attributes/duplicate", "Two attributes comm_size in a node.", [twice, twice], "ET010",
            read="either", run="skip", counts=[None, None])  # fmt: skip
    nameless = replace(step()[3], extra=field_bytes(10, field_bytes(1, b"flag")))
    kit.add(
        "attributes/no-value", "An attribute with a name and no value.", [[*step()[:3], nameless], other],
        "ET010", check="warn",
    )  # fmt: skip
    negative = step()
    negative[0] = negative[0].with_attrs(duration_nanos=Typed("int64", -5))
    kit.add("attributes/negative-time", "A negative duration.", [negative, other], "GR001", run="skip")
    slow = step(micros=2_000_000_000)
    kit.add("attributes/long-time", "A computation of 2,000 s.", [slow, slow], "GR003", check="warn")
    split = step()
    split[0] = split[0].with_attrs(duration_nanos=9_000_000)
    about = "duration_nanos and duration_micros that differ."
    kit.add("attributes/two-times", about, [split, other], "ET023", check="warn")


def _chain(count: int) -> list[TraceNode]:
    return [
        compute(number, *([number - 1] if number > 1 else []), micros=1) for number in range(1, count + 1)
    ]


def add_graphs(kit: ConfiguredCases, random: Random) -> None:
    """Add graphs of one rank that break a rule, and unusual graphs that do not."""
    first, comm, third, fourth = step()
    other = step()
    cycle = [replace(node, data=((node.id % 1000) + 1,)) for node in _chain(1000)]
    broken: Mapping[str, tuple[str, Sequence[TraceNode], str]] = {
        "duplicate-id": ("Two nodes with one id.",
            [first, comm, third, replace(fourth, id=3, data=(2,))], "ET005"),
        "missing-data-dependency": ("A data dependency on a node that does not exist.",
            [first, comm, third, replace(fourth, data=(3, 99))], "ET006"),
        "missing-control-dependency": ("A control dependency on a node that does not exist.",
            [first, comm, third, replace(fourth, control=(1, 99))], "ET006"),
        "self-dependency": ("A node that depends on itself.",
            [first, comm, third, replace(fourth, data=(3, 4))], "ET007"),
        "cycle": ("Two nodes that depend on each other.",
            [first, comm, replace(third, data=(2, 4)), replace(fourth, control=())], "ET007"),
        "long-cycle": ("A cycle of 1,000 nodes.", cycle, "ET007"),
        "unknown-type": ("A node of type 42.", [first, comm, third, replace(fourth, type=42)], "ET009"),
        "cpu-collective": ("A collective that is marked as an operation of the CPU.",
            [first, comm.with_attrs(is_cpu_op=Typed("bool", True)), third, fourth], "ET016"),
    }  # fmt: skip
    for name, (about, nodes, rule) in broken.items():
        kit.add(f"graph/{name}", about, [nodes, other], rule)
    invalid = [first, comm, third, replace(fourth, type=NodeType.INVALID)]
    about = "A node of type INVALID, which ASTRA-sim skips."
    kit.add("graph/invalid-type", about, [invalid, other], "ET009", run="finish")
    kit.add(
        "graph/metadata-node", "A METADATA node, which a trace may have.",
        [[first, comm, third, replace(fourth, type=NodeType.METADATA)], other], run="skip",
    )  # fmt: skip
    kit.add(
        "graph/metadata-node-run", "A METADATA node, which ASTRA-sim cannot run.",
        [[first, comm, third, replace(fourth, type=NodeType.METADATA)], other], "ET009", profile="astra-sim",
    )  # fmt: skip
    kit.add(
        "graph/cpu-compute", "A computation on the CPU, whose statistics ASTRA-sim loses.",
        [[first.with_attrs(is_cpu_op=Typed("bool", True)), comm, third, fourth], other],
        "ET017", check="warn", profile="astra-sim",
    )  # fmt: skip
    warned: Mapping[str, tuple[str, Sequence[TraceNode], str]] = {
        "repeated-data-dependency": ("A data dependency that is listed twice.",
            [first, comm, third, replace(fourth, data=(3, 3))], "ET008"),
        "no-time": ("A computation without a duration.",
            [replace(first, micros=0), comm, third, fourth], "ET023"),
        "unlinked": ("Nodes without dependencies.", [first, comm, replace(third, data=()),
            replace(fourth, data=(), control=())], "ET030"),
    }  # fmt: skip
    for name, (about, nodes, rule) in warned.items():
        kit.add(f"graph/{name}", about, [nodes, other], rule, check="warn")
    wide = [compute(1), *(compute(number, 1, micros=1) for number in range(2, 202))]
    wide.append(compute(202, *range(2, 202)))
    wide.append(collective(203, 202))
    shuffled = [*_chain(300), collective(301, 300)]
    random.shuffle(shuffled)
    high = [replace(node, id=node.id + _LARGEST - 5, data=tuple(_LARGEST - 5 + dep for dep in node.data),
        control=tuple(_LARGEST - 5 + dep for dep in node.control)) for node in other]  # fmt: skip
    long = [replace(first, name="n" * 100_000), comm, third, fourth]
    foreign = [replace(first, name="\u77e9\u9635\u4e58\u6cd5 \u00d7 \u2211"), comm, third, fourth]
    sound: Mapping[str, tuple[str, Sequence[TraceNode]]] = {
        "wide": ("A node with 200 dependents, and one with 200 dependencies.", wide),
        "chain": ("A chain of 3,000 nodes.", [*_chain(3000), collective(3001, 3000)]),
        "forward-references": ("300 nodes in random order.", shuffled),
        "large-ids": ("Ids up to 2^64 - 1.", high),
        "long-name": ("A name of 100,000 bytes.", long),
        "utf-8-name": ("A name with characters of three bytes.", foreign),
    }  # fmt: skip
    for name, (about, nodes) in sound.items():
        kit.add(f"graph/{name}", about, [nodes, other])


def add_files(kit: ConfiguredCases) -> None:
    """Add sets of rank files that are incomplete, or differ in their encoding."""
    ranks = [step() for _ in range(4)]
    whole, usual = trace(step()), counts_of_nodes(step())
    kit.add("files/rank-missing", "Rank 1 of 4 has no file.", ranks, "ET022", missing=[1])
    kit.add("files/last-ranks-missing", "2 files for a network of 4 ranks.", ranks[:2], "ET022",
            profile="astra-sim", network=network_text(4))  # fmt: skip
    kit.add("files/more-than-network", "4 files for a network of 2 ranks.", ranks, "ET022",
            profile="astra-sim", network=network_text(2))  # fmt: skip
    kit.add("files/one-empty", "The file of rank 3 is empty.", [whole, whole, whole, b""], "ET002",
            read="reject", check="reject", run="fail", counts=[usual] * 3 + [None])  # fmt: skip
    kit.add("files/mixed-gzip", "Files with and without gzip.", [whole, _gzip(whole)], counts=[usual] * 2)
