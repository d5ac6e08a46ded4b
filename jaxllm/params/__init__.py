"""The parts of request parameters, and the checks and limits of single values."""
