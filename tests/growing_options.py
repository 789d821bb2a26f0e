"""The options of growing tables of the NumPy reference, as the package takes them."""

from __future__ import annotations

import dataclasses
from typing import Any

from reference import growing

import tpu_embedding as te


def vocabulary_of(options: growing.Options, **others: Any) -> te.GrowingVocabulary:
    arguments = dataclasses.asdict(options)
    if options.eviction is None:
        arguments["min_rows"] = None
    if options.eviction != "age":
        arguments["max_age"] = None
    if options.min_count == 1:
        arguments["max_candidates"] = None
    return te.GrowingVocabulary(**arguments, **others)
