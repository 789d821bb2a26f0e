"""Storage that fails in one process of a job is an error in all, which can go on."""

from __future__ import annotations

import pathlib

import pytest
from multi_process.jobs import Job

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
