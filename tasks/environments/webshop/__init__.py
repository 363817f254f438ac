"""WebShop's task: its catalogue, pages, search and reward (arXiv 2207.01206)."""
