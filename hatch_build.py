"""Metadata of a build that depend on the project's address: hook of hatchling.

``HESPAS_REPOSITORY`` is the address, such as ``https://github.com/OWNER/NAME``. With it, the metadata have
project URLs, and the relative links of README.md lead to the files of the release's tag there. Without it,
the metadata have no URLs, and README.md is unchanged.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["ReleaseMetadataHook"]

_README = "README.md"
_ADDRESS = re.compile(r"https://[\w.-]+(?::\d+)?(?:/[\w.~-]+)+")
_FENCE_OR_LINK = re.compile(
    r"^```.*?^```$|(!?)(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+\))", re.MULTILINE | re.DOTALL
)


class ReleaseMetadataHook(MetadataHookInterface):
    """Hook that sets ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the fields, except those that a source archive has in its PKG-INFO."""
        address = os.environ.get("HESPAS_REPOSITORY", "").rstrip("/")
        if not address or (Path(self.root) / "PKG-INFO").is_file():
            metadata.setdefault("readme", _README)
            metadata.setdefault("urls", {})
            return
        if not _ADDRESS.fullmatch(address):
            raise ValueError(
                f"HESPAS_REPOSITORY is {address!r}: use an address such as https://HOST/OWNER/NAME"
            )
        files, pictures = (f"{address}/{kind}/v{metadata['version']}" for kind in ("blob", "raw"))

        def absolute(found: re.Match[str]) -> str:
            image, text, target = found.groups()
            return f"{image}{text}{pictures if image else files}/{target}" if target else found[0]

        readme = (Path(self.root) / _README).read_text(encoding="utf-8")
        text = _FENCE_OR_LINK.sub(absolute, readme)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {
            "Repository": address,
            "Documentation": f"{files}/docs/index.md",
            "Changelog": f"{files}/CHANGELOG.md",
            "Issues": f"{address}/issues",
        }
