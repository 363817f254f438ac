"""Prompts as files, with placeholders that are checked."""

import pytest

from tasks.agents import AGENTS
from tasks.agents.prompts import ACTS, FOLDER, fill, load, load_acts
from tasks.extensions import named


@pytest.mark.parametrize("name", AGENTS)
def test_the_projects_prompts_have_the_placeholders_of_their_agents(name):
    assert set(load(AGENTS[name].prompts)) == set(AGENTS[name].prompts)


def test_every_file_is_the_prompt_of_an_agent():
    used = {name for kind in AGENTS.values() for name in kind.prompts}
    acts = {f"acts_{name}" for name in named.names("environment")}
    assert used <= {file.stem for file in FOLDER.iterdir()} <= used | acts
    assert "click[NAME]" in load_acts(["shop"])[ACTS]
    assert load_acts(["frozen_lake"]) == {}, "its acts are a tool with parameters"


def test_all_faults_name_file_and_placeholder(tmp_path):
    (tmp_path / "a.txt").write_text("Question: $qestion costs $ 5")
    (tmp_path / "b.txt").write_text(" \n")
    with pytest.raises(ValueError) as raised:
        load({"a": {"question"}, "b": set(), "c": set()}, tmp_path)
    lines = str(raised.value).splitlines()
    assert lines[0] == f"{tmp_path}/a.txt: $question is missing: add it"
    assert lines[1].startswith(f"{tmp_path}/a.txt: $qestion is unknown: use $question")
    assert "begins no placeholder" in lines[2]
    assert lines[3].startswith(f"{tmp_path}/b.txt is empty")
    assert lines[4].startswith(f"{tmp_path}/c.txt cannot be read")


def test_what_a_question_quotes_of_placeholders_stays_text():
    assert fill("$question, $tools", question="what is $tools?", tools="x") == "what is $tools?, x"
    assert fill("\\boxed{it} for $$5: $question", question="q") == "\\boxed{it} for $5: q"
