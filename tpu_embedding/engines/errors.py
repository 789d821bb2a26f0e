"""Errors that several engines raise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def in_control_flow() -> RuntimeError:
    """Enqueue in a part of a TPU program."""
    return RuntimeError(
        "A batch was given to enqueue, or to a layer, inside control flow or a "
        "tf.function inside strategy.run, where a TPU program cannot take it in. Call "
        "it at the top of the function given to strategy.run, or outside of "
        "strategy.run."
    )


@contextlib.contextmanager
def function_of(table: str, what: str) -> Iterator[None]:
    """Notes on what a function of the user's raises inside whose function it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"That is from the function of the {what} of table {table!r}.")
        raise
