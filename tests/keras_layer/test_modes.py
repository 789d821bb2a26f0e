"""What a call of the layer does, without a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tpu_embedding.keras.layer_tables import Mode, mode

OPTIONS = ("recording", "trainable", "in_program", "in_replica", "exportable")
# The values of these options; None stands for both.
CASES = [
    ((True, True, None, None, None), Mode.TRAIN),
    ((True, False, None, None, None), Mode.LOOK),
    ((False, None, True, None, None), Mode.LOOK),  # A TPU program cannot be exported.
    ((False, None, False, True, False), Mode.LOOK),  # Eager calls, and `evaluate`.
    ((False, None, False, True, True), Mode.SERVE),  # A function that is exported.
    ((False, None, False, False, None), Mode.SERVE),  # Outside of all replicas.
]


def every(values: tuple[bool | None, ...]) -> Iterator[tuple[bool, ...]]:
    return itertools.product(*((False, True) if v is None else (v,) for v in values))


@pytest.mark.parametrize(("values", "expected"), CASES)
def test_modes(values: tuple[bool | None, ...], expected: Mode) -> None:
    for own in every(values):
        assert mode(**dict(zip(OPTIONS, own, strict=True))) is expected, own


def test_cases_are_complete() -> None:
    found = [own for values, _ in CASES for own in every(values)]
    assert sorted(found) == sorted(every((None,) * len(OPTIONS)))
