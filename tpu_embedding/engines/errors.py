"""The wording of this package's errors: each function returns the exception."""

from __future__ import annotations


def no_engine(engine: str, generation: str) -> NotImplementedError:
    """A TPU whose engine is not there, or that has none."""
    return NotImplementedError(
        f"This release has no embedding engine {engine!r}, which {generation} would "
        "need. Code written for TPUStrategy runs on this machine's CPU when it is "
        "built outside the strategy's scope, or under OneDeviceStrategy or "
        "MirroredStrategy."
    )
