"""One peer in a process of its own, timed on request.

    python -m benchmarks.worker PEER SCENARIO OPTIMIZER

`benchmarks.peers.PEER` has a RULE (what its update computes), and
`prepare(scenario, optimizer)` that returns a dict of functions, "lookup" and
"step" or some of them; each runs once and returns the seconds of one step. The
worker says which are there, then answers each line "lookup" or "step" with the
seconds of some runs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from benchmarks.scenarios import SCENARIOS
from benchmarks.timing import burst


def main() -> None:
    """Answers requests until standard input ends."""
    peer_name, scenario_name, optimizer = sys.argv[1:]
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        peer = importlib.import_module(f"benchmarks.peers.{peer_name}")
        functions = peer.prepare(SCENARIOS[scenario_name], optimizer)
    except (ImportError, NotImplementedError) as error:
        answers.write(json.dumps({"missing": str(error)}) + "\n")
        return
    for function in functions.values():
        function()  # the first call traces and touches memory
    ready = {"functions": list(functions), "rule": peer.RULE}
    answers.write(json.dumps(ready) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(burst(functions[line.strip()])) + "\n")


if __name__ == "__main__":
    main()
