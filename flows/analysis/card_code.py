"""The part of a card that shows how to ask its policy: a loop in plain transformers.

It is written for a policy that calls tools in tags and answers single questions. The prompt, the
limits and the tokens of a result are those of the training, but where a question or a result quotes
a mark of turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import Template

from params.schema.recipe import Recipe
from tasks.dialects.tags import TOOLS, describe
from tasks.trees.tree import ToolSpec

TAGS, PYTHON = "tags", "python"
RUN_PYTHON = """    if tool == "python":  # the model's code runs here: put it into a sandbox
        run = [sys.executable, "-I", "-c", RUNNER]
        ran = subprocess.run(run, input=argument, capture_output=True, text=True, timeout=20)
        return (ran.stdout + ran.stderr.strip().rpartition("\\n")[2]).strip()
"""
# as tasks/tools/python_worker.py does: the value of a last expression is printed
RUNNER = '''RUNNER = """
import ast, sys
tree = ast.parse(sys.stdin.read())
last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
names = {"__name__": "__main__"}
exec(compile(tree, "<code>", "exec"), names)
value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names) if last else None
if value is not None:
    print(value)
"""
'''
LOOP = Template('''```python
import re
import subprocess
import sys
from datetime import datetime

import torch

SYSTEM = $system
TODAY = datetime($day)  # as in the prompts of the training
$runner

def call(tool, argument):
    """Return the result of a tool: $names."""
${python}    raise NotImplementedError(tool)


def tokens_of(text):
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids.long()


def ask(question):
    messages = [{"role": "system", "content": SYSTEM}] if SYSTEM else []
    messages.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, strftime_now=TODAY.strftime
    )
    prompt = re.sub(r"<think>\s*\Z", "", prompt)  # the policy begins its thought itself
    start = tokens = tokens_of(prompt)
    opening, closing = tokens_of("<result>"), tokens_of("</result>")
    room = $result - opening.shape[1] - closing.shape[1]
    for _ in range($turns):
        before = tokens.shape[1]
        tokens = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=$turn,
            do_sample=False,
            tokenizer=tokenizer,
            stop_strings=$stop,
        )
        turn = tokenizer.decode(tokens[0, before:])
        called = re.search(r"<($tags)>((?:(?!<\\1>).)*)</\\1>", turn, re.DOTALL)
        if not called:
            break
        result = tokens_of(call(called[1], called[2]))[:, :room]
        tokens = torch.cat([tokens, opening, result, closing], 1)
    return tokenizer.decode(tokens[0, start.shape[1] :])


print(ask($question))
```''')


def loop(recipe: Recipe, specs: Sequence[ToolSpec], question: str) -> str:
    """Return the loop in Markdown; "" for another dialect than that of tags, or a world.

    ``question``: the example that is asked.
    """
    if recipe.environment or TAGS not in recipe.dialect or not specs:
        return ""
    names = [spec.name for spec in specs]
    dialogue = recipe.dialogue
    code = LOOP.substitute(
        day=f"{dialogue.date:%Y, %-m, %-d}",
        system=repr(dialogue.system.replace(TOOLS, describe(specs))),
        names=", ".join(names),
        python=RUN_PYTHON if PYTHON in names else "",
        runner=RUNNER if PYTHON in names else "",
        turns=dialogue.tool_calls + 1,
        turn=dialogue.turn_tokens,
        stop=[*(f"</{name}>" for name in names), "</answer>"],
        tags="|".join(names),
        result=dialogue.result_tokens,
        question=repr(question),
    )
    told = "The policy calls its tools in tags, and reads their results inside its answer:"
    return f"{told}\n\n{code}"
