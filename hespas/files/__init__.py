"""The shared floor for bytes: atomic output, bounded input, processes that contain native parsers."""
