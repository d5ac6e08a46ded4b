"""Start and run an engine core, in any process or thread."""
