"""Aims: how many times faster than each peer ours must be in the same run."""

from __future__ import annotations

BANDWIDTH = 0.6
"""The share of a copy's bandwidth in the same run, for "dlrm" steps with Adagrad."""

PREPROCESSING = {"dlrm": 2.0}
"""How many times faster than each peer at each number of devices, by scenario."""

SERVING = 1.0
"""The largest multiple of the peer's latency, by any signature at any batch size."""

_TENSORFLOW = ("tfrs", "keras_rs", "tensorflow_nn")

# Aims of training steps, by scenario, optimizer and "step", then by peer.
_STEPS = {
    ("dlrm", "adagrad", "step"): {
        "fbgemm": 5.0,
        "tfrs": 10.0,
        "keras_rs": 40.0,
        "tensorflow_nn": 40.0,
        "keras_fit": 5.0,
    },
    ("dlrm", "sgd", "step"): {"fbgemm": 2.5},
    ("dlrm", "rowwise_adagrad", "step"): {"fbgemm": 1.3},
    ("dlrm", "adam", "step"): {"tensorflow_nn": 80.0},
    ("dlrm", "ftrl", "step"): {"tensorflow_nn": 40.0},
    ("small_batch", "adagrad", "step"): {
        "fbgemm": 0.5,
        "torch_embedding_bag": 1.0,
        **dict.fromkeys(_TENSORFLOW, 1.0),
    },
    ("growing", "adagrad", "step"): {"tfra": 8.0},
}
# The lookup does not depend on the optimizer.
_LOOKUPS = {
    "dlrm": {
        "torch_embedding_bag": 0.95,
        "fbgemm": 1.5,
        **dict.fromkeys(_TENSORFLOW, 6.0),
    }
}


def aim(scenario: str, optimizer: str, peer: str, function: str) -> float | None:
    """Returns the aim for the time of a peer divided by our time, or None."""
    if function == "lookup":
        return _LOOKUPS.get(scenario, {}).get(peer)
    return _STEPS.get((scenario, optimizer, function), {}).get(peer)
