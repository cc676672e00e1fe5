"""How messages travel: what all transports share, and ranks within one process."""
