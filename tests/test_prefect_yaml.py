"""prefect.yaml holds nothing that Prefect would ignore, and Prefect accepts all that it holds."""

import asyncio
import copy
import importlib
import inspect
import json
import shutil
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import pytest
import yaml
from prefect.cli.deploy._models import (
    ConcurrencyLimitSpec,
    DeploymentConfig,
    PrefectYamlModel,
    RawScheduleConfig,
)
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentCreate
from prefect.server.api import collections
from prefect.server.schemas.schedules import CronSchedule
from prefect.utilities.schema_tools.validation import validate
from prefect.workers.base import BaseJobConfiguration
from prefect.workers.process import ProcessJobConfiguration, ProcessVariables, ProcessWorker
from pydantic import BaseModel

from flows import deploy
from flows.workers import dispatch
from params import overrides
from tasks.settings import load as settings_of
from tests import toy_project as toy

ROOT = toy.ROOT
CONTENT = yaml.safe_load((ROOT / "prefect.yaml").read_text())
FLOWS = {"retraining": deploy.retraining, "stage": deploy.stage}
# where an annotation leaves the model open: as it is written in the file
BELOW = {"schedules": [RawScheduleConfig], "concurrency_limit": [ConcurrencyLimitSpec]}
NOBODY = PrefectClient("http://127.0.0.1:9/api")  # asked for blocks, of which there are none
STEPS = {"build", "push", "pull"}  # lists of steps, each {function: its arguments}
OF_EVERY_STEP = {"id", "requires"}
VIEWS = Path(collections.__file__).with_name("collections_data") / "views"
POOLS = sorted((ROOT / "docs/pools").glob("*.json"))


def models(annotation: object) -> list[type[BaseModel]]:
    """The models in an annotation, such as Optional[List[Model]]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models(part)]


def unknown(content: Any, model: type[BaseModel], where: str = "") -> list[str]:
    """Paths of the keys that a model, or one below it, does not have."""
    known = {field.alias or name: field for name, field in model.model_fields.items()}
    found = []
    for key, value in content.items():
        path = f"{where}{key}"
        if key not in known:
            found.append(path)
        elif key in STEPS:
            found += [each for step in value or [] for each in unknown_in_step(step, path)]
        elif below := BELOW.get(key) or models(known[key].annotation):
            parts = value if isinstance(value, list) else [value]
            for part in parts:
                if isinstance(part, dict):
                    found += unknown(part, below[0], f"{path}.")
    return found


def unknown_in_step(step: dict[str, Any], where: str) -> list[str]:
    """Paths of the arguments that a step's function does not take."""
    [(function, arguments)] = step.items()
    module, _, name = function.rpartition(".")
    takes = set(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    return [f"{where}.{function}.{key}" for key in set(arguments) - takes - OF_EVERY_STEP]


def checked(content: dict[str, Any]) -> list[str]:
    """Keys that nothing reads: those of Prefect's own file, job variables, parameters."""
    found = unknown(content, PrefectYamlModel)
    for deployment in content["deployments"]:
        here = f"deployments.{deployment.get('name')}"
        variables = (deployment.get("work_pool") or {}).get("job_variables") or {}
        takes = FLOWS[deployment["entrypoint"].rpartition(":")[2]].parameters.properties
        given = [deployment.get("parameters", {})]
        given += [schedule.get("parameters", {}) for schedule in deployment.get("schedules", [])]
        found += [f"{here}.{key}" for key in set(variables) - set(ProcessVariables.model_fields)]
        found += [f"{here}.{key}" for each in given for key in set(each) - set(takes)]
    return found


def planted(*path: Any, value: Any = 1) -> dict[str, Any]:
    """The file with one more key."""
    content = copy.deepcopy(CONTENT)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return content


def test_prefect_yaml_has_only_keys_that_are_read():
    assert checked(CONTENT) == []


@pytest.mark.parametrize(
    "path",
    [
        ("deployment",),
        ("pull", 0, "prefect.deployments.steps.set_working_directory", "folder"),
        ("deployments", 0, "schedule_s"),
        ("deployments", 0, "enforce_parameters_schema"),
        ("deployments", 0, "work_pool", "queue"),
        ("deployments", 0, "work_pool", "job_variables", "work_dir"),
        ("deployments", 0, "concurrency_limit", "strategy"),
        ("deployments", 0, "schedules", 0, "time_zone"),
        ("deployments", 0, "schedules", 1, "parameters", "override"),
        ("deployments", 1, "parameters", "recipes"),
    ],
)
def test_a_misspelt_key_anywhere_is_found(path):
    [found] = checked(planted(*path))
    assert found.endswith(str(path[-1]))


@pytest.mark.parametrize("deployment", CONTENT["deployments"], ids=lambda each: each["name"])
def test_a_deployment_is_what_prefect_accepts(deployment):
    PrefectYamlModel.model_validate(CONTENT)
    read = DeploymentConfig.model_validate(deployment)
    file, _, function = deployment["entrypoint"].rpartition(":")
    assert (ROOT / file).is_file()
    flow = FLOWS[function]
    assert Path(inspect.getfile(flow.fn)) == ROOT / file
    assert read.enforce_parameter_schema
    for schedule in deployment.get("schedules", []):
        CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])
        given = deployment["parameters"] | schedule.get("parameters", {})
        validate(given, flow.parameters.model_dump_for_openapi(), raise_on_error=True)
    template = ProcessWorker.get_default_base_job_template()
    variables = deployment["work_pool"]["job_variables"]
    DeploymentCreate(name="x", flow_id=uuid4(), job_variables=variables).check_valid_configuration(
        template
    )
    asyncio.run(
        ProcessJobConfiguration.from_template_and_values(template, variables, client=NOBODY)
    )


