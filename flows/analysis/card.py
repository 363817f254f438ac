"""Write the card of a trained policy, in the format of the Hugging Face hub.

A card says what dvc.lock, the recipe and the reports of the run say, and what the base model says
of itself (origin.py). What these do not know is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from flows.analysis import reading
from flows.analysis.origin import HUB, PolicyOrigin, origin_of
from flows.runs import cache, git, pipeline
from params import recipe_files
from params.run_folders import RunFolders
from params.schema.defaults import defaults
from params.whole_file import whole_file

# stages whose outs have digests
MADE_BY = ("prepare", "cold_start", "reward_model", "reinforce", "evaluate")
LOAD = """```python
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

model = AutoModelForCausalLM.from_pretrained("<this folder>")
tokenizer = PreTrainedTokenizerFast.from_pretrained("<this folder>")
```"""


def written(recipe: str, license: str | None = None, loop: str = "") -> str:
    """Return the card of a recipe's trained policy as Markdown, with its metadata before it.

    ``license``: an identifier of the hub, such as apache-2.0. ``loop``: how the policy is asked
    (card_code.py). Raises ValueError where the recipe has not run, or the policy or the recipe are
    not those in dvc.lock.
    """
    file = whole_file(recipe, Path("params"))
    written = recipe_files.resolve(recipe, Path("params"))
    settings = written.values
    locked = _checked(recipe, file, settings)
    verdict = _json(RunFolders(recipe).verdict)
    origin = origin_of(settings["prepare"]["policy"])
    table = RunFolders(recipe).table
    sections = {
        "": _introduction(recipe, settings, origin),
        "Base model": _base_model(origin),
        "Load": LOAD,
        "Ask": loop,
        "Evaluation": table.read_text().strip() if table.is_file() else "",
        "Verdict": _verdict(verdict),
        "Recipe": f"`{file}`:\n\n```yaml\n{written.text().strip()}\n```",
        "Data": _digests(recipe, locked),
        "PolicyOrigin": _origin(recipe, locked),
    }
    metadata = _metadata(recipe, settings, verdict, origin, license)
    text = "\n\n".join(
        f"## {title}\n\n{body}" if title else body for title, body in sections.items() if body
    )
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}\n"))


def _checked(recipe: str, file: Path, now: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return dvc.lock's stages. Raises ValueError where they are not of what is here."""
    trained, locked = RunFolders(recipe).trained, pipeline.locked()
    if not trained.is_dir() or f"reinforce@{recipe}" not in locked:
        raise reading.missing(recipe, trained)
    digest = pipeline.digests(f"reinforce@{recipe}")[trained.as_posix()]
    if cache.digest_of(trained) != digest:
        raise ValueError(
            f"{trained} is not what dvc.lock says ({digest}): `dvc checkout {trained}` brings it "
            "back"
        )
    faults = set[str]()
    for stage in MADE_BY:
        then = pipeline.recipe_values(locked.get(f"{stage}@{recipe}", {}), recipe)
        for key, value in then.items():
            faults |= set(_changes(key, value, _value(now, key)))
    if faults:
        raise ValueError(
            f"{file} is not that of the run: {', '.join(sorted(faults))}: restore the file, or run "
            f"`make run RECIPE={recipe}`"
        )
    return locked


def _value(recipe: Any, key: str) -> Any:
    """Return the value at a path such as evaluate.panel; None where there is none."""
    return reduce(lambda section, name: (section or {}).get(name), key.split("."), recipe)


def _changes(key: str, then: Any, now: Any) -> Iterator[str]:
    """Yield the values of a section that have changed, each with its path.

    A key that is left out has its default.
    """
    then, now = (defaults().get(key) if value is None else value for value in (then, now))
    if isinstance(then, dict) and isinstance(now, dict):
        for name in [*then, *(now.keys() - then.keys())]:
            yield from _changes(f"{key}.{name}", then.get(name), now.get(name))
    elif then != now:
        yield f"'{key}' is {now!r} and was {then!r}"


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}


# ---------------------------------------------------------------- metadata


