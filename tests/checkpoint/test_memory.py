"""How much memory tables, their saves and restores take.

Each runs in its own process, because the peak of a process never falls. Full size:

    PYTHONPATH=tests python tests/checkpoint/test_memory.py /some/folder/model 2048
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import pytest
from linux import status
from new_process import printed_by

MEBIBYTE = 1 << 20
DIM, NAMES = 64, ("films", "users")
CI_SIZE = 128  # MiB of tables and slots


def limit(size: int) -> float:
    """MiB above the start: tables and slots, a tenth of them, and 64."""
    return 1.1 * size + 64


def peak() -> float:
    # Not ru_maxrss: a process begins with that of the process that started it.
    return status("VmHWM") / MEBIBYTE


def measure(path: str, size: int) -> dict[str, float]:
    """The peaks after each task in MiB, above the start."""
    import tensorflow as tf

    import tpu_embedding as te
    from tpu_embedding import checkpoint

    def make(rows: int, names: tuple[str, ...] = NAMES) -> te.TPUEmbedding:
        features = {
            name: te.FeatureConfig(te.TableConfig(rows, DIM, name=name))
            for name in names
        }
        # Each of two tables has one slot of its size, a single one none.
        optimizer = te.Adagrad(0.1) if len(names) > 1 else te.SGD(0.1)
        embedding = te.TPUEmbedding(features, optimizer)
        embedding.enqueue({name: tf.constant([1]) for name in names})
        embedding.apply_gradients(embedding.dequeue())
        return embedding

    small = make(8)  # Whatever is loaded at a first use is loaded now.
    saved = checkpoint.save(small, tempfile.mkdtemp() + "/small")
    checkpoint.restore(small, saved)
    rows = size * MEBIBYTE // (4 * DIM * 2 * len(NAMES))
    start = peak()
    alone = make(rows, NAMES[:1])
    bare = peak() - start
    start = peak()
    embedding = make(rows)
    built = peak()
    checkpoint.save(embedding, path)
    saved = peak()
    checkpoint.restore(embedding, path)
    del alone  # Until here it kept its memory from the others.
    return {
        "bare": bare,
        "build": built - start,
        "save": saved - start,
        "restore": peak() - start,
        "limit": limit(size),
    }


@pytest.mark.second_tier
def test_memory(tmp_path: pathlib.Path) -> None:
    printed = printed_by(__file__, tmp_path / "model", str(CI_SIZE))
    used = json.loads(printed.splitlines()[-1])
    # The tables are in memory indeed; a part of it may have been there at the start.
    assert used["build"] > 0.9 * CI_SIZE, used
    assert max(used.values()) == used["limit"], used
    # Nor do initial values take memory beside their table.
    assert used["bare"] < 1.1 * CI_SIZE / 4 + 2, used


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