@pytest.mark.parametrize(
    ("deployment", "given"),
    [
        (each, each["parameters"] | schedule.get("parameters", {}))
        for each in CONTENT["deployments"]
        for schedule in each.get("schedules", [])
    ],
)
def test_a_schedule_starts_a_recipe_that_holds(tmp_path, deployment, given):
    shutil.copytree(ROOT / "params", tmp_path / "params")
    overrides.apply(given["overrides"], tmp_path / "params" / f"{given['recipe']}.yaml")
    assert settings_of(given["recipe"], tmp_path / "params")


def test_no_two_deployments_start_runs_of_the_same_recipe():
    """Their limit of one run at a time is of a deployment, not of a recipe."""
    starting = [each for each in CONTENT["deployments"] if "retraining" in each["entrypoint"]]
    recipes = [each["parameters"]["recipe"] for each in starting]
    assert len(set(recipes)) == len(recipes) == 2
    assert {each["concurrency_limit"]["limit"] for each in starting} == {1}
    slugs = {schedule["slug"] for each in starting for schedule in each["schedules"]}
    assert slugs == {"nightly", "weekly"}


def test_a_pool_has_a_deployment_of_the_flow_that_stages_are_sent_to():
    pools = {each["work_pool"]["name"] for each in CONTENT["deployments"]}
    taking = {each["name"] for each in CONTENT["deployments"] if "stage" in each["tags"]}
    assert pools == taking == {"cpu", "gpu"}
    assert deploy.stage.name == dispatch.FLOW


@pytest.mark.parametrize("flow", [deploy.retraining, deploy.stage])
def test_a_flow_is_not_tried_again_by_itself_and_ends_at_some_time(flow):
    assert flow.retries == 0
    assert flow.timeout_seconds
    assert deploy.reproduce.retries == 0
    assert deploy.receive.retries == deploy.give.retries == 2


@pytest.mark.parametrize("file", POOLS, ids=lambda file: file.stem)
def test_the_template_of_a_pool_is_one_of_its_type(file):
    template = json.loads(file.read_text())
    listed = (VIEWS / "aggregate-worker-metadata.json").read_text()
    types = {name: each for one in json.loads(listed).values() for name, each in one.items()}
    default = types[file.stem]["default_base_job_configuration"]
    known = set(default["job_configuration"])
    assert set(template["job_configuration"]) <= known, "a key that this type of worker ignores"
    made = DeploymentCreate(name="x", flow_id=uuid4(), job_variables={"env": {"A": "1"}})
    made.check_valid_configuration(template)
    read = asyncio.run(
        Everything.from_template_and_values(template, {"env": {"A": "1"}}, client=NOBODY)
    )
    assert read.env == {"BEAMLINE_CHECKOUT": "/beamline", "A": "1"}
    assert "{{" not in read.model_dump_json()


class Everything(BaseJobConfiguration, extra="allow"):
    """A job of any type: what is peculiar to one is its own package's."""


def test_both_templates_are_there():
    assert [file.stem for file in POOLS] == ["docker", "kubernetes"]
