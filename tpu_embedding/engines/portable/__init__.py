"""The portable engine: TensorFlow's ops, on any device, without a library of ops."""

__all__: list[str] = []
