"""Models in the hub's cache: what is there, how more is downloaded, and how it is deleted."""
