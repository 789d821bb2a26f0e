"""Deltas applied by programs that know nothing of this package."""

from __future__ import annotations

import os
import pathlib
import subprocess

import numpy as np
import pytest
from serving.deltas import Trainer
from serving.exported import c_program, graph_of

from tpu_embedding.serving import delta_files

HOT = 16  # Rows that each delta fills with its number.
THREADS = 8


def write_numbers(
    folder: pathlib.Path, storage: str, dim: int, deltas: int
) -> tuple[Trainer, list[str]]:
    """An export, and deltas that fill all rows with their numbers."""
    rng = np.random.default_rng(0)
    trainer = Trainer(folder / "base", rng, storage, {"films": (HOT, dim)}, 1.0)
    changed, paths = {"films": np.arange(HOT)}, []
    for number in range(1, deltas + 1):
        trainer.values["films"][:] = number
        path = folder / f"{number}.delta"
        delta_files.write_delta(path, trainer.header(changed), trainer.rows(changed))
        trainer.sequence, trainer.follows = number, trainer.run
        paths.append(str(path))
    return trainer, paths


@pytest.mark.third_tier
@pytest.mark.parametrize(("storage", "dim"), [("float32", 512), ("int8", 64)])
def test_a_c_program_applies_deltas_while_threads_read(
    storage: str, dim: int, tmp_path: pathlib.Path
) -> None:
    deltas = int(os.environ.get("TPU_EMBEDDING_TEST_DELTAS", "100"))
    trainer, paths = write_numbers(tmp_path, storage, dim, deltas)
    half = deltas // 2
    sent = [*paths[:half], paths[half - 1], paths[half + 1], *paths[half:]]
    signatures = graph_of(tmp_path / "base").signature_def
    apply, dense = signatures["apply_delta"], signatures["dense"]
    tensors = (
        apply.inputs["block"],
        apply.outputs["sequence"],
        dense.inputs["films"],
        dense.outputs["films"],
    )
    ran = subprocess.run(
        [
            str(c_program("follow_deltas.c", tmp_path)),
            str(tmp_path / "base"),
            *(tensor.name for tensor in tensors),
            *(str(HOT), str(THREADS), *sent),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    told, counts, values = lines[: len(sent)], lines[len(sent)], lines[len(sent) + 1 :]
    assert f"Delta {half} is repeated" in told.pop(half)
    assert f"Delta {half + 1} is missing" in told.pop(half)
    assert told == [str(number) for number in range(1, deltas + 1)]
    total, torn, back = map(int, counts.split())
    assert total > THREADS * HOT
    assert (torn, back) == (0, 0)
    found = np.array(values, np.float32).reshape(HOT, dim)
    np.testing.assert_array_equal(found, trainer.expected()["films"])
