"""The command line: `python -m tpu_embedding COMMAND ...`.

A command is a row in `_COMMANDS`: a name, a line of help, and a function that adds
arguments to a parser and sets its default `run`, which gets the arguments and returns
the exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import tensorflow as tf

from tpu_embedding import drop_in, parameter_server, trial
from tpu_embedding.checkpoint import command_line as checkpoint
from tpu_embedding.checkpoint import page
from tpu_embedding.planning import command_line as planning
from tpu_embedding.serving import applying, mapping
from tpu_embedding.testing import compilation

_AddArguments = Callable[[argparse.ArgumentParser], None]

_COMMANDS: tuple[tuple[str, str, _AddArguments], ...] = (
    (
        "checkpoint",
        "inspect and convert checkpoints",
        checkpoint.add_arguments,
    ),
    (
        "delta",
        "inspect deltas, and apply them to an export",
        applying.add_arguments,
    ),
    (
        "place",
        "tell an export with mapped tables where it is",
        mapping.add_arguments,
    ),
    (
        "report",
        "draw a page of the tables of a checkpoint",
        page.add_arguments,
    ),
    (
        "run",
        "run a program written for TPUs or for Keras, unchanged",
        drop_in.add_arguments,
    ),
    (
        "try",
        "run a Keras program as it is and by rows, and compare",
        trial.add_arguments,
    ),
    (
        "server",
        "run the parameter server or worker that TF_CONFIG names",
        lambda parser: parser.set_defaults(run=lambda _: parameter_server.serve()),
    ),
    (
        "plan",
        "say where tables fit: memory, limits, traffic and balance",
        planning.add_arguments,
    ),
    (
        "compile",
        "compile a training step for a TPU that is not there",
        compilation.add_arguments,
    ),
)
# Errors that a user can fix, beside TensorFlow's; others are shown with a traceback.
_EXPECTED = (ValueError, TypeError, NotImplementedError, RuntimeError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      arguments: Those of the command line, or None for this process's.

    Returns:
      The exit code: 0, or 2 after an error, which is printed to stderr.
    """
    parser = argparse.ArgumentParser(prog="python -m tpu_embedding")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, help_, add_arguments in _COMMANDS:
        add_arguments(commands.add_parser(name, help=help_))
    parsed = parser.parse_args(arguments)
    try:
        return parsed.run(parsed)
    except tf.errors.OpError as error:
        print(f"error: {error.message}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyError as error:
        print(f"error: {error.args[0] if error.args else 'KeyError'}", file=sys.stderr)
    except _EXPECTED as error:
        print(f"error: {str(error) or type(error).__name__}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
