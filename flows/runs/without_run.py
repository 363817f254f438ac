"""Find the policy of a run in this checkout, or say what to do where there is none."""

from __future__ import annotations

from pathlib import Path

from params.run_folders import RunFolders

AGENTS = ("trained", "cold_start")  # folders of models/<recipe>, the first that exists is taken


def remedy(recipe: str) -> str:
    """Return how a run of the recipe comes here; one as a commit is in a worktree of its own."""
    return (
        f"run `make run RECIPE={recipe}` first, or restore a run with `beamline reproduce "
        "<branch>` and call this in the folder that it prints"
    )


def policy_folder(name: str, policy: Path | None) -> Path:
    """Return the folder of the policy of a run here. Raises ValueError where there is none."""
    folders = [policy] if policy else [RunFolders(name).models / agent for agent in AGENTS]
    policies = [folder for folder in folders if (folder / "config.json").is_file()]
    if policies:
        return policies[0]
    if policy:
        raise ValueError(f"--policy {policy} holds no policy: name a folder with a config.json")
    raise ValueError(f"{name} has not been trained here: {remedy(name)}")
