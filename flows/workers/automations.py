"""Make the automations of automations.yaml on the Prefect server, or bring them up to date.

    python -m flows.workers.automations

``prefect automation create`` would make each of them once more with every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import AutomationCore

FILE = Path("automations.yaml")


def declared(file: Path = FILE) -> list[dict[str, Any]]:
    """Return the automations that a file declares."""
    return list(yaml.safe_load(file.read_text())["automations"])


def install(automations: Sequence[Mapping[str, Any]]) -> None:
    """Make these automations on the configured server; those of the same name are replaced."""
    with get_client(sync_client=True) as client:
        for each in automations:
            automation = AutomationCore.model_validate(each)
            namesakes = client.read_automations_by_name(name=automation.name)
            if namesakes:
                client.update_automation(namesakes[0].id, automation)
            else:
                client.create_automation(automation)
            print(f"{'updated' if namesakes else 'made'} the automation '{automation.name}'")


if __name__ == "__main__":
    install(declared())
