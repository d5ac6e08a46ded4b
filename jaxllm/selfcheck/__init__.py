"""Check a device's kernels against the reference, before an engine uses them on a device that is new to them.

`start.py` is the engine's check at its start, `process.py` runs child processes under time limits, `worker.py` runs in
them, and `kept.py` keeps results on disk.
"""
