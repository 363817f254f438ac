"""A server that speaks the form of every agent without training, and knows each second answer.

    python -m benchmarks.scripted_chat hotpotqa/test bamboogle/test --port 8100
    python -m benchmarks.scripted_chat data/shop/questions/test.parquet --recipe shop --port 8100

It speaks OpenAI's protocol on loopback, so ``beamline agents`` can be tried with it:
requests, calls, what enters the context, scores. Every agent reaches about a half, with the calls
that its form takes. The figures check the protocol and say nothing about any model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from params.run_folders import RunFolders
from params.schema.base import PARAMS
from tasks import recipes
from tasks.agents.sets import of_benchmark
from tasks.environments import open_environment
from tasks.trees.tables import load_questions
from tasks.trees.tree import Question

# words of the prompt (params/prompts/agents) -> replies by the number of turns before
FORMS: Mapping[str, Sequence[str]] = {
    "Report what the page says": ["It says: {answer}."],
    "Words that were searched for": ["They say: {answer}."],
    "Begin your reply with yes or no": ["{verdict}"],
    "what went wrong": ["I did not search. Next time I search for: {question}"],
    "Reply with the next act": ["{act}"],
    "and nothing after the act:": ["Thought: I go on.\nAction: {act}"],
    "learned from it": ["Thought: done.\nAction: finish[{answer}]"],
    "Action: name[argument]": [
        "Thought: I search.\nAction: search[{question}]",
        "Thought: done.\nAction: finish[{answer}]",
    ],
    "<findings>": ["<findings>{answer}"],
    "<note>": ["<search>{question}", "<note>{answer}", "<answer>\\boxed{{{answer}}}"],
    "<search>": ["I search. <search>{question}", "So <answer>\\boxed{{{answer}}}"],
    "": ["<answer>\\boxed{{{answer}}}"],
}


@dataclass(frozen=True)
class Known:
    """A task whose answer is known, or the acts that do it."""

    question: str
    answer: str = ""
    acts: tuple[str, ...] = ()


def reply(messages: Sequence[Mapping[str, str]], known: Sequence[Known]) -> str:
    """Return the reply to a dialogue, in the form that its prompt asks for.

    Each second task is done; of the others the answer is "unknown", and so is each act.
    """
    prompt = messages[0]["content"]
    turns = sum(message["role"] == "assistant" for message in messages)
    index = max(
        (n for n, each in enumerate(known) if each.question in prompt),
        key=lambda n: len(known[n].question),
        default=1,
    )
    task, right = known[index], index % 2 == 0
    form = next(lines for words, lines in FORMS.items() if words in prompt)
    return form[min(turns, len(form) - 1)].format(
        question=task.question[:300],
        answer=task.answer if right else "unknown",
        act=task.acts[turns] if right and turns < len(task.acts) else "unknown",
        verdict="Yes, it does." if right else "No, nothing supports it.",
    )


def completion(request: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a reply as the protocol has it; words count as tokens."""
    ends = [at for mark in request.get("stop") or () if (at := text.find(mark)) >= 0]
    text = text[: min(ends, default=len(text))]
    read = sum(len(message["content"].split()) for message in request["messages"])
    written = len(text.split())
    message = {"role": "assistant", "content": text}
    return {
        "id": "scripted",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        },
    }


def serve(known: Sequence[Known], port: int) -> None:
    """Answer requests on loopback until the process is interrupted."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps(completion(request, reply(request["messages"], known))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        print(f"listening at http://127.0.0.1:{server.server_port}/v1", flush=True)
        server.serve_forever()


def _questions(source: str) -> list[Question]:
    """Return the questions of a set's split, or of a file."""
    file = Path(source)
    return load_questions(file) if file.suffix == ".parquet" else of_benchmark(source, PARAMS)


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = "whose answers it knows: hotpotqa/test, or a recipe's questions/test.parquet"
    parser.add_argument("sets", nargs="+", help=known)
    parser.add_argument("--recipe", help="whose world the tasks are of; its expert does them")
    parser.add_argument("--port", type=int, default=8100)
    args = parser.parse_args(arguments)
    questions = [question for one in args.sets for question in _questions(one)]
    acts = _acts_of_the_expert(args.recipe, questions) if args.recipe else [()] * len(questions)
    serve(
        [
            Known(each.text, next(iter(each.answers), ""), task_acts)
            for each, task_acts in zip(questions, acts, strict=True)
        ],
        args.port,
    )


def _acts_of_the_expert(name: str, tasks: Sequence[Question]) -> list[tuple[str, ...]]:
    """Return the acts with which the world's own expert does each task, all side by side."""
    recipe = recipes.load(name)
    corpus = RunFolders(name).corpus
    acts: list[list[str]] = [[] for _ in tasks]
    with (
        open_environment({}, recipe.environment, recipe.machine.threads, corpus) as environment,
        environment.session() as session,
    ):
        going = [(index, handle) for index, (handle, _) in enumerate(session.open(tasks))]
        while going:
            solved = session.solve([handle for _, handle in going])
            moves = [(*at, call) for at, call in zip(going, solved, strict=True) if call]
            seen = session.act([(handle, call) for _, handle, call in moves])
            for index, _, call in moves:
                acts[index].append(call.argument)
            going = [
                (index, handle)
                for (index, handle, _), observation in zip(moves, seen, strict=True)
                if not observation.ends
            ]
    return [tuple(task_acts) for task_acts in acts]


if __name__ == "__main__":
    main(sys.argv[1:])
