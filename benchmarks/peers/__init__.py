"""One file for each peer; see `benchmarks.worker` for what it has to offer."""
