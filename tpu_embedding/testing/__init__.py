"""Runs a TPU in software, a TPU's compiler and parameter servers on one machine."""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

from tpu_embedding.testing.compilation import CompileReport, StackReport, compile_step

if _typing.TYPE_CHECKING:
    from tpu_embedding.testing.local_servers import LocalServers
    from tpu_embedding.testing.strategy import SoftwareTPUStrategy

# These are imported when they are first used, because they import TensorFlow, which in
# an environment for `compile_step` needs the variables that `compile_step` sets.
_MODULES = {"LocalServers": "local_servers", "SoftwareTPUStrategy": "strategy"}

__all__ = [
    "CompileReport",
    "LocalServers",
    "SoftwareTPUStrategy",
    "StackReport",
    "compile_step",
]


def __getattr__(name: str) -> _typing.Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted(__all__)
