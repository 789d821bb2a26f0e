"""`python -m tpu_embedding run SCRIPT`: a program for TPUs or for Keras, unchanged."""

from __future__ import annotations

import argparse
import functools
import sys

from tpu_embedding.commands.programs import prepare, status_of
from tpu_embedding.compat import drop_in


def install_keras() -> None:
    """Makes the Embedding layers and optimizers of Keras work by rows, and says so."""
    from tpu_embedding.keras.rows import converting  # Loads Keras.

    converting.convert_process()
    print(
        "tpu_embedding: in this process keras.layers.Embedding is te.keras.Embedding, "
        "and optimizers of Keras are in a te.keras.RowSparseOptimizer.",
        file=sys.stderr,
    )


def run(parsed: argparse.Namespace) -> int:
    """Runs `run`."""
    if parsed.keras and parsed.on != "host":
        raise ValueError(
            "`--on` has no effect with `--keras`, which trains tables on the script's "
            "own devices. Leave `--on` out, or leave `--keras` out for a program "
            "written for TPUs."
        )
    replace = install_keras
    if not parsed.keras:
        replace = functools.partial(drop_in.install_with_devices, parsed.on)
    program = prepare(parsed.script, parsed.arguments, replace, module=parsed.module)
    return status_of(program)
