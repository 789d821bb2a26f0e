"""The custom ops of the host engine: the library and typed wrappers of its ops."""
