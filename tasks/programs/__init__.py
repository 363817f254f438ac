"""Programs: agents that somebody else has written, which ask at an address for their answers."""
