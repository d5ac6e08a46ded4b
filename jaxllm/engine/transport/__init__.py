"""The way between front end and core: what each asks of the other, frames, and sockets."""
