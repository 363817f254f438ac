"""Make the automations of automations.yaml on the Prefect server, or bring them up to date.

    python -m flows.workers.automations

``prefect automation create`` would make each of them once more with every call. An action may name
a notification block (``block: be-told``), whose id differs from server to server; an automation
whose block the server lacks is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import AutomationCore

FILE = Path("automations.yaml")
PAGE = 100  # blocks of an answer of the server


def declared(file: Path = FILE) -> list[dict[str, Any]]:
    """Return the automations that a file declares."""
    return list(yaml.safe_load(file.read_text())["automations"])


def install(automations: Sequence[Mapping[str, Any]]) -> None:
    """Make these automations on the configured server; those of the same name are replaced."""
    blocks = _blocks()
    with get_client(sync_client=True) as client:
        for each in automations:
            if missing := sorted(blocks_of(each) - {*blocks}):
                print(
                    f"left out the automation '{each['name']}': the server has no block "
                    f"'{missing[0]}' (docs/deployments.md, \"Be told\")"
                )
                continue
            automation = AutomationCore.model_validate(with_blocks(each, blocks))
            namesakes = client.read_automations_by_name(name=automation.name)
            if namesakes:
                client.update_automation(namesakes[0].id, automation)
            else:
                client.create_automation(automation)
            print(f"{'updated' if namesakes else 'made'} the automation '{automation.name}'")


def blocks_of(automation: Mapping[str, Any]) -> set[str]:
    """Return the names of the blocks that the actions of an automation need."""
    return {action["block"] for action in automation["actions"] if "block" in action}


def with_blocks(automation: Mapping[str, Any], blocks: Mapping[str, str]) -> dict[str, Any]:
    """Return an automation as Prefect takes it, with the id of each block in place of its name."""
    actions = [
        {key: value for key, value in action.items() if key != "block"}
        | ({"block_document_id": blocks[action["block"]]} if "block" in action else {})
        for action in automation["actions"]
    ]
    return {**automation, "actions": actions}


def _blocks() -> dict[str, str]:
    """Return the ids of the server's blocks by name."""
    found: dict[str, str] = {}
    with get_client(sync_client=True) as client:
        for offset in count(0, PAGE):
            answer = client.read_block_documents(offset=offset, limit=PAGE, include_secrets=False)
            found |= {block.name: str(block.id) for block in answer if block.name}
            if len(answer) < PAGE:
                break
    return found


if __name__ == "__main__":
    install(declared())
