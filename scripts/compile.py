#!/usr/bin/env python3
"""Compile kernels and steps for hardware that is not there: `scripts/compile.py PROGRAM [ARGUMENT...]`.

Without arguments it lists the programs.
"""

from lib.programs import run

run("compile")
