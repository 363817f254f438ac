"""Keys: they change with everything that decides a result, and with nothing else."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks import recipes
from tasks.ledger import artifacts, keys
from tasks.ledger.artifacts import Artifact
from tasks.ledger.substeps import SubStep
from tests.tasks.ledger.toy import POLICY, Settings

ROOT = Path(__file__).parents[3]


# ---------------------------------------------------------------- inputs


def test_key_changes_with_every_input(run):
    places = [
        run.place(),
        run.place(policy=Artifact("some/path", "another digest")),
        run.place(settings=Settings(rate=0.25)),
        run.place(settings=Settings(steps=5)),
        run.place(size=3),
        run.place(seed=8),
        run.place(iteration=4),
    ]
    assert len({path.name.split("-")[-1] for path in places}) == len(places)


def test_key_does_not_depend_on_paths_and_order(run):
    assert run.place(policy=Artifact("elsewhere", POLICY.digest)) == run.place()
    assert run.place(settings=Settings(steps=4, rate=0.5)) == run.place()


def test_list_counts_with_its_order(run):
    one, other = Artifact("a", "digest 1"), Artifact("b", "digest 2")
    lists = [[one, other], [other, one], [one], [], [[one, other]]]
    assert len({run.place(size=entries) for entries in lists}) == len(lists)
    assert run.place(size=[one]) == run.place(size=[Artifact("elsewhere", "digest 1")])


def test_mapping_counts_by_name(run):
    one, other = Settings(rate=0.25), Settings(steps=5)
    mappings = [{"a": one}, {"b": one}, {"a": other}, {"a": one, "b": other}, {}]
    assert len({run.place(size=entries) for entries in mappings}) == len(mappings)
    assert run.place(size={"a": one, "b": other}) == run.place(size={"b": other, "a": one})


def test_values_of_different_types_differ(run):
    values = (1, 1.0, True, None, "1", "true", "null", [1], ["1"], "[1]", {"a": 1}, [None], [])
    assert len({run.place(size=value) for value in values}) == len(values)


@pytest.mark.parametrize("value", [Path("a"), b"x", {1}, len, [[Path("a")]], {"a": Path("a")}])
def test_value_without_content_is_refused(run, value):
    with pytest.raises(TypeError, match="can't be part of a key: pass"):
        run.train(size=value)
    assert not artifacts.ROOT.exists()


def test_stage_key_is_of_recipe_and_inputs():
    one, other = Artifact("a", "1"), Artifact("b", "2")
    found = [
        keys.stage_key(Settings()),
        keys.stage_key(Settings(rate=0.1)),
        keys.stage_key(Settings(), one),
        keys.stage_key(Settings(), other),
        keys.stage_key(Settings(), one, other),
    ]
    assert len(set(found)) == len(found)
    assert keys.stage_key(Settings(), Artifact("elsewhere", "1")) == found[2]


# ---------------------------------------------------------------- source

SOURCES = {
    "tasks/__init__.py": "",
    "tasks/verb.py": '''"""Doc of verb."""

from dataclasses import dataclass
import numpy
from tasks import helper
from tasks.room.part import PART
from tasks.tools import lookup
from tasks.ledger.substeps import recorded

@dataclass(frozen=True)
class Inputs:
    size: int = 1

@recorded
def verb(step, inputs):
    """Doc of a function."""
    return {"size": inputs.size + 1}
''',
    "tasks/helper.py": '''def scale(x, rate=0.5):
    """Doc of a helper."""
    from params.section import Section
    return x * rate

class Kind:
    """Doc of a class."""

    name = "kind"

    async def wait(self):
        """Doc of a method."""
        return "text"
''',
    "tasks/room/__init__.py": "LIMIT = 3\n",
    "tasks/room/part.py": "PART = 1\n",
    "tasks/tools/lookup.py": 'def lookup():\n    """Look a word up."""  # an agent reads it\n',
    "tasks/ledger/substeps.py": "VERSION = 1\n",
    "tasks/unrelated.py": "import tasks.helper\n",
    "params/section.py": "from tasks_of_another_project import verb\n",
}


def write(files):
    for name, source in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(source)
    keys.source_digests.cache_clear()


@pytest.fixture
def project(folder, monkeypatch):
    """A small project with a verb, instead of this one."""
    monkeypatch.setattr(keys, "PROJECT", folder)
    write(SOURCES)
    yield folder
    keys.source_digests.cache_clear()


@dataclass(frozen=True)
class Inputs:
    size: int = 1


def key():
    """Return the key of the project's verb."""
    return keys.key_of(keys.identities(Inputs(), Path("tasks/verb.py").absolute()))


def edit(file, old, new):
    assert SOURCES[file].count(old) == 1
    write({file: SOURCES[file].replace(old, new)})


