"""Restrict which tokens may be sampled next: grammars of structured outputs, and the masks that combine all rules."""
