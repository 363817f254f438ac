"""Serve a trained policy to the program that it was trained with, or to another one.

``beamline serve RECIPE`` answers OpenAI's protocol at ``--host`` and ``--port``, with the recipe's
dialect: calls of tools are calls, and results are read, as in training. The key is that of
``BEAMLINE_SERVER_TOKEN``, or of the file that is named at the start. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flows import end_import_phase, exit_fast
from flows.runs.without_run import policy_folder
from params.given_numbers import above_zero, port
from params.schema.recipe import Recipe
from tasks import recipes
from tasks.engines import ENGINES
from tasks.engines.servers.token_guard import TOKEN, TOKEN_FILE, server_token
from tasks.ledger.artifacts import Artifact
from tasks.programs.contract import ProgramSettings


def serve(name: str, recipe: Recipe, policy: Path, address: tuple[str, int], heat: float) -> None:
    """Serve until an interrupt. Raises ValueError or OSError with what is missing."""
    agent = recipes.agent_of(recipe)
    if missing := ENGINES[agent.engine.kind].installed(agent.engine):
        raise ValueError(f"params/{name}.yaml: 'engine.kind' = {agent.engine.kind!r}, {missing}")
    key = server_token()
    from tasks.policy.machine import use_machine
    from tasks.policy.resident import POLICIES
    from tasks.programs import serving
    from tasks.programs.asking import FixedSampling

    use_machine(recipe.machine)
    actor = POLICIES.load_learner(policy, recipe.machine)
    settings = next(iter(recipe.program.values()), None) or of_dialogue(recipe)
    assert isinstance(settings, ProgramSettings)
    engine = ENGINES[agent.engine.kind].open(
        actor, Artifact.at(policy), agent.engine, recipe.machine, serving.CONVERSATIONS
    )
    given = f"${TOKEN}" if os.environ.get(TOKEN) else f"$(cat {TOKEN_FILE.absolute()})"

    def begun(port: int) -> None:
        print(f"OPENAI_BASE_URL=http://{address[0]}:{port}/v1")
        print(f"OPENAI_API_KEY={given}", flush=True)

    turn = recipe.dialogue.turn_tokens
    sampling = FixedSampling(heat, recipe.evaluate.top_p, turn, settings.ignored)
    with suppress(KeyboardInterrupt):
        serving.serve(
            engine,
            actor.tokenizer,
            recipe.dialogue,
            sampling,
            settings,
            recipe.dialect,
            key,
            address,
            begun,
        )
    engine.release()


def of_dialogue(recipe: Recipe) -> ProgramSettings:
    """Return the settings for a recipe without a program: its policy's whole context is there."""
    room = recipe.prepare.policy.context - recipe.dialogue.turn_tokens
    return ProgramSettings(prompt_tokens=max(1, room))


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status. 2: there is nothing to serve."""
    parser = argparse.ArgumentParser(
        prog="beamline serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", help="params/<recipe>.yaml")
    parser.add_argument("--policy", type=Path, help="a folder; else the trained policy")
    parser.add_argument("--host", default="127.0.0.1", help="address that it listens at")
    parser.add_argument("--port", type=port, default=8000, help="0: any that is free")
    parser.add_argument("--temperature", type=above_zero, help="else that of evaluate")
    args = parser.parse_args(arguments)
    try:
        recipe = recipes.load(args.recipe, Path("params"))
        heat = recipe.evaluate.temperature if args.temperature is None else args.temperature
        folder = policy_folder(args.recipe, args.policy)
        serve(args.recipe, recipe, folder, (args.host, args.port), heat)
    except (ValueError, OSError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    end_import_phase()
    exit_fast(main(sys.argv[1:]))
