"""The same bits for any number of threads, and the same tables on every engine."""

from __future__ import annotations

import pathlib

import forked
import numpy as np
import pytest
import tensorflow as tf

import tpu_embedding as te

# Many more rows and samples than one piece of work has, on three tables.
_SCRIPT = """
import hashlib, sys
import numpy as np
import tensorflow as tf
threads = int(sys.argv[1])
tf.config.threading.set_intra_op_parallelism_threads(threads)
tf.config.threading.set_inter_op_parallelism_threads(threads)
import tpu_embedding as te
rng = np.random.default_rng(7)
optimizers = [te.SGD(0.1), te.Adagrad(0.1, clipvalue=0.5), te.RowwiseAdagrad(0.1),
              te.AdagradMomentum(0.1, 0.9, True), te.FTRL(0.1), te.Adam(0.1),
              te.Adam(0.1, lazy_adam=False)]
dtypes = ("float32", "bfloat16", "int8")
tables = [te.TableConfig(3000, 24, te.RowIdInitializer(), optimizer, name=f"{dtype}{i}",
                         dtype=dtype)
          for dtype in dtypes for i, optimizer in enumerate(optimizers)]
grows = te.GrowingVocabulary(4000, eviction="lru", min_rows=1000)
tables += [te.TableConfig(grows, 24, None, optimizer, name=f"g{i}", dtype=dtypes[i % 3])
           for i, optimizer in enumerate(optimizers)]
embedding = te.TPUEmbedding([te.FeatureConfig(t) for t in tables for _ in "ab"], None)
digest = hashlib.sha256()
for _ in range(3):
    ids = [tf.constant(rng.integers(0, 3000, (700, 3))) for _ in tables for _ in "ab"]
    embedding.enqueue(ids)
    activations = embedding.dequeue()
    embedding.apply_gradients([tf.sin(a) for a in activations])
    for a in activations:
        digest.update(a.numpy().tobytes())
for table in embedding.variables.values():
    for variable in table.values():
        digest.update(variable.numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.second_tier
def test_bits_do_not_depend_on_threads(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    digests = set()
    for threads in (1, 2, 4):
        ran = forked.run([script, str(threads)], env={"TPU_EMBEDDING_ENGINE": "host"})
        assert ran.returncode == 0, ran.stderr
        digests.add(ran.stdout.split()[-1])
    assert len(digests) == 1


@pytest.mark.parametrize("initializer", [None, tf.random_uniform_initializer(seed=3)])
def test_tables_start_alike(
    initializer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []
    for engine in ("host", "portable"):
        monkeypatch.setenv("TPU_EMBEDDING_ENGINE", engine)
        devices = ["CPU:0", "CPU:1"] if engine == "host" else ["CPU:1"]
        for strategy in (
            tf.distribute.get_strategy(),
            tf.distribute.OneDeviceStrategy("CPU:1"),
            tf.distribute.MirroredStrategy(devices),
        ):
            tf.random.set_seed(5)
            with strategy.scope():
                table = te.TableConfig(30, 4, initializer)
                embedding = te.TPUEmbedding(te.FeatureConfig(table), te.Adagrad(0.1))
                starts.append(embedding.embedding_tables[table].numpy())
    assert len(np.unique(starts[0])) > 100
    for start in starts[1:]:
        np.testing.assert_array_equal(start, starts[0])
