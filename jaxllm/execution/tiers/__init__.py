"""The blocks that the host keeps, and their moves to and from the devices."""
