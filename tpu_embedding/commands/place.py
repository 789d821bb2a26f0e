"""`python -m tpu_embedding place EXPORT`."""

from __future__ import annotations

import argparse

from tpu_embedding.serving.mapping import place


def run(arguments: argparse.Namespace) -> int:
    """Runs `place`."""
    for file in place(arguments.path, verify=not arguments.no_verify):
        print(file)
    return 0
