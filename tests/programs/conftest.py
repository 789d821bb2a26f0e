"""These programs are run as scripts, by tests/test_programs.py and tests/peers."""

collect_ignore_glob = ["*.py"]