def _metadata(
    recipe: str,
    settings: Mapping[str, Any],
    verdict: Mapping[str, Any],
    origin: PolicyOrigin,
    license: str | None,
) -> ModelCardData:
    """Return the metadata of the hub; the result is the verdict's measure, as a share.

    The licence is that of the base model, unless ``license`` says another one.
    """
    algorithm = settings["reinforce"]["algorithm"]
    results = [_result(recipe, verdict)] if verdict else None
    return ModelCardData(
        base_model=origin.base_model,
        base_model_revision=origin.revision,
        license=license or origin.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["beamline", "reinforcement-learning", "tool-use", algorithm],
        model_name=recipe if results else None,
        eval_results=results,
    )


def _result(recipe: str, verdict: Mapping[str, Any]) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        task_name="Held-out tasks with tools",
        dataset_type="beamline",
        dataset_name=f"{recipe}, {verdict['questions']} tasks of the test split",
        metric_type=verdict["measure"],
        metric_value=verdict["means"]["trained"],
    )


# ---------------------------------------------------------------- sections


def _introduction(recipe: str, settings: Mapping[str, Any], origin: PolicyOrigin) -> str:
    learning = settings["reinforce"]
    tools = [*(settings["tools"] or {}), *(settings.get("environment") or {})]
    acts = f" that acts with {', '.join(tools)}" if tools else ""
    cold_start = settings["cold_start"]
    before = f"after {cold_start['steps']} supervised steps" if cold_start else "without cold start"
    return (
        f"# {recipe}\n\nA language model{acts}, trained by reinforcement learning with Beamline: "
        f"{learning['iterations']} iterations of {learning['algorithm']}, {before}, "
        f"from {origin.described}."
    )


def _base_model(origin: PolicyOrigin) -> str:
    """Return what is known of the model that training began with; "" where nothing is."""
    lines = []
    if origin.base_model:
        lines.append(f"- Model: [{origin.base_model}]({HUB}/{origin.base_model})")
    if origin.license:
        lines.append(f"- Licence: {origin.license}, which is stated in {origin.stated_in}")
    return "\n".join(lines)


def _verdict(verdict: Mapping[str, Any]) -> str:
    if not verdict:
        return ""
    said = "Promoted" if verdict["promote"] else "Rejected"
    gates = ", ".join(
        f"{gate['table']} {'passed' if gate['passed'] else '**failed**'}"
        for gate in verdict["gates"]
    )
    return f"{said}: {verdict['reason']}.\n\nGates of the tables: {gates}."


def _digests(recipe: str, locked: Mapping[str, Any]) -> str:
    """Return a table of the files that the policy was made from, and of what the run made."""
    stages = [locked[name] for stage in MADE_BY if (name := f"{stage}@{recipe}") in locked]
    files = [*(dep for dep in stages[0]["deps"] if dep["path"].startswith("data/"))]
    files += [out for stage in stages for out in stage.get("outs", []) if "md5" in out]
    lines = dict.fromkeys(f"| `{each['path']}` | `{each['md5']}` |" for each in files)
    return "\n".join(["DVC's digests:", "", "| | MD5 |", "|---|---|", *lines])


def _origin(recipe: str, locked: Mapping[str, Any]) -> str:
    """Return the commit that restores the run, and the version that wrote the weights."""
    lines = []
    if restored := commit_of(recipe, locked):
        commit, named = restored
        lines.append(
            f"- Commit `{commit}`; `beamline reproduce {named}` restores the run. "
            "The versions of all packages are in its `constraints.txt`."
        )
    config = _json(RunFolders(recipe).trained / "config.json")
    if version := config.get("transformers_version"):
        lines.append(f"- Weights in the format of transformers {version}.")
    return "\n".join(lines)


def commit_of(recipe: str, locked: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the commit of the run and a name for it, or None where it has not been committed."""
    digest = pipeline.digests(f"reinforce@{recipe}")[f"models/{recipe}/trained"]
    for branch in git.runs_with(digest):
        return git.resolve(branch), branch
    here = git.revision().commit
    if here and git.committed("dvc.lock") and git.locked_at(here) == locked:
        return here, here
    return None
