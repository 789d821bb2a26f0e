"""The portable engine: TensorFlow's ops, on any device, without our library."""

__all__: list[str] = []
