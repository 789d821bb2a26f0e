"""`python -m tpu_embedding run`: TPU programs run unchanged, with these figures."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding import drop_in

PROGRAMS = pathlib.Path(__file__).parents[1] / "examples" / "drop_in"
FIGURES = [
    ("queue_loop.py", "v4:2", "loss 0.665679 served 4.375109"),
    ("sparse_core.py", "v6e:2", "loss 56.500000 to 5.33907"),
    ("estimator.py", "host", "loss 0.70"),
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize(("program", "on", "figure"), FIGURES)
def test_programs_reach_their_figures(program: str, on: str, figure: str):
    done = run("-m", "tpu_embedding", "run", "--on", on, str(PROGRAMS / program))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith(figure)
    assert done.stderr.count("these names are those of tpu_embedding") == 1
    assert f"on {on}, " in done.stderr


def test_nothing_is_replaced_unless_asked():
    assert tf.tpu.experimental.embedding.TPUEmbedding is not te.TPUEmbedding
    assert tf.distribute.TPUStrategy is not drop_in.TPUStrategy
    assert not hasattr(tf, "estimator")


PROGRAM = """
import sys
import tensorflow as tf
import tpu_embedding as te
te.install("mirrored:2")
te.install("mirrored:2")
assert tf.compat.v2.tpu.experimental.embedding.TPUEmbedding is te.TPUEmbedding
strategy = tf.distribute.TPUStrategy()
assert strategy.num_replicas_in_sync == 2
assert isinstance(strategy, tf.distribute.TPUStrategy)
assert strategy is tf.distribute.experimental.TPUStrategy(None)
resolver = tf.distribute.cluster_resolver.TPUClusterResolver("grpc://10.0.0.1")
assert resolver.num_accelerators() == {"TPU": 2}
for refused in (
    lambda: tf.distribute.TPUStrategy(experimental_spmd_xla_partitioning=True),
    lambda: tf.tpu.experimental.initialize_tpu_system(resolver).mesh_shape,
    lambda: tf.estimator.Estimator,
    lambda: te.install("v4:2"),
):
    try:
        refused()
    except (NotImplementedError, AttributeError, RuntimeError) as error:
        print(error)
"""


def test_what_is_not_carried_is_refused_by_name(tmp_path: pathlib.Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(str(tmp_path / "program.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert "TPUStrategy(experimental_spmd_xla_partitioning=...)" in lines[0]
    assert "`mesh_shape` of a TPU topology" in lines[1]
    assert "tensorflow.estimator.Estimator: TensorFlow has removed" in lines[2]
    assert "names were installed for 'mirrored:2'" in lines[3]


@pytest.mark.parametrize("on", ["", "tpu", "v4", "mirrored:0", "v9:2", "host:2"])
def test_places_that_do_not_exist(on: str):
    with pytest.raises(ValueError, match='`on` must be "host", '):
        te.install(on)


def test_scripts_have_their_own_arguments_and_errors(tmp_path: pathlib.Path):
    (tmp_path / "beside.py").write_text("NUMBER = 3")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside\nprint(__name__, beside.NUMBER, sys.argv[1:])\n"
        "raise ValueError('mine')"
    )
    done = run("-m", "tpu_embedding", "run", str(script), "--on", "x", "-v")
    assert done.stdout.splitlines() == ["__main__ 3 ['--on', 'x', '-v']"]
    assert "script.py" in done.stderr
    assert done.stderr.splitlines()[-1] == "ValueError: mine"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import tensorflow as tf", False),
        ("import tf_keras", True),
        ("from tensorflow_recommenders.layers import embedding", True),
        ("from package import model", True),
        ("import package.model", True),
        ("import package", False),
    ],
)
def test_scripts_that_need_tf_keras(text: str, expected: bool, tmp_path: pathlib.Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "model.py").write_text("import tensorflow_recommenders")
    script = tmp_path / "script.py"
    script.write_text(text)
    assert drop_in.needs_tf_keras(script) is expected
