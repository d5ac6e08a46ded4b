"""The front end's side of a core that runs by itself: its process or thread, its heartbeats, its client."""
