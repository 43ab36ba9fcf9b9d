"""Programs of JAX: lowered on a mesh of devices that nobody has."""
