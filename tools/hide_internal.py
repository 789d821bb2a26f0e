"""An extension of griffe: leaves what is internal out of the API reference.

A method or property of a public class is internal, and may change without notice, if
its docstring begins with "Internal: ". Other modules need it, and users do not.
"""

from __future__ import annotations

from typing import Any

import griffe  # pyright: ignore[reportMissingImports] - an extra, docs.

MARK = "Internal: "


class HideInternal(griffe.Extension):
    """Removes the internal members of each class after it is loaded."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Removes members whose docstring begins with the mark."""
        for name, member in list(cls.members.items()):
            docstring = None if member.is_alias else member.docstring
            if docstring is not None and docstring.value.startswith(MARK):
                cls.del_member(name)
