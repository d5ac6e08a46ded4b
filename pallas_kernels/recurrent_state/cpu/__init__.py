"""The common part of a CPU's kernels of recurrent state.

`units.py` divides a step into units of work. `matrices.py` handles states that are matrices: a part of one stays in the
first cache while a chunk's tokens go by.
"""
