"""What a rollout needs beside an engine: the dialect of tags and tools that are functions."""

from contextlib import contextmanager, nullcontext
from functools import partial

from tasks.dialects.tags import Tags, open_tags
from tasks.environments import open_environment
from tasks.environments.contract import OpenEnvironment
from tasks.environments.question import Questions, answer
from tasks.rollouts.rounds import Setting
from tasks.tools.contract import text_spec, text_tool


def opened(tools):
    """Return open tools: name -> function of the texts of a round."""
    return [text_tool(text_spec(name, "", "text", ""), run) for name, run in tools.items()]


def responding(tools):
    """Return what answers a round of calls with tools: name -> function of texts."""
    return partial(answer, opened(tools))


@contextmanager
def open_tools(tools, workers, corpus):
    """Open a recipe's tools on a corpus; yield what answers a round of calls."""
    with (
        open_environment(tools, {}, workers, corpus) as environment,
        environment.session() as session,
    ):
        yield lambda calls: session.act([(0, call) for call in calls])


def questions_with(tools):
    """Return the environment of single questions with tools: name -> function of arguments."""
    specs = [tool.specs[0] for tool in opened(tools)]
    return OpenEnvironment(specs, lambda: nullcontext(Questions(responding(tools))))


def setting_of(tokenizer, dialogue, rollout, tools, *others, **more):
    """Return the setting of rollouts with these tools, in tags."""
    environment = questions_with(tools)
    dialect = open_tags(Tags(), tokenizer, dialogue, environment.specs)
    return Setting(tokenizer, dialogue, rollout, dialect, environment, *others, **more)
