"""Random histories: calls of a system and of a slow model of it, which are compared.

A machine is a subclass of `RandomHistory`. It draws a configuration and makes both
sides of it; each method of `chances` makes a call on both and compares. `run` makes
calls and shows them in an error; `fuzz` makes many histories, and `main` a program.
"""

from __future__ import annotations

import abc
import argparse
import collections
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te


class RandomHistory(abc.ABC):
    """A system, a model of it, and in `calls` what happened to both."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.calls: list[str] = []
        self.counts = collections.Counter[str]()

    @abc.abstractmethod
    def chances(self) -> dict[str, float]:
        """What may be called now, a method and its arguments, and how often it is."""

    @abc.abstractmethod
    def check(self) -> None:
        """Compares all that both sides hold."""

    def step(self) -> None:
        """Makes a call that is drawn."""
        chances = self.chances()
        shares = np.array([*chances.values()], float)
        self.call(str(self.rng.choice([*chances], p=shares / shares.sum())))

    def call(self, call: str) -> None:
        """Makes a call, "train 3" for example."""
        self.calls.append(call)
        self.counts[call] += 1
        method, *arguments = call.split()
        getattr(self, method)(*arguments)

    def run(self, steps: int) -> None:
        """Makes so many calls, then compares everything."""
        try:
            for _ in range(steps):
                self.step()
            self.check()
        except BaseException as error:
            error.add_note(f"{self}: {', '.join(self.calls)}")
            raise


def write(rng: np.random.Generator, embedding: Any, path: str) -> str:
    """Writes a checkpoint of the package or of TensorFlow."""
    if rng.integers(2):
        return te.checkpoint.save(embedding, path)
    return tf.train.Checkpoint(embedding=embedding).write(path)


def read(rng: np.random.Generator, embedding: Any, path: str) -> None:
    """Reads what `write` wrote, in either way."""
    if rng.integers(2):
        te.checkpoint.restore(embedding, path)
    else:
        status = tf.train.Checkpoint(embedding=embedding).read(path)
        status.assert_existing_objects_matched()


def fuzz(
    make: Callable[[np.random.Generator], RandomHistory],
    histories: int,
    steps: int,
    seed: int,
) -> collections.Counter[str]:
    """Runs histories of so many steps; how often what happened."""
    counts = collections.Counter[str]()
    for number in range(histories):
        history = make(np.random.default_rng([seed, number]))
        history.run(steps)
        counts += history.counts
    return counts


def main(run: Callable[..., collections.Counter[str]], **defaults: int | str) -> None:
    """Calls `run` with its arguments of the command line, and with a seed."""
    import conftest  # noqa: F401 - makes logical devices, before TensorFlow starts

    parser = argparse.ArgumentParser(description=run.__doc__)
    for name, value in {**defaults, "seed": int(time.time())}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    print(arguments, flush=True)
    for what, number in sorted(run(**arguments).items()):
        print(f"{what}: {number:,}")
    print("0 differences", flush=True)
