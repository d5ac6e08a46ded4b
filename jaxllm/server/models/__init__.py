"""The models of a server: which are loaded, which one answers a request, and which one makes room for another."""
