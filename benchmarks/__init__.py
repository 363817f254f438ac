"""Speed against a peer, measured in one run."""
