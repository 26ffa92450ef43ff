"""One file for each contestant of `tests.benchmarks.peers`, run as a process in an environment of its own."""
