"""Soak and chaos: `make soak`, or `python -m tests.soak --help`.

A buffer on a small disk, workers and trainers as processes of their own behind a proxy that tears connections, all of
them killed at random; afterwards an oracle compares what everybody was told with what the ledger says.

Invariants: workers and trainers use the shipped client alone; every choice comes from the seed that is printed (when it
falls depends on the machine); no process, port, mount or file is left behind.
"""
