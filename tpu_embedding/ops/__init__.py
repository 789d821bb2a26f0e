"""Private: the library of the host engine's ops, and typed wrappers of them."""

__all__: list[str] = []
