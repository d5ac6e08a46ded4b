"""Several front-end processes of one engine on one port: their parent, what they share, and how they find it."""
