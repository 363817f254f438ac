"""Tell Prefect what has happened in a run, as events that its automations react to.

docs/deployments.md, "Be told", has their names and labels, which stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flows.tracking.run import PIPELINE_RUN

ALARM, VERDICT = "beamline.alarm", "beamline.verdict"


def emit(event: str, recipe: str, labels: Mapping[str, str], payload: Mapping[str, Any]) -> None:
    """Emit an event about the run of a recipe; without a flow run around it, none.

    ``labels`` are what a trigger can ask for: it does not see the payload.
    """
    from prefect.context import FlowRunContext
    from prefect.events import emit_event

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:  # the server is away
        return
    run = os.environ.get(PIPELINE_RUN) or str(context.flow_run.id)
    emit_event(
        event,
        resource={
            "prefect.resource.id": f"beamline.run.{recipe}.{run}",
            "prefect.resource.name": recipe,
            **labels,
        },
        related=[
            {
                "prefect.resource.id": f"beamline.recipe.{recipe}",
                "prefect.resource.role": "recipe",
                "prefect.resource.name": recipe,
            }
        ],
        payload={"recipe": recipe, **payload},
    )
