"""Private: specs of TPUEstimator; `tpu_embedding.interop` has the public names."""

__all__: list[str] = []
