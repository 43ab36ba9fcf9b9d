"""Perfetto's trace packets, as far as device timelines need them: :mod:`.tables`."""
