"""The flag of commands that read the hub's cache."""

from __future__ import annotations

import argparse


def add_cache_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that engines have for another cache folder."""
    parser.add_argument("--download-dir", metavar="DIR", help="where hub files are kept; default: the hub's cache")
