"""The section ``champion``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from params.schema.base import Frozen, Positive


class Champion(Frozen):
    """The policy to beat: a version of the recipe's registered model, and the digest of its files.

    A retraining writes this section.
    """

    version: Positive
    # The commit of the run that trained it; null: it was registered by hand from a folder.
    commit: Annotated[str, Field(pattern="^[0-9a-f]{40}$")] | None
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{32}\.dir$")]  # DVC's digest of its folder
