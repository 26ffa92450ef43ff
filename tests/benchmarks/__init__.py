"""Speed as ratios: ours against the bare limit, measured in turn in the same run.

`make bench` runs every module here that has a `measure(servers)` coroutine and prints one table.
Absolute figures depend on the machine and are printed only to be understood; what is promised is
the ratio. `make bench ONLY=outbox` runs one module.
"""
