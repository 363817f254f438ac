"""What an agent is: its dialogue, its tools, and the engine that samples it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
    model_validator,
)

from params.schema.base import (
    Frozen,
    NonNegative,
    Positive,
    PositiveFloat,
    Probability,
    check_below_sources,
)


class Dialogue(Frozen):
    """How an agent's trajectory is laid out, and where it is cut."""

    system: str
    tools: tuple[Literal["python", "search"], ...]
    turn_tokens: Positive  # sampled tokens a turn, at most
    result_tokens: Positive  # tokens of one tool result, at most
    response_tokens: Positive  # tokens after the prompt, sampled and observed, at most
    tool_calls: NonNegative  # a trajectory, at most

    @model_validator(mode="after")
    def _has_a_tool(self) -> Dialogue:
        if not self.tools:
            raise ValueError("tools is empty: name at least one, such as python")
        return self


class PythonTool(Frozen):
    """Limits of one call of the Python tool (design decision 9)."""

    sandbox: Literal["auto", "bubblewrap", "unshare", "none"]
    cpu_seconds: Positive
    wall_seconds: PositiveFloat  # backstop only: outcomes must not depend on load
    memory_mib: Positive
    processes: Positive
    file_mib: Positive
    output_characters: Positive


class Search(Frozen):
    """The search tool: BM25 (Robertson and Zaragoza 2009) over the recipe's corpus."""

    corpus: Path | None  # documents below data/sources/; null: those that the questions come with
    results: Positive  # documents a query, at most
    snippet_words: Positive  # of one document, at most
    query_characters: Positive  # a longer query is refused
    k1: PositiveFloat  # how soon a word that is repeated stops counting
    b: Probability  # how much a long document is held back

    @model_validator(mode="after")
    def _lies_where_dvc_looks(self) -> Search:
        if self.corpus:
            check_below_sources(self.corpus)
        return self


class Engine(Frozen):
    """What samples. Only its kind decides what comes out, and is in keys of the ledger."""

    kind: Literal["transformers", "vllm"]
    # Of vllm: what it may take for weights and for keys and values. On a GPU a share of its memory,
    # on a CPU the GiB of keys and values.
    memory: Annotated[PositiveFloat, Field(exclude=True)]
    # of vllm, elsewhere; null: here
    server: Annotated[str | None, Field(exclude=True, pattern="^https?://")]
    # Of vllm: groups of questions that go on by themselves, so that none waits for another's tools.
    # With 1 all go in rounds.
    lanes: Annotated[Positive, Field(exclude=True)]

    @model_validator(mode="after")
    def _only_vllm_has_a_server(self) -> Engine:
        if self.server and self.kind != "vllm":
            raise ValueError(
                f"server is {self.server} and kind {self.kind}, which samples here: set server to "
                "null, or kind to vllm"
            )
        return self
