#!/usr/bin/env python3
"""Run a check that takes long, or needs hardware or other programs: `scripts/check.py PROGRAM [ARGUMENT...]`.

Without arguments it lists the programs.
"""

from lib.programs import run

run("check")
