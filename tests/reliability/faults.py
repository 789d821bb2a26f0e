"""Trains, saves and exports, and is killed or starved while it does: a script.

One process imports TensorFlow and starts none of it; each scenario is a fork of it.
test_faults.py runs it and reads the line of JSON that it prints last.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from linux import small_files

STEPS, SAVE_EVERY = 9, 3
WRITES = 5  # by each of two processes
ROWS, DIM = 300, 8


def make() -> Any:
    """An embedding with slots and a count of updates, of the same bits each time."""
    import tensorflow as tf

    import tpu_embedding as te

    films = te.TableConfig(ROWS, DIM, te.RowIdInitializer(), name="films")
    rate: Any = lambda step: 0.5 / tf.cast(step + 1, tf.float32)  # noqa: E731
    return te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.Adam(rate))


def train(embedding: Any, step: int) -> None:
    """One step; its data follow from its number."""
    import numpy as np
    import tensorflow as tf

    rng = np.random.default_rng(step)
    embedding.enqueue({"film": tf.constant(rng.integers(0, ROWS, [40, 3]))})
    activations = embedding.dequeue()
    embedding.apply_gradients({"film": tf.sin(activations["film"] + step)})


def digest(embedding: Any) -> str:
    """Of the bits of all that is saved."""
    values = variables(embedding)
    content = hashlib.sha256()
    for name in sorted(values):
        content.update(name.encode() + values[name].numpy().tobytes())
    return content.hexdigest()


def run(folder: pathlib.Path, before_step: Callable[[int], None], **save: Any) -> str:
    """Goes on from the last whole checkpoint to the last step; the digest."""
    from tpu_embedding import checkpoint

    embedding = make()
    embedding.build()
    saved = sorted(int(p.stem.split("-")[1]) for p in folder.glob("step-*.index"))
    first = saved[-1] if saved else 0
    if first:
        checkpoint.restore(embedding, folder / f"step-{first}")
    for step in range(first, STEPS):
        before_step(step)
        train(embedding, step)
        done = step + 1
        if done % SAVE_EVERY == 0:
            options = save if done == 2 * SAVE_EVERY else {}
            checkpoint.save(embedding, folder / f"step-{done}", **options)
    return digest(embedding)


def nothing(step: int) -> None:
    """No fault."""


def die(*_: Any) -> None:
    """As the kernel's own killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


class Killer:
    """Dies while a checkpoint is written."""

    def start(self, task: str, total: int) -> None:
        """Nothing is written yet."""

    advance = die


def unbroken(folder: pathlib.Path) -> str:
    return run(folder, nothing)


def killed_in_training(folder: pathlib.Path) -> str:
    return run(folder, lambda step: die() if step == SAVE_EVERY + 1 else None)


def killed_in_save(folder: pathlib.Path) -> str:
    return run(folder, nothing, progress=Killer())


def export(folder: pathlib.Path) -> str:
    """Writes a SavedModel, and says what it gives."""
    import tensorflow as tf

    import tpu_embedding as te

    embedding = make()
    train(embedding, 0)
    te.serving.export(embedding, folder / "model", signatures=["dense"])
    served = tf.saved_model.load(str(folder / "model")).signatures["dense"]
    values = served(film=tf.range(ROWS, dtype=tf.int64))["film"].numpy()
    (table,) = embedding.embedding_tables.values()
    assert (values == table.numpy()).all()
    return digest(embedding)


def killed_in_export(folder: pathlib.Path) -> str:
    """Dies as soon as the first file of the model is there."""
    parent = os.getpid()
    if os.fork() == 0:
        while not any(p.is_file() for p in (folder / "model").rglob("*")):
            time.sleep(0.001)
        os.kill(parent, signal.SIGKILL)
        os._exit(0)
    return export(folder)


def export_again(folder: pathlib.Path) -> str:
    """What a killed export left is refused or whole, never served half."""
    import shutil

    left = "refused" if _load_error(folder / "model") else "whole"
    if left == "whole":
        shutil.rmtree(folder / "model")
    export(folder)  # Into what is left of the other.
    return left


def export_to_full_disk(embedding: Any, model: pathlib.Path) -> None:
    """Files may have 4 KiB: an error, and no model; then there is room."""
    import tpu_embedding as te

    def write() -> None:
        te.serving.export(embedding, model, signatures=["dense"])

    with small_files():
        assert _error(write), "a full disk must be an error"
    assert not model.exists()
    write()
    assert _load_error(model) is None


