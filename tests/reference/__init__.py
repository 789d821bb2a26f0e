"""A slow NumPy reading of docs/semantics.md, the oracle of the test suite.

It imports nothing from the package and shares no code with it. Plain loops over
samples, entries and elements, in float64; constants are rounded to float32
first, since that is how a TPU and the kernels hold them.
"""
