"""What the import of the library says of a TF_CONFIG that no strategy can use."""

from __future__ import annotations

import json
from typing import Any

import new_process
import pytest

from tpu_embedding import cluster_config

TWO = ["localhost:1", "localhost:2"]


def config(cluster: Any, kind: str, index: Any) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", ""),
        ("{}", ""),
        (config({"worker": TWO}, "worker", 1), ""),
        (config({"worker": TWO}, "worker", "1"), ""),
        (config({"worker": {"3": "localhost:1"}}, "worker", 3), ""),
        (config({"worker": TWO}, "evaluator", 0), ""),
        (config({"chief": TWO[:1], "worker": TWO[1:]}, "chief", 0), ""),
        ("{", "cannot be read: JSONDecodeError"),
        ("[]", "cannot be read: AttributeError"),
        (config({"worker": TWO}, "worker", 2), "the index must be from 0 to 1"),
        (config({"worker": TWO}, "ps", 0), "type 'ps', but its \"cluster\" has 'work"),
        (
            config({"worker": TWO[:1] * 2}, "worker", 0),
            "worker 0 and worker 1 the same",
        ),
        (config({"worker": ["localhost"]}, "worker", 0), "must end with a port"),
    ],
)
def test_a_config_that_is_wrong_names_what(
    text: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    found = cluster_config.problem()
    assert problem in found
    assert bool(found) == bool(problem)


@pytest.mark.second_tier
def test_the_import_warns_before_tensorflow_starts() -> None:
    code = "import sys, tpu_embedding; print('tensorflow' in sys.modules)"
    wrong = {"TF_CONFIG": config({"worker": TWO}, "worker", 2)}
    done = new_process.run("-c", code, env=wrong, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
    assert 'TF_CONFIG of this process is wrong: its "task" has index 2' in done.stderr
