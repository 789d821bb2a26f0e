"""One file for each peer; `benchmarks.worker` describes what it contains."""
