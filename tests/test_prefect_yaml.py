"""prefect.yaml has no key that Prefect would ignore, and values that it accepts."""

import asyncio
import copy
import importlib
import inspect
import json
import shutil
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import pytest
import yaml
from prefect.automations import Automation
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentCreate
from prefect.server.api import collections
from prefect.server.schemas.schedules import CronSchedule
from prefect.states import Failed
from prefect.utilities.schema_tools.validation import validate
from prefect.workers.base import BaseJobConfiguration
from prefect.workers.process import ProcessJobConfiguration, ProcessVariables, ProcessWorker
from pydantic import BaseModel, ValidationError

from flows import deploy
from flows.runs import dvc_command
from flows.workers import automations, dispatch
from params import overrides
from tasks.recipes import load as settings_of
from tests import toy_project as toy

ROOT = toy.ROOT
CONTENT = yaml.safe_load((ROOT / "prefect.yaml").read_text())
FLOWS = {"retraining": deploy.retraining, "stage": deploy.stage}
NOBODY = PrefectClient("http://127.0.0.1:9/api")  # asked for blocks, of which there are none
VIEWS = Path(collections.__file__).with_name("collections_data") / "views"
POOLS = sorted((ROOT / "deploy/pools").glob("*.json"))


# The keys of Prefect's file that this project uses. Prefect ignores any other key without a word;
# that it reads these is shown by tests/flows/test_deploy.py, which deploys the file.


class Schedule(BaseModel, extra="forbid"):
    slug: str
    cron: str
    timezone: str
    parameters: dict[str, Any] = {}


class ConcurrencyLimit(BaseModel, extra="forbid"):
    limit: int
    collision_strategy: Literal["CANCEL_NEW", "ENQUEUE"]


class WorkPool(BaseModel, extra="forbid"):
    name: str
    job_variables: dict[str, Any]


class Deployment(BaseModel, extra="forbid"):
    name: str
    description: str
    entrypoint: str
    tags: list[str]
    parameters: dict[str, Any] = {}
    enforce_parameter_schema: Literal[True]
    concurrency_limit: ConcurrencyLimit | None = None
    schedules: list[Schedule] = []
    work_pool: WorkPool


class PrefectYaml(BaseModel, extra="forbid"):
    name: str
    pull: list[dict[str, dict[str, Any]]]
    deployments: list[Deployment]


def unknown_keys(content: dict[str, Any]) -> list[str]:
    """Return the paths of keys that no model has; other faults are raised."""
    try:
        PrefectYaml.model_validate(content)
    except ValidationError as error:
        faults = error.errors()
        if any(fault["type"] != "extra_forbidden" for fault in faults):
            raise
        return [".".join(map(str, fault["loc"])) for fault in faults]
    return []


