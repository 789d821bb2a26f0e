"""How much memory a save and a restore take beside the tables themselves.

In processes of their own, for the peak of a process never falls. At full size:

    python tests/checkpoint/test_memory.py save /some/folder/model 2048
    python tests/checkpoint/test_memory.py restore /some/folder/model 2048
"""

from __future__ import annotations

import json
import pathlib
import resource
import subprocess
import sys
import tempfile

import pytest

MEBIBYTE = 1 << 20
DIM, NAMES = 64, ("films", "users")
CI_SIZE = 256  # MiB of tables and slots


def limit(size: int) -> float:
    """MiB above the start: tables and slots, a tenth of them, and 64."""
    return 1.1 * size + 64


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux


def measure(task: str, path: str, size: int) -> dict[str, float]:
    """The peak of building, training and saving or restoring, above the start."""
    import tensorflow as tf

    import tpu_embedding as te
    from tpu_embedding import checkpoint

    def make(rows: int) -> te.TPUEmbedding:
        features = {
            name: te.FeatureConfig(te.TableConfig(rows, DIM, name=name))
            for name in NAMES
        }
        embedding = te.TPUEmbedding(features, te.Adagrad(0.1))
        embedding.enqueue({name: tf.constant([1]) for name in NAMES})
        embedding.apply_gradients(embedding.dequeue())
        return embedding

    small = make(8)  # Whatever is loaded at a first use is loaded now.
    saved = checkpoint.save(small, tempfile.mkdtemp() + "/small")
    checkpoint.restore(small, saved)
    start = peak()
    # Each table has one slot of its size.
    embedding = make(size * MEBIBYTE // (4 * DIM * 2 * len(NAMES)))
    built = peak()
    if task == "save":
        checkpoint.save(embedding, path)
    else:
        checkpoint.restore(embedding, path)
    return {"built": built - start, "peak": peak() - start}


@pytest.mark.parametrize("engine", ["host", "portable"])
def test_memory(
    engine: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", engine)
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    for task in ("save", "restore"):
        arguments = [task, str(tmp_path / "model"), str(CI_SIZE)]
        output = subprocess.check_output([sys.executable, __file__, *arguments])
        used = json.loads(output.splitlines()[-1])
        assert CI_SIZE <= used["built"] <= used["peak"] <= limit(CI_SIZE), (task, used)


if __name__ == "__main__":
    used = measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(json.dumps({**used, "limit": limit(int(sys.argv[3]))}))
