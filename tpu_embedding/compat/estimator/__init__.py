"""Private: TPUEstimator; `tpu_embedding.estimator` has the public names."""

__all__: list[str] = []
