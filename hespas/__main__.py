"""The command ``hespas`` of this Python: ``python -m hespas``."""

from __future__ import annotations

from hespas.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
