"""Lookups out of stock TensorFlow ops: checks, entries, and sums over tables.

The portable engine trains on them, and what is served is made of them.
"""
