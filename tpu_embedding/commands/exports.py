"""`python -m tpu_embedding place | delta inspect | delta apply`: exported models."""

from __future__ import annotations

import argparse

from tpu_embedding.serving.delta_files import Header, apply_to_export, read_header
from tpu_embedding.serving.mapping import place
from tpu_embedding.text import aligned


def run_place(arguments: argparse.Namespace) -> int:
    """Runs `place`."""
    for file in place(arguments.path, verify=not arguments.no_verify):
        print(file)
    return 0


def inspect_delta(arguments: argparse.Namespace) -> int:
    """Runs `delta inspect`."""
    print(_described(read_header(arguments.path)))
    return 0


def _described(header: Header) -> str:
    lines = [("table", "dim", "storage", "changed", "deleted")]
    for table, (upserts, deletions) in zip(
        header.base.tables, header.counts, strict=True
    ):
        numbers = f"{upserts:,}", f"{deletions:,}"
        lines.append((table.name, str(table.dim), table.storage, *numbers))
    return "\n".join(
        [
            f"delta {header.sequence} of export {header.base.id}",
            f"written by run {header.run}, after run {header.follows}",
            aligned(lines, left=(0,)),
        ]
    )


def apply_deltas(arguments: argparse.Namespace) -> int:
    """Runs `delta apply`."""
    sequence = apply_to_export(arguments.path, arguments.deltas, arguments.to)
    print(f"Wrote to {arguments.to}: the export after delta {sequence}")
    return 0
