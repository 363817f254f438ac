"""A toy project whose three stages hand on digests and leave records, as those of a training do."""

import json
import sys
from pathlib import Path

from tests import toy_project as toy
from tests.checkout import others_parent

PIPELINE = """
vars:
  - recipes:
      toy: params/toy.yaml
stages:
  prepare:
    foreach: ${recipes}
    do:
      cmd: exec python prepare.py ${key}
      deps:
        - prepare.py
        - questions.jsonl
      params:
        - ${item}:
            - seed
      outs:
        - data/${key}/questions
        - data/${key}/records/prepare.jsonl
  reinforce:
    foreach: ${recipes}
    do:
      cmd: exec python reinforce.py ${key}
      deps:
        - loss.py
        - reinforce.py
        - data/${key}/questions
      params:
        - ${item}:
            - reinforce
      outs:
        - models/${key}/trained
        - data/${key}/trees
        - data/${key}/records/reinforce.jsonl
  evaluate:
    foreach: ${recipes}
    do:
      cmd: exec python evaluate.py ${key}
      deps:
        - evaluate.py
        - models/${key}/trained
      params:
        - ${item}:
            - evaluate
      outs:
        - data/${key}/records/evaluate.jsonl
      metrics:
        - reports/${key}/metrics.json:
            cache: false
"""

COMMON = """
import hashlib, json, os, sys, time
from pathlib import Path
import yaml
from flows.host.parents import die_with_parent

die_with_parent()
recipe = yaml.safe_load(Path("params/toy.yaml").read_text())

def digest(*parts):
    return hashlib.md5(json.dumps(parts).encode()).hexdigest()

def write(path, text):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)

def record(lines, stage, iteration, verb, inputs, artifacts, **rest):
    inputs = {name: value for name, value in inputs.items()}
    lines.append(json.dumps({"stage": stage, "iteration": iteration, "verb": verb,
        "key": digest(inputs), "inputs": inputs, "artifacts": artifacts,
        "seed": recipe["seed"], **rest}))
print(Path(sys.argv[0]).stem, "has run")
"""

PREPARE = """
rows = Path("questions.jsonl").read_text()
write("data/toy/questions", rows)
lines = []
record(lines, "prepare", 0, "prepare", {"seed": recipe["seed"]}, {"questions": digest(rows)})
write("data/toy/records/prepare.jsonl", "".join(line + "\\n" for line in lines))
"""

# A policy is a number.
REINFORCE = """
from loss import loss
settings, lines, policy = recipe["reinforce"], [], 1.0
rows = [json.loads(row) for row in Path("data/toy/questions").read_text().splitlines()]
source = hashlib.md5(Path("loss.py").read_bytes()).hexdigest()
for iteration in range(settings["iterations"]):
    row = rows[iteration]
    trees = digest(row, policy)
    write(f"data/toy/trees/{iteration}.json", json.dumps(row))
    ids = [row["id"], *(f"{row['id']}-{n}" for n in range(1, 9))]
    asked = {"questions": ids, "cursor": iteration + 1}
    made = {"trees": trees}
    record(lines, "reinforce", iteration, "rollout", {"question": digest(row)}, made, **asked)
    rate = settings["update"]["learning_rate"]
    policy += rate * loss(row["value"])
    inputs = {"settings": json.dumps(settings["update"]), "source": source, "trees": trees}
    record(lines, "reinforce", iteration, "update", inputs, {"policy": digest(policy)})
write("models/toy/trained", str(policy))
write("data/toy/records/reinforce.jsonl", "".join(line + "\\n" for line in lines))
"""

EVALUATE = """
if "BEAMLINE_PAUSE" in os.environ:  # a test wants to kill a run here
    Path("begun").touch()
    time.sleep(60)
policy, lines = float(Path("models/toy/trained").read_text()), []
mean = policy / 100
record(lines, "evaluate/trained", 0, "rollout", {"policy": digest(policy)}, {"trees": digest(mean)})
write("data/toy/records/evaluate.jsonl", "".join(line + "\\n" for line in lines))
write("reports/toy/metrics.json",
      json.dumps({"success": {"trained": {"mean": mean, "low": mean, "high": mean}}}))
"""
LOSS = """# what is learned from
def loss(value):
    return 2 * value
"""


def create(folder: Path, remote: str | None = None) -> str:
    """Make the project, with a default remote where one is given; its commit."""
    toy.create(folder, flows=False)
    for file in ("first.py", "later.py"):
        (folder / file).unlink()
    sources = {"prepare": PREPARE, "reinforce": REINFORCE, "evaluate": EVALUATE}
    for name, text in sources.items():
        (folder / f"{name}.py").write_text(COMMON + text)
    (folder / "loss.py").write_text(LOSS)
    (folder / "dvc.yaml").write_text(PIPELINE)
    toy.write_recipe(folder, reinforce__iterations=4)
    rows = [json.dumps({"id": f"q{number}", "value": number}) for number in range(1, 6)]
    (folder / "questions.jsonl").write_text("".join(row + "\n" for row in rows))
    if remote:
        toy.set_remote(folder, remote)
    return toy.commit(folder)


def retrain(folder: Path, api: str, *changes: str) -> str:
    """Run the last commit with changed values, as a user does; the run's branch."""
    command = (sys.executable, "-m", "flows.retrain", "toy", "--set", *changes)
    ran = toy.run(folder, *command, PREFECT_API_URL=api, **others_parent())
    assert ran.returncode == 0, ran.stdout
    return ran.stdout.splitlines()[-1]
