"""Fingerprints of initializers depend on the program, not on the process."""

from __future__ import annotations

import functools
import json

import fingerprints
from new_process import printed_by

from tpu_embedding.engines.host import processes

# A process that has made more objects than others.
PRINT = """
import json, sys
import fingerprints, tensorflow as tf
from tpu_embedding.engines.host import processes
process = int(sys.argv[1])
kept = [(object(), tf.keras.layers.Dense(1)) for _ in range(process)]
found = fingerprints.alike(process)
print(json.dumps({n: processes.text_of_initializer(i) for n, i in found.items()}))
"""


def test_initializers_that_differ_have_different_texts() -> None:
    zeros, ones = fingerprints.differing(0.0), fingerprints.differing(1.0)
    for name, initializer in zeros.items():
        text = processes.text_of_initializer(initializer)
        assert text != processes.text_of_initializer(ones[name]), name
        assert len(text) < 300


class Initializer:
    """Its configuration has a function that exists only while it is read."""

    def __init__(self, value: float) -> None:
        self._value = value

    def get_config(self) -> dict[str, object]:
        value = self._value
        return {"rule": lambda: value}


def test_each_function_is_read_although_those_before_it_are_gone() -> None:
    def text(*values: float) -> str:
        made = [Initializer(value) for value in values]
        return processes.text_of_initializer(functools.partial(len, made))

    assert text(0.0, 1.0, 2.0, 3.0) != text(0.0, 1.0, 2.0, 4.0)


def test_processes_of_one_program_have_the_same_texts() -> None:
    printed = []
    for process in range(2):
        seed = {"PYTHONHASHSEED": str(process + 1)}
        lines = printed_by("-c", PRINT, str(process), env=seed).splitlines()
        printed.append(json.loads(lines[-1]))
    assert printed[0] == printed[1]
    assert not any("0x" in text for text in printed[0].values())
