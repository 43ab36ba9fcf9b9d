"""The formats' own definitions: field numbers, enumerations and schemas. No logic."""