def two_exporters(folder: pathlib.Path) -> str:
    """Two processes export to one path: one is told that the other was first."""
    import tensorflow as tf

    import tpu_embedding as te

    def write(embedding: Any) -> None:
        te.serving.export(embedding, model, signatures=["dense"])

    model, children = folder / "model", []
    for number in (1.0, 2.0):
        child = os.fork()
        if child == 0:
            embedding = make()
            fill(embedding, number)
            error = _error(lambda own=embedding: write(own))
            os._exit(0 if error is None else 3 if "not an empty folder" in error else 1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    served = tf.saved_model.load(str(model)).signatures["dense"]
    values = served(film=tf.range(ROWS, dtype=tf.int64))["film"].numpy()
    assert (values == 1.0 + codes.index(0)).all(), values
    return str(sorted(codes))


def full_disk(folder: pathlib.Path) -> str:
    """Files may have 4 KiB: the save fails, the training goes on."""
    from tpu_embedding import checkpoint

    embedding = make()
    errors = []
    for step in range(STEPS):
        train(embedding, step)
        if step == SAVE_EVERY:
            before = digest(embedding)
            with small_files():
                errors.append(
                    _error(lambda: checkpoint.save(embedding, folder / "full"))
                )
            assert digest(embedding) == before
            assert not (folder / "full.index").exists()
            checkpoint.save(embedding, folder / "full")
            export_to_full_disk(embedding, folder / "model")
    assert errors[0], "a full disk must be an error"
    again = make()
    checkpoint.restore(again, folder / "full")
    for step in range(SAVE_EVERY + 1, STEPS):
        train(again, step)
    assert digest(again) == digest(embedding)
    return digest(embedding)


def below_a_file(folder: pathlib.Path) -> str:
    """A folder that cannot be written: root may write all others."""
    import tpu_embedding as te
    from tpu_embedding import checkpoint

    (folder / "file").write_text("no folder")
    embedding = make()
    for step in range(STEPS):
        train(embedding, step)
    before = digest(embedding)
    path = folder / "file" / "saved"
    assert _error(lambda: checkpoint.save(embedding, path))
    assert _error(lambda: te.serving.export(embedding, path, signatures=["dense"]))
    assert digest(embedding) == before
    assert (folder / "file").read_text() == "no folder"
    return before


def no_rights(folder: pathlib.Path) -> str:
    """A read-only folder, for a user that is not root."""
    from tpu_embedding import checkpoint

    embedding = make()
    for step in range(STEPS):
        train(embedding, step)
    before = digest(embedding)
    read_only = folder / "read_only"
    read_only.mkdir()
    read_only.chmod(0o555)
    if os.getuid() == 0:
        os.seteuid(65534)
    error = _error(lambda: checkpoint.save(embedding, read_only / "saved"))
    if os.getuid() == 0:
        os.seteuid(0)
    assert error
    assert not any(read_only.iterdir())
    assert digest(embedding) == before
    return before


def no_memory(folder: pathlib.Path) -> str:
    """A batch that does not fit is refused, and the next one trained on."""
    import tensorflow as tf

    embedding = make()
    train(embedding, 0)
    before = digest(embedding)
    size = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    limit = size * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limits[1]))
    wide = tf.SparseTensor([[0, 0]], [1], [1 << 24, 2])
    error = _error(lambda: embedding.enqueue({"film": wide}))
    resource.setrlimit(resource.RLIMIT_AS, limits)
    assert error is not None
    assert "no memory left" in error or "OOM" in error, error
    assert digest(embedding) == before
    for step in range(1, STEPS):
        train(embedding, step)
    return digest(embedding)


def two_writers(folder: pathlib.Path) -> str:
    """Two processes save other values under one name; what is there is of one."""
    from tpu_embedding import checkpoint

    children = []
    for number in (1.0, 2.0):
        child = os.fork()
        if child == 0:
            save_often(folder, number)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    for attempt in range(WRITES):
        embedding = make()
        checkpoint.restore(embedding, folder / f"both-{attempt}")
        values = [v.numpy() for v in variables(embedding).values()]
        found = {float(v) for value in values for v in value.ravel()}
        assert len(found) == 1, found
        assert found <= {1.0, 2.0}, found
    return "whole"


def save_often(folder: pathlib.Path, number: float) -> None:
    """Checkpoints of `number` alone, each unless the other process was first."""
    from tpu_embedding import checkpoint

    embedding = make()
    fill(embedding, number)
    for attempt in range(WRITES):
        path = folder / f"both-{attempt}"
        _error(lambda path=path: checkpoint.save(embedding, path))


def fill(embedding: Any, number: float) -> None:
    """Puts one number into all that is saved."""
    for value in variables(embedding).values():
        value.assign(value.dtype.as_numpy_dtype(number) + 0 * value)


def variables(embedding: Any) -> Any:
    """All that is saved, by name."""
    embedding.build()
    return embedding.core.engine.checkpoint_variables()


def _error(call: Callable[[], Any]) -> str | None:
    """The text of the error that a call raises, or None."""
    import tensorflow as tf

    try:
        call()
    except (OSError, ValueError, tf.errors.OpError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _load_error(model: pathlib.Path) -> BaseException | None:
    """Why a folder is no model that can be served, or None."""
    import tensorflow as tf

    try:
        tf.saved_model.load(str(model)).signatures["dense"]
    except (OSError, tf.errors.OpError, KeyError, ValueError) as error:
        return error
    return None


SCENARIOS: list[tuple[str, Callable[[pathlib.Path], str]]] = [
    ("unbroken", unbroken),
    ("training", killed_in_training),
    ("training", unbroken),
    ("save", killed_in_save),
    ("save", unbroken),
    ("export", killed_in_export),
    ("export", export_again),
    ("full_disk", full_disk),
    ("below_a_file", below_a_file),
    ("no_rights", no_rights),
    ("no_memory", no_memory),
    ("two_writers", two_writers),
    ("two_exporters", two_exporters),
]


def main(folder: pathlib.Path) -> None:
    """Runs each scenario in a fork and prints what came of them."""
    # Imported once; no operation runs here, so that no thread is there to lose.
    import tensorflow as tf  # noqa: F401

    import tpu_embedding  # noqa: F401

    results = []
    for name, scenario in SCENARIOS:
        place = folder / name
        place.mkdir(exist_ok=True)
        place.chmod(0o777)
        answer = folder / "answer"
        answer.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            try:
                answer.write_text(scenario(place))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        text = answer.read_text() if answer.exists() else ""
        results.append((scenario.__name__, code, text))
    print(json.dumps(results))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
