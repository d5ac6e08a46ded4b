#!/usr/bin/env python3
"""Run a benchmark: `scripts/bench.py PROGRAM [ARGUMENT...]`.

Without arguments it lists the programs.
"""

from lib.programs import run

run("bench")
