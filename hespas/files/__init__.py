"""Access to files: atomic output, limited input, and child processes for native parsers."""
