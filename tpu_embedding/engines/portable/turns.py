"""One eager call at a time: the ledger is read, then written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Owner = TypeVar("_Owner", bound=Any)


def in_turn(
    method: Callable[Concatenate[_Owner, _Arguments], _Result],
) -> Callable[Concatenate[_Owner, _Arguments], _Result]:
    """Makes threads wait for each other's eager calls of an object's methods.

    What a tf.function runs later is out of reach: Python is not there any more.
    """

    @functools.wraps(method)
    def call(
        self: _Owner, *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        with self._turn:
            return method(self, *arguments, **named)

    return call
