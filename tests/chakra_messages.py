"""Messages of a Chakra trace as classes of the protobuf library, the reference of the codec.

The classes live in a private descriptor pool, because the default one clashes with an installed Chakra.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from hespas.schemas.chakra.tables import GLOBAL_METADATA, NODE, MessageSpec, NodeType, ProtoKind

__all__ = ["ReferenceMessages", "reference_messages"]


@dataclass(frozen=True, slots=True)
class ReferenceMessages:
    """Message classes made at run time; their fields are unknown to type checkers, hence ``Any``."""

    node: Any
    metadata: Any


def reference_messages() -> ReferenceMessages:
    """The classes ``Node`` and ``GlobalMetadata``."""
    file = FileDescriptorProto(name="et_def.proto", package="et", syntax="proto3")
    enum = file.enum_type.add(name="NodeType")
    for member in NodeType:
        enum.value.add(name=member.name, number=member)
    for spec in (NODE, GLOBAL_METADATA):
        _add_message(file, spec)
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    make: Any = message_factory.GetMessageClass
    return ReferenceMessages(
        make(pool.FindMessageTypeByName("et.Node")), make(pool.FindMessageTypeByName("et.GlobalMetadata"))
    )


def _add_message(file: FileDescriptorProto, spec: MessageSpec) -> None:
    """Declare a message after those it contains."""
    if any(message.name == spec.name for message in file.message_type):
        return
    for field in spec.fields.values():
        if field.message is not None:
            _add_message(file, field.message)
    message = file.message_type.add(name=spec.name)
    if any(field.oneof for field in spec.fields.values()):
        message.oneof_decl.add(name="value")
    for field in spec.fields.values():
        entry = message.field.add(name=field.name, number=field.number)
        entry.label = entry.LABEL_REPEATED if field.repeated else entry.LABEL_OPTIONAL
        entry.type = entry.Type.Value(f"TYPE_{field.kind.proto.upper()}")
        if field.oneof:
            entry.oneof_index = 0
        if field.kind is ProtoKind.ENUM:
            entry.type_name = ".et.NodeType"
        elif field.message is not None:
            entry.type_name = f".et.{field.message.name}"
