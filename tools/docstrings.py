"""An extension of griffe that prepares docstrings for the API reference."""

from __future__ import annotations

from typing import Any

import griffe  # pyright: ignore[reportMissingImports] - an extra, docs.


class FenceExamples(griffe.Extension):
    """Makes code blocks of doctests, which Markdown takes for quotations."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of each object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Puts each doctest of a docstring, up to an empty line, into fences."""
    lines: list[str] = []
    indent = None  # Of the doctest that the line is in.
    for line in [*text.splitlines(), ""]:
        if indent is None and line.lstrip().startswith(">>> "):
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}```pycon")
        elif indent is not None and not line.strip():
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    return "\n".join(lines[:-1])
