"""Constraints say which tokens may follow: grammars of structured outputs, and the masks that all rules add up to."""
