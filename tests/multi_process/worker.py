"""One process of a job: calls functions that `jobs.Job` names."""

from __future__ import annotations

import importlib
import os
import pickle
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import tensorflow as tf


def serve(call: Callable[..., Any]) -> None:
    """Answers requests, on the pipes that are the arguments of this process."""
    pipes = zip(sys.argv[1:3], ("rb", "wb"), strict=True)
    requests, replies = (os.fdopen(int(number), mode) for number, mode in pipes)
    while head := requests.read(8):
        number, function, arguments = pickle.loads(
            requests.read(*struct.unpack("q", head))
        )
        begin = time.monotonic()
        result: Any
        try:
            result = call(function, *arguments)
        except Exception as error:
            from multi_process.jobs import Failure

            traceback.print_exc()
            seconds = time.monotonic() - begin
            text = getattr(error, "message", None) or str(error)
            result = Failure(type(error).__name__, text, seconds)
        content = pickle.dumps((number, result))
        replies.write(struct.pack("q", len(content)) + content)
        replies.flush()


def main() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def call(function: str, *arguments: Any) -> Any:
        # Imported after the strategy is made: it may start TensorFlow.
        module, _, name = function.rpartition(".")
        calls = importlib.import_module(f"multi_process.{module or 'calls'}")
        return getattr(calls, name)(strategy, *arguments)

    serve(call)


if __name__ == "__main__":
    main()
    os._exit(0)  # Leaving a job in order would wait for the others.
