"""Which tokens may follow: grammars of structured outputs, and the masks that all rules of a request add up to."""
