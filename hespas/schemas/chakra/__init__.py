"""Chakra execution trace schema: ``et_def.proto`` for readers, :mod:`.tables` for the codec."""
