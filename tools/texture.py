"""Counts of unclear texts and names by kind, with their places.

    python -m tools.texture [--list N] [PATH ...]

``tests/test_texture.py`` limits each count. CONTRIBUTING.md describes the style to use instead.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Texture", "count_texture", "documents_of", "main"]

_ROOT = Path(__file__).parents[1]
_RELATIVE = frozenset({"what", "which", "who", "whom", "whose", "how", "whether", "where", "when", "why"})
_VAGUE = frozenset(
    {"each", "found", "place", "told", "said", "asked", "known", "stated", "kept", "hear", "stuck", "kin"}
    | {"beside", "telling", "likes"}
)
_IDIOMS = re.compile(
    r"\b(?:is|are|was|were|be|been|and) (?:told|said)\b"
    r"|\btells? (?:how|what|which|whether|that|of)\b"
    r"|\bsays? (?:what|which|whether|how|so|nothing)\b"
    r"|\b(?:is|are) no\b|\bis none\b|\bnobody\b"
    r"|\bbeside (?:it|them|each|one|that)\b"
    r"|\bstands? (?:in|for|beside|there|at)\b"
    r"|\bof (?:it|them|which|that) (?:an?|the|no|one)\b"
    r"|\btaken for\b|\bso (?:much|many|long) (?:as|for)\b|\bleft alone\b|\bhangs on\b|\bhas to do with\b"
    r"|\bwhat (?:of|is of)\b|\bthose of\b|\bno one (?:knows|reads|misses)\b"
    r"|\bwhat (?:it|they|an?|the) \w+ (?:says?|tells?|holds?|takes?)\b"
    r"|(?:\d|\}) (?:operations? )?(?:less|more):",
    re.IGNORECASE,
)
_FEWEST_WORDS = 4
"""Words of a string that is read as a sentence."""
_HEADER_LINES = 20
"""Lines at the top of a module in which a comment paragraph separates nothing."""
_SHARED_BY = 4
"""Files that define a class of one name before the name counts as too general."""


@dataclass(slots=True)
class Texture:
    """Counts and places of one tree: keys are the kinds, each place is ``file:line text``."""

    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict[str, list[str]](list))
    private_functions: int = 0
    assigned_names: int = 0
    docstrings: int = 0
    lines: int = 0
    files: int = 0

    def count(self, kind: str) -> int:
        """Return the number of places of a kind."""
        return len(self.places[kind])


def count_texture(package: Path, documents: Iterable[Path], root: Path) -> Texture:
    """Count the places of each kind in a package and in Markdown documents."""
    texture = Texture()
    owners: dict[str, set[str]] = defaultdict(set)
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        where = str(path.relative_to(root))
        tree = ast.parse(text)
        texture.files += 1
        texture.lines += text.count("\n")
        _count_tree(tree, text, where, texture)
        for line, first in _banners(text.split("\n")):
            texture.places["banner"].append(f"{where}:{line} {first}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                owners[node.name.lstrip("_")].add(where)
    for name, files in sorted(owners.items()):
        if len(files) >= _SHARED_BY:
            texture.places["class name"].append(f"{name} in {len(files)} files")
    for path in documents:
        for line, text in _prose(path.read_text(encoding="utf-8")):
            for match in _IDIOMS.finditer(text):
                where = f"{path.relative_to(root)}:{line}"
                texture.places["idiom in a document"].append(f"{where} {match[0]!r} in {text.strip()[:80]}")
    return texture


def _count_tree(tree: ast.Module, text: str, where: str, texture: Texture) -> None:
    used = Counter(re.findall(r"\b_[A-Za-z]\w*\b", text))
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Module():
                _count_docstring(node, where, texture)
            case ast.Constant(value=str(value)) if len(value.split()) >= _FEWEST_WORDS:
                if match := _IDIOMS.search(value):
                    excerpt = " ".join(value.split())[:80]
                    texture.places["idiom"].append(f"{where}:{node.lineno} {match[0]!r} in {excerpt}")
            case ast.Name(id=name, ctx=ast.Store()):
                texture.assigned_names += 1
                if name.strip("_") in _VAGUE:
                    texture.places["vague name"].append(f"{where}:{node.lineno} {name}")
            case _:
                pass
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(r"_(?!_)", node.name):
            texture.private_functions += 1
            if used[node.name] == 2:
                texture.places["one caller"].append(f"{where}:{node.lineno} {node.name}")


def _count_docstring(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module, where: str, texture: Texture
) -> None:
    docstring = ast.get_docstring(node)
    if not docstring:
        return
    texture.docstrings += 1
    first = re.search(r"[A-Za-z']+", docstring)
    if first and first[0].lower() in _RELATIVE:
        line = getattr(node, "lineno", 1)
        texture.places["relative docstring"].append(f"{where}:{line} {docstring.splitlines()[0][:80]}")


def _banners(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield line number and first line of each comment paragraph between two parts of a module."""
    row = 0
    while row < len(lines):
        if not (lines[row].startswith("# ") and row > _HEADER_LINES and not lines[row - 1]):
            row += 1
            continue
        end = row
        while end < len(lines) and lines[end].startswith("#"):
            end += 1
        if end < len(lines) and not lines[end]:
            yield row + 1, lines[row][:80]
        row = end


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each line outside code blocks."""
    in_code = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line


def main() -> None:
    """Print the counts, and the first places of each kind on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--list", type=int, default=0, metavar="N", help="print the first N places of each kind"
    )
    parser.add_argument("path", nargs="*", help="print only places in these files or folders")
    options = parser.parse_args()
    texture = count_texture(_ROOT / "hespas", documents_of(_ROOT), _ROOT)
    rows = [
        f"{texture.files} files, {texture.lines:,} lines, {texture.docstrings:,} docstrings",
        f"{texture.private_functions:,} private functions, {texture.assigned_names:,} assigned names",
    ]
    for kind in sorted(texture.places):
        chosen = [
            place
            for place in texture.places[kind]
            if not options.path or any(place.startswith(path) for path in options.path)
        ]
        rows.append(f"{kind}: {len(chosen):,}")
        rows += [f"  {place}" for place in chosen[: options.list]]
    sys.stdout.write("\n".join(rows) + "\n")


def documents_of(root: Path) -> list[Path]:
    """Return the Markdown documents of a checkout."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


if __name__ == "__main__":
    main()
