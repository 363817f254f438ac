"""Show what a run does with a server that answers wrongly: alone, and beside a good one.

    beamline prepare tiny; python -m benchmarks.wrong_answers

A server of the transformers engine samples a few turns of the recipe's first policy. Before it are
servers that pass its answers on, and spoil them in the ways of tests/sampling_server.py. Prints for
each way how the run ends, the seconds until then, and what is said. A server that is alone is
waited for ``--total`` seconds where a run waits ten minutes.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from params.run_folders import RunFolders
from params.schema.base import Machine
from tasks.engines.servers.fleet import Fleet
from tasks.engines.servers.patience import Patience
from tasks.engines.servers.weights_check import ServedPolicy, reference_of
from tasks.engines.turns import TurnRequest
from tasks.policy import token_ids
from tasks.policy.load_model import load_policy, load_tokenizer
from tasks.trees import marks
from tests.sampling_server import RIGHT, WAYS, sampling, spoiling

TURNS, CONTEXT, TOKENS = 8, 9, 6  # turns that are asked for, and their tokens
AT_ONCE = 16  # ways that are tried at the same time: most of them wait
# A server that says nothing is given up after two seconds.
PATIENCE = Patience(total=0.2, first_pause=0.05, call=2.0, turn=2.0, token=0.0)


@dataclass(frozen=True)
class Outcome:
    """How sampling has ended: the tokens of each turn, or what was said."""

    tokens: Sequence[Sequence[int]]
    said: str
    seconds: float


Row = tuple[str, Outcome, Outcome]  # address of a wrong server; alone, and in a fleet of two


def described(folder: Path) -> tuple[ServedPolicy, list[TurnRequest]]:
    """Return the policy in a folder, for servers, and turns to ask them for."""
    model = load_policy(folder, Machine(threads=1, device="cpu", precision="float32")).eval()
    ids, tokenizer = token_ids.of(model), load_tokenizer(folder)
    pieces, reference = marks.token_texts(tokenizer, ids.end), reference_of(folder, model, KIND)
    random, ends = np.random.default_rng(0), (tokenizer.eos_token_id,)
    contexts = random.integers(3, ids.end, (TURNS, CONTEXT)).astype(np.int32)
    turns = [
        TurnRequest(tokens, seed, TOKENS, 1.0, 1.0, (), ends, (), bytes([seed]))
        for seed, tokens in enumerate(contexts)
    ]
    return ServedPolicy(folder, "the right version", ids, pieces, reference), turns


KIND = "transformers"


def outcome(
    addresses: Sequence[str], policy: ServedPolicy, turns: Sequence[TurnRequest], patience: Patience
) -> Outcome:
    """Sample turns at servers."""
    began = time.monotonic()
    fleet = Fleet(addresses, KIND, patience)
    try:
        drawn = fleet.sample(turns, lambda: policy, policy.version)
    except (RuntimeError, ValueError) as error:
        return Outcome([], str(error), time.monotonic() - began)
    return Outcome([tokens.tolist() for tokens, _, _ in drawn], "", time.monotonic() - began)


def matrix(folder: Path, patience: Patience = PATIENCE) -> tuple[Outcome, dict[str, Row]]:
    """Return the outcome of a good server alone, and name -> address and outcomes of each way."""
    policy, turns = described(folder)
    patient = replace(patience, total=60.0)  # a good server is there

    def tried(name: str) -> Row:
        with spoiling(right, WAYS[name]) as wrong:
            alone = outcome([wrong], policy, turns, patience)
        with spoiling(right, WAYS[name]) as again, spoiling(right, RIGHT) as other:
            return wrong, alone, outcome([again, other], policy, turns, patient)

    with (
        tempfile.TemporaryDirectory() as home,
        sampling(folder, Path(home), secrets.token_urlsafe(32)) as right,
        spoiling(right, RIGHT) as good,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        expected = outcome([good], policy, turns, patient)
        return expected, dict(zip(WAYS, pool.map(tried, WAYS), strict=True))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wrong_answers", description=__doc__)
    parser.add_argument("recipe", nargs="?", default="tiny")
    parser.add_argument("--total", type=float, default=PATIENCE.total)
    args = parser.parse_args()
    folder = RunFolders(args.recipe).initial.absolute()
    expected, rows = matrix(folder, replace(PATIENCE, total=args.total))
    print("| way | alone | s | it says | beside a good one | s |\n|---|---|---:|---|---|---:|")
    for name, (address, alone, fleet) in rows.items():
        ends = ["goes on" if one.tokens == expected.tokens else "ends" for one in (alone, fleet)]
        said = alone.said.replace(address, "ADDRESS").replace("|", "/")
        seconds = [f"{one.seconds:.1f}" for one in (alone, fleet)]
        print(f"| {name} | {ends[0]} | {seconds[0]} | {said} | {ends[1]} | {seconds[1]} |")


if __name__ == "__main__":
    main()
