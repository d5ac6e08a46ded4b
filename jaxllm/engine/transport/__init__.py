"""The connection between front end and core: calls, messages as frames, and sockets."""
