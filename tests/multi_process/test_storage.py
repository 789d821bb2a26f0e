"""Storage that fails in one process of a job is an error in all, which can go on."""

from __future__ import annotations

import pathlib

import pytest
import tensorflow as tf
from multi_process import storage
from multi_process.jobs import Job
from multi_process.training import Case

pytestmark = pytest.mark.second_tier

# By kind and culprit what each process raises; see storage.fail_to_save.
SAVES = {
    ("a file", 0): ("NotADirectoryError", "Process 0: NotADirectoryError"),
    ("full", 0): ("File too large", "Process 0: OutOfRangeError"),
    ("full", 1): ("Process 1: OutOfRangeError", "File too large"),
    ("Writing on", 1): ("No such file or directory", "Process 0: NotFoundError"),
}
RESTORES = {
    ("Restoring", 1): ("restore again", "restore again"),
    ("Restoring on", 1): ("Process 1: OSError: cannot be read", "cannot be read"),
}


@pytest.mark.parametrize(
    ("function", "cases"), [("fail_to_save", SAVES), ("fail_to_restore", RESTORES)]
)
def test_all_processes_raise_the_cause(
    two: Job, tmp_path: pathlib.Path, function: str, cases: dict
) -> None:
    for number, ((kind, culprit), texts) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = two.run(f"storage.{function}", str(folder), kind, culprit)
        for (raised, text, seconds), expected in zip(found, texts, strict=True):
            assert expected in f"{raised}: {text}", (kind, culprit, raised, text)
            assert seconds < 30, (kind, culprit)  # Nobody waits for `timeout_seconds`.


@pytest.mark.parametrize("tracked", [False, True])
def test_damaged_rows_of_int8_change_nothing(
    two: Job, tmp_path: pathlib.Path, tracked: bool
) -> None:
    """A bit of the codes or of the scales, and a cut; in a job and in one process."""
    case = Case("rowwise", dtype="int8", dims=(16, 37, 20), placement="rows")
    path = str(tmp_path / "saved")
    stored = two.run("save", case, path)[0]
    one = tf.distribute.get_strategy()

    def restore() -> list[tuple[str, str, bool]]:
        own = storage.restore_damaged(one, case, path, tracked)
        return [own, *two.run("storage.restore_damaged", case, path, tracked)]

    for array in ("table0/parameters", "table0/scale_offset", None):
        wanted = stored[array or "table0/parameters"].tobytes()
        (file,) = (f for f in tmp_path.glob("saved.data*") if wanted in f.read_bytes())
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[content.index(wanted) + 7] ^= 4
        file.write_bytes(damaged if array else content[:-3])
        of_tensorflow = "DataLossError" if array else "OutOfRangeError"
        for kind, text, is_same in restore():
            assert kind == (of_tensorflow if tracked else "DataLossError")
            assert tracked or f"The checkpoint file {path} is damaged: " in text
            assert is_same, (array, text)
        file.write_bytes(content)
    assert restore() == [("", "", False)] * 3
