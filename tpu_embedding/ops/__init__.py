"""Private: the library of the host engine's ops."""

__all__: list[str] = []
