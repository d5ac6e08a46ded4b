"""HTTP itself: connections, TLS, authentication, endpoints, bodies, errors and event streams."""
