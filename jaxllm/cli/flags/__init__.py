"""The flags that several commands share, and their help."""
