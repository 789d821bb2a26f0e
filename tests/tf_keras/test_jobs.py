"""Model.fit of tf_keras under MultiWorkerMirroredStrategy."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from multi_process import tf_keras_fit
from multi_process.jobs import Job


def test_fit_trains_as_with_two_replicas_of_one_process() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    losses, loss, tables = tf_keras_fit.fit(strategy)
    with Job(2) as job:
        for own_losses, own_loss, own_tables in job.run("tf_keras_fit.fit"):
            np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
            np.testing.assert_allclose(own_loss, loss, rtol=1e-5)
            for name, values in own_tables.items():
                np.testing.assert_allclose(values, tables[name], rtol=1e-5, atol=1e-6)
