"""Figures of docs/verification.md that follow from the tests agree with them."""

from __future__ import annotations

import pathlib

import optimizer_cases
from cpu_engines import EACH_ENGINE
from reliability import bad_calls, test_bad_input, test_bad_input_tpus, test_numbers
from reliability.bad_inputs import BY_TYPE, BY_VALUE

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "verification.md"


def test_figures() -> None:
    text = DOCS.read_text()
    inputs = len(BY_VALUE) + len(BY_TYPE)
    entries, engines = test_bad_input.ENTRIES, len(EACH_ENGINE)
    calls = engines * sum(len(test_bad_input.cases_of(entry)) for entry in entries)
    eager, traced = len(test_bad_input_tpus.EAGER), len(test_bad_input_tpus.TRACED)
    off = [(e, a) for e in test_bad_input.STRUCTURED for a in test_bad_input.ARGUMENTS]
    off = engines * (len(off) - 1)  # Serving takes any part of the features.
    on = [entry for own in test_bad_input_tpus.STRUCTURED.values() for entry in own]
    nested = len(bad_calls.NESTINGS) * (off + len(on) * len(test_bad_input.ARGUMENTS))
    places = len(test_bad_input.STRUCTURED) + len(on)
    rules, optimizers = len(optimizer_cases.OPTIMIZERS), len(test_numbers.OPTIMIZERS)
    for figures in (
        f"{inputs} inputs, {len(entries)} entry points, {engines} engines",
        f"{calls} refused calls",
        f"in graphs {traced} of them: {2 * eager + 3 * traced} refused calls",
        f"{nested} refused calls at {places} entry points",
        f"every rule, and {optimizers - rules} of them with other options",
    ):
        assert figures in text, figures
