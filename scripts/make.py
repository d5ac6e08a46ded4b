#!/usr/bin/env python3
"""Write test data, pictures or packs anew: `scripts/make.py PROGRAM [ARGUMENT...]`.

Without arguments it lists the programs.
"""

from lib.programs import run

run("make")
