"""The documents, and the scripts that keep their figures true."""
