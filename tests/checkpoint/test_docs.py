"""The examples of docs/checkpoints.md, run one after another."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "checkpoints.md"


def test_examples(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(block, scope)  # noqa: S102 - our own page.
    assert len(blocks) == 5
    assert (tmp_path / "sharded.index").exists()
