"""The loop of a card, executed as a reader would: its tokens are those of the training."""

import copy
import re
from pathlib import Path

import pytest
import torch

from flows.analysis import card_code
from tasks import recipes
from tasks.dialects.tags import Tags, open_tags
from tasks.environments import open_environment
from tasks.tools.contract import text_spec
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import Call, Observation, Question

PYTHON = text_spec("python", "Run Python.", "code", "The code.")
TOLD = "Use {tools} For example: <python>print(1)</python><result>1</result>"
QUESTION = 'What is 12 times 34? Write it\'s "value".'
TURNS = [
    "<think>I compute.</think><python>print(12 * 34)</python>",
    "<answer>\\boxed{408}</answer>",
]


@pytest.fixture
def recipe():
    found = recipes.load("smoke", Path("params"))
    dialogue = found.dialogue.model_copy(update={"system": TOLD, "result_tokens": 40})
    return found.model_copy(update={"dialogue": dialogue})


class Saying:
    """A model that writes the turns, and remembers what it was given."""

    def __init__(self, tokenizer):
        self.tokenizer, self.given, self.turns = tokenizer, [], list(TURNS)

    def generate(self, tokens, **options):
        self.given.append(tokens[0].tolist())
        written = self.tokenizer.encode(self.turns.pop(0), add_special_tokens=False)
        return torch.cat([tokens, torch.tensor([written])], 1)


DATED = "{{ strftime_now('%d %B %Y') }}"
OPENED = "{% if add_generation_prompt %}<think>\n{% endif %}"


@pytest.mark.parametrize("template", ["{own}", f"{DATED}{{own}}", f"{{own}}{OPENED}"])
def test_the_loop_gives_the_policy_what_a_rollout_gives_it(recipe, tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template.replace("{own}", tokenizer.chat_template)
    shown = card_code.loop(recipe, [PYTHON], QUESTION)
    (code,) = re.findall(r"```python\n(.*?)```", shown, re.DOTALL)
    model = Saying(tokenizer)
    printed = []
    exec(code, {"model": model, "tokenizer": tokenizer, "print": printed.append})
    dialect = open_tags(Tags(), tokenizer, recipe.dialogue, [PYTHON])
    prompt = dialect.prompt(Question("", "", QUESTION, ())).tolist()
    turn = tokenizer.encode(TURNS[0], add_special_tokens=False)
    seen = Observation(Outcome.OK, "408")
    _, result = dialect.observe(prompt, turn, (Call("python", ""),), (seen,), 40)
    assert model.given == [prompt, [*prompt, *turn, *result]]
    assert printed == [f"{TURNS[0]}<result>408</result>{TURNS[1]}"]


@pytest.mark.parametrize(
    "code",
    ["12 * 34", "x = 12\nx * 34", "print(12 * 34)", "None", "x = 1", "12 / 0", "import", "  7"],
)
def test_python_gives_what_the_tool_gives(recipe, code):
    shown = card_code.loop(recipe, [PYTHON], QUESTION).partition("```python\n")[2]
    card = {}
    exec(shown.partition("def tokens_of")[0], card)
    opened = open_environment(recipe.tools, {}, 1, Path("none"))
    with opened as environment, environment.session() as session:
        ((handle, _),) = session.open([Question("q", "", "?", ())])
        (seen,) = session.act([(handle, Call("python", code))])
    assert card["call"]("python", code) == seen.text.strip()


def test_a_long_result_is_cut_as_in_training(recipe, tokenizer):
    code = card_code.loop(recipe, [PYTHON], QUESTION).partition("```python\n")[2][:-3]
    model = Saying(tokenizer)
    model.turns[0] = "<python>print('12 ' * 500)</python>"
    exec(code, {"model": model, "tokenizer": tokenizer, "print": lambda text: None})
    first, second = map(len, model.given)
    written = len(tokenizer.encode("<python>print('12 ' * 500)</python>", add_special_tokens=False))
    assert second - first - written == recipe.dialogue.result_tokens


def test_there_is_none_for_worlds_and_other_dialects(recipe):
    assert card_code.loop(recipe, [], "?") == ""
    assert card_code.loop(recipes.load("tiny-lake", Path("params")), [PYTHON], "?") == ""
    native = recipe.model_copy(update={"dialect": {"native": None}})
    assert card_code.loop(native, [PYTHON], "?") == ""


def test_other_tools_are_the_readers_to_bring(recipe):
    search = text_spec("search", "Search.", "query", "Words.")
    code = card_code.loop(recipe, [search], "?")
    assert "<(search)>" in code and "subprocess.run" not in code
    assert "'</search>', '</answer>'" in code
