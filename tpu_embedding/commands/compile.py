"""`python -m tpu_embedding compile MODULE:FUNCTION`."""

from __future__ import annotations

import argparse
import sys

from tpu_embedding.testing.compilation import compile_step


def run(arguments: argparse.Namespace) -> int:
    """Runs `compile`."""
    reports = [
        compile_step(arguments.build, topology, python=arguments.python)
        for topology in arguments.topology or ["v6e:2x2"]
    ]
    for report in reports:
        print(report.to_json() if arguments.json else f"{report}")
        if report.message not in report.problem:
            print(f"the compiler: {report.message[:2000]}", file=sys.stderr)
    return 0 if all(report.compiles for report in reports) else 1
