"""Model.fit of tf_keras under the strategies of several machines."""

from __future__ import annotations

import pathlib

import new_process
import numpy as np
from multi_process import tf_keras_fit
from multi_process.jobs import Job
from replica_values import mirrored


def test_workers_train_as_two_replicas_of_one_process() -> None:
    strategy = mirrored(2)
    losses, loss, tables = tf_keras_fit.fit(strategy)
    with Job(2) as job:
        for own_losses, own_loss, own_tables in job.run("tf_keras_fit.fit"):
            np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
            np.testing.assert_allclose(own_loss, loss, rtol=1e-5)
            for name, values in own_tables.items():
                np.testing.assert_allclose(values, tables[name], rtol=1e-5, atol=1e-6)


SCRIPT = pathlib.Path(__file__).with_name("parameter_server_fit.py")


def test_servers_have_the_bits_of_one_process() -> None:
    """In a process of its own: a cluster belongs to an eager context."""
    done = new_process.run(SCRIPT, timeout=240)
    assert done.stdout.splitlines()[-1:] == ["passed"], done.stderr[-4000:]
