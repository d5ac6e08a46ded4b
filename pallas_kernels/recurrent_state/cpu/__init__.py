"""What a CPU's kernels of recurrent state share: a step's units of work (`units.py`), and states that are matrices, a
part of which stays in the first cache while a chunk's tokens go by (`matrices.py`)."""
