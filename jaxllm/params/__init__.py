"""Requests may ask for this; the checks and limits of single values are here too."""