SILENT = {
    "comment": ("tasks/verb.py", "import numpy", "import numpy  # for arrays"),
    "comment line": ("tasks/verb.py", "@recorded", "# once\n@recorded"),
    "docstring": ("tasks/verb.py", "Doc of verb.", "Another text."),
    "function docstring": ("tasks/verb.py", "Doc of a function.", "Another text."),
    "line break": (
        "tasks/verb.py",
        "inputs.size + 1",
        "(\n        inputs.size\n        + 1\n    )",
    ),
    "blank line": ("tasks/verb.py", "import numpy", "\n\nimport numpy"),
    "imported comment": ("tasks/helper.py", "x * rate", "x * rate  # product"),
    "imported docstring": ("tasks/helper.py", "Doc of a helper.", "Another text."),
    "no docstring": ("tasks/helper.py", '    """Doc of a helper."""\n', ""),
    "class docstring": ("tasks/helper.py", "Doc of a class.", "Another text."),
    "method docstring": ("tasks/helper.py", "Doc of a method.", "Another text."),
    "imported line break": ("tasks/helper.py", "x, rate=0.5", "\n    x,\n    rate=0.5,\n"),
    "quotes": ("tasks/helper.py", '"text"', "'text'"),
    "comment of a package": ("tasks/room/__init__.py", "LIMIT = 3", "LIMIT = 3  # of calls"),
    "comment in tools": ("tasks/tools/lookup.py", "# an agent reads it", ""),
    "the ledger itself": ("tasks/ledger/substeps.py", "VERSION = 1", "VERSION = 2"),
    "file that is not imported": ("tasks/unrelated.py", "tasks.helper", "tasks.verb"),
}
LOUD = {
    "operator": ("tasks/verb.py", "size + 1", "size - 1"),
    "value": ("tasks/verb.py", "size + 1", "size + 2"),
    "imported operator": ("tasks/helper.py", "x * rate", "x + rate"),
    "imported default": ("tasks/helper.py", "rate=0.5", "rate=0.25"),
    "imported text": ("tasks/helper.py", '"text"', '"another"'),
    "imported name": ("tasks/helper.py", "class Kind", "class Sort"),
    "attribute": ("tasks/helper.py", 'name = "kind"', 'name = "sort"'),
    "order": ("tasks/helper.py", "x * rate", "rate * x"),
    "new statement": ("tasks/helper.py", "return x", "x += 0\n    return x"),
    "value in a package": ("tasks/room/__init__.py", "LIMIT = 3", "LIMIT = 4"),
    "import in a function": ("params/section.py", "import verb", "import other"),
    "docstring in tools": ("tasks/tools/lookup.py", "Look a word up.", "Find a word."),
}


@pytest.mark.parametrize("change", SILENT)
def test_edit_that_keeps_keys(project, change):
    before = key()
    edit(*SILENT[change])
    assert key() == before


@pytest.mark.parametrize("change", LOUD)
def test_edit_that_changes_keys(project, change):
    before = key()
    edit(*LOUD[change])
    assert key() != before


def test_text_that_is_no_docstring_counts(project):
    before = key()
    edit("tasks/helper.py", "    from params", '    x = """Doc."""\n    from params')
    first = key()
    edit("tasks/helper.py", "    from params", '    x = """Text."""\n    from params')
    assert len({before, first, key()}) == 3


def test_place_of_a_verb_depends_on_its_module(project):
    later = "@recorded\ndef verb(step, inputs):\n    from tasks import helper\n"
    imports = "from dataclasses import dataclass\nfrom tasks.ledger.substeps import recorded\n"
    write({"tasks/verb.py": f"{imports}@dataclass(frozen=True)\nclass Inputs: ...\n{later}"})
    spec = importlib.util.spec_from_file_location("toy_verb", project / "tasks/verb.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def place():
        return SubStep("smoke", "toy", 0, 1).place(module.verb, module.Inputs())

    before = place()
    write({"tasks/helper.py": "# a comment\n" + SOURCES["tasks/helper.py"]})
    assert place() == before
    write({"tasks/helper.py": "VERSION = 2\n"})
    assert place() != before


def test_digests_are_by_path_in_the_project(project):
    digests = keys.source_digests(project / "tasks/verb.py")
    assert list(digests) == [
        "params/section.py",
        "tasks/helper.py",
        "tasks/room/__init__.py",
        "tasks/room/part.py",
        "tasks/tools/lookup.py",
        "tasks/verb.py",
    ]


def test_closure_follows_imports(project):
    write({"tasks/room/__init__.py": "import tasks.helper"})
    write({"tasks/user.py": "from tasks.room.part import PART"})

    def closure(name):
        return [str(path.relative_to(project)) for path in keys.import_closure(project / name)]

    helper = ["params/section.py", "tasks/helper.py"]
    assert closure("tasks/helper.py") == helper
    assert closure("tasks/unrelated.py") == [*helper, "tasks/unrelated.py"]
    room = ["tasks/room/__init__.py", "tasks/room/part.py"]
    assert closure("tasks/user.py") == [*helper, *room, "tasks/user.py"]


def test_relative_import_is_refused(project):
    write({"tasks/helper.py": "x = 1\nfrom .room import part\n"})
    with pytest.raises(ValueError, match=r"helper\.py, line 2, .*relative import"):
        key()


# ---------------------------------------------------------------- this project


def closure_of(name):
    return {str(path.relative_to(ROOT)) for path in keys.import_closure(ROOT / name)}


def test_rollout_does_not_depend_on_other_sections():
    closure = closure_of("tasks/rollout.py")
    assert "params/schema/agent.py" in closure
    others = ("verdict", "evaluate", "recipe", "champion", "cold_start", "benchmarks")
    assert closure.isdisjoint(f"params/schema/{name}.py" for name in others)


def test_rollout_depends_on_the_inside_of_the_sandbox():
    # The tool starts it as a script, but it decides what a call gives back. A rollout's key has the
    # sources of the tools that its agent names.
    assert "tasks/tools/python_worker.py" in closure_of("tasks/tools/python.py")
    agent = recipes.agent_of(recipes.load("tiny"))
    assert agent.sources["python"] == keys.source_digest(keys.PROJECT / "tasks/tools/python.py")
