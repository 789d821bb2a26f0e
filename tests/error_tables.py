"""Tables of errors: by type what an error says, and what raises it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

ErrorTable = dict[type[Exception], dict[str, Any]]


def each_error(table: ErrorTable) -> pytest.MarkDecorator:
    """Runs a test for each entry, as `error`, `text` and `bad`."""
    rows = [
        (e, text, bad) for e, of_type in table.items() for text, bad in of_type.items()
    ]
    # Texts may hold addresses, which differ between pytest's workers.
    ids = [
        f"{n}-{re.sub('0x[0-9a-f]+', '', text)[:50]}"
        for n, (_, text, _) in enumerate(rows)
    ]
    return pytest.mark.parametrize(("error", "text", "bad"), rows, ids=ids)


def check_error(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """Requires that the call raises just this type, with the text in its message."""
    with pytest.raises(error, match=re.escape(text)) as raised:
        call()
    assert type(raised.value) is error
