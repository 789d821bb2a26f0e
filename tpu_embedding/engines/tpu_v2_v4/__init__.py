"""The engine for TPU v2 to v4, whose hardware holds the tables."""

__all__: list[str] = []
