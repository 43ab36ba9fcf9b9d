"""Chakra execution trace schema: ``et_def.proto`` for readers, :mod:`.tables` for the codec, and what they
were before in :mod:`.history`.
"""
