"""The tools that an agent can call: one file each, which holds its TOOL (contract.py)."""
