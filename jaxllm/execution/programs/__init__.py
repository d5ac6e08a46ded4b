"""The programs of an engine: what they are, how they are compiled, ahead if possible, and kept on disk."""