def unknown_arguments(step: dict[str, Any]) -> list[str]:
    """Return the arguments of a step that its function does not take."""
    [(function, arguments)] = step.items()
    module, _, name = function.rpartition(".")
    takes = set(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    return [f"{function}.{key}" for key in set(arguments) - takes]


def unread(content: dict[str, Any]) -> list[str]:
    """Return the keys that nothing reads: of the file, steps, job variables and parameters."""
    found = unknown_keys(content)
    found += [key for step in content["pull"] for key in unknown_arguments(step)]
    for deployment in content["deployments"]:
        here = f"deployments.{deployment['name']}"
        variables = deployment["work_pool"]["job_variables"]
        takes = FLOWS[deployment["entrypoint"].rpartition(":")[2]].parameters.properties
        given = [deployment.get("parameters", {})]
        given += [schedule.get("parameters", {}) for schedule in deployment.get("schedules", [])]
        found += [f"{here}.{key}" for key in set(variables) - set(ProcessVariables.model_fields)]
        found += [f"{here}.{key}" for each in given for key in set(each) - set(takes)]
    return found


def planted(*path: Any, value: Any = 1) -> dict[str, Any]:
    """Return the file with one more key."""
    content = copy.deepcopy(CONTENT)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return content


def test_every_key_is_read():
    assert unread(CONTENT) == []


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
def test_misspelt_key_is_found(path):
    [found] = unread(planted(*path))
    assert found.endswith(str(path[-1]))


@pytest.mark.parametrize("deployment", CONTENT["deployments"], ids=lambda each: each["name"])
def test_deployment_is_accepted_by_prefect(deployment):
    file, _, function = deployment["entrypoint"].rpartition(":")
    assert (ROOT / file).is_file()
    flow = FLOWS[function]
    assert Path(inspect.getfile(flow.fn)) == ROOT / file
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
def test_schedule_starts_a_valid_recipe(tmp_path, deployment, given):
    shutil.copytree(ROOT / "params", tmp_path / "params")
    overrides.apply_to(given["recipe"], given["overrides"], tmp_path / "params")
    assert settings_of(given["recipe"], tmp_path / "params")


def test_recipe_has_one_deployment():
    """The limit of one run at a time holds for a deployment, not for a recipe."""
    starting = [each for each in CONTENT["deployments"] if "retraining" in each["entrypoint"]]
    recipes = [each["parameters"]["recipe"] for each in starting]
    assert len(set(recipes)) == len(recipes) == 2
    assert {each["concurrency_limit"]["limit"] for each in starting} == {1}
    slugs = {schedule["slug"] for each in starting for schedule in each["schedules"]}
    assert slugs == {"nightly", "weekly"}


def test_each_pool_takes_stages():
    pools = {each["work_pool"]["name"] for each in CONTENT["deployments"]}
    taking = {each["name"] for each in CONTENT["deployments"] if "stage" in each["tags"]}
    assert pools == taking == {"cpu", "gpu"}
    assert deploy.stage.name == dispatch.FLOW


@pytest.mark.parametrize("flow", [deploy.retraining, deploy.stage])
def test_flow_has_a_timeout_and_no_retries(flow):
    assert flow.retries == 0
    assert flow.timeout_seconds
    assert deploy.receive.retries == deploy.push.retries == 2


@pytest.mark.parametrize("task", [deploy.run, deploy.reproduce])
def test_only_what_was_killed_is_tried_again(task):
    def again(error):
        return task.retry_condition_fn(task, None, Failed(data=error))

    assert task.retries == 2
    assert again(dvc_command.KilledError("killed"))
    assert not again(dvc_command.StageError("failed"))
    assert not again(RuntimeError("failed"))


@pytest.mark.parametrize(
    "each", automations.declared(ROOT / automations.FILE), ids=lambda e: e["name"]
)
def test_automation_is_read_whole(each):
    each = automations.with_blocks(each, dict.fromkeys(automations.blocks_of(each), str(uuid4())))
    read = Automation.model_validate(each).model_dump(mode="json", exclude_unset=True)
    assert read["actions"] == each["actions"]
    [kept] = [read["trigger"]]
    assert {
        key: sorted(value) if isinstance(value, list) else value for key, value in kept.items()
    } == {
        key: sorted(value) if isinstance(value, list) else value
        for key, value in each["trigger"].items()
    }


def test_heartbeats_are_sent_more_often_than_they_are_missed():
    lost, again, *_ = automations.declared(ROOT / automations.FILE)
    for each in CONTENT["deployments"]:
        seconds = each["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]
        assert int(seconds) >= 30, "Prefect sends no more"
        assert 5 * int(seconds) <= lost["trigger"]["within"]
    tag = again["trigger"]["match_related"]["prefect.resource.id"].removeprefix("prefect.tag.")
    tagged = [each["name"] for each in CONTENT["deployments"] if tag in each["tags"]]
    assert tagged == ["tiny", "gsm8k"]


@pytest.mark.parametrize("file", POOLS, ids=lambda file: file.stem)
def test_template_of_a_pool_is_of_its_type(file):
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
    """A job of any type."""


def test_both_templates_are_there():
    assert [file.stem for file in POOLS] == ["docker", "kubernetes"]
