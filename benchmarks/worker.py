"""One peer in a process of its own, timed on request.

    python -m benchmarks.worker PEER SCENARIO OPTIMIZER

`benchmarks.peers.PEER` has a RULE (what its update computes), and
`prepare(scenario, optimizer)` that returns a dict of functions, most often "lookup"
and "step"; each runs once and returns the seconds of one step. The worker lists
these functions. For each line that names one, it answers with the seconds of some runs
and of a cold run before them.
A peer that trains a whole model has "loss" beside them, which is called first.
An error is an answer, too: {"missing": why}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from benchmarks.scenarios import SCENARIOS
from benchmarks.timing import burst

_LONGEST = 200  # characters of a reason


def main() -> None:
    """Answers requests until standard input ends."""
    peer_name, scenario_name, optimizer = sys.argv[1:]
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(what: Any) -> None:
        answers.write(json.dumps(what) + "\n")

    try:
        peer = importlib.import_module(f"benchmarks.peers.{peer_name}")
        functions = peer.prepare(SCENARIOS[scenario_name], optimizer)
        loss = functions.pop("loss")() if "loss" in functions else None
        for function in functions.values():
            function()  # the first call traces and touches memory
        answer({"functions": list(functions), "rule": peer.RULE, "loss": loss})
        for line in sys.stdin:
            cold, seconds = burst(functions[line.strip()])
            answer({"cold": cold, "seconds": seconds})
    except Exception as error:  # A library may fail in any way.
        answer({"missing": why(error)})


def why(error: Exception) -> str:
    """Returns the reason in one line, for a table."""
    lines = str(error).replace("|", "/").splitlines() or [""]
    text = lines[0][:_LONGEST]
    if isinstance(error, ImportError):
        return f"not installed: {text} (make bench-peers)"
    if isinstance(error, NotImplementedError):
        return text
    return f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
