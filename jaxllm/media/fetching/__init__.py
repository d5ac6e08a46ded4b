"""Fetch images and videos from URLs, within the limits that an operator sets."""
