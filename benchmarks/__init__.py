"""Benchmarks of this package and of other libraries (peers), in one run."""
