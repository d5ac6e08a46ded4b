"""Tool parsers: one file for each form in which models write calls."""
