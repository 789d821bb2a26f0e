"""Runs the tests of this folder in a process of their own, one for all of them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator

import pytest
from multi_process.jobs import PACKAGE, TESTS, Failure, Process


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[Process]:
    path = os.pathsep.join([str(TESTS), str(PACKAGE)])
    process = Process({"PYTHONPATH": path}, "parameter_servers.process")
    yield process
    process.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Calls the test there, with its parameters and fixtures, which are pickled."""
    names = inspect.signature(pyfuncitem.function).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    process = pyfuncitem.funcargs["cluster"]
    module = pyfuncitem.path.stem
    process.send(f"{module}.{pyfuncitem.originalname}", (arguments,))
    result = process.receive(timeout=240.0)
    if isinstance(result, Failure):
        pytest.fail(f"{result}\n{process.printed()}", pytrace=False)
    return True
