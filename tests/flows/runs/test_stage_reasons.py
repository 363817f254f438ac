from flows.runs.stage_reasons import reasons


def test_settings_and_data_are_all_named_before_code():
    files = dict.fromkeys(["tasks/rollout.py", "tasks/tools", "tasks/trees", "flows/__init__.py"])
    deps = {
        **dict.fromkeys([*files, "tasks/learning"], "modified"),
        "data/mine/questions": "modified",
        "data/sources": "modified",
        "params/mine.yaml": {"seed": "modified", "reinforce": "modified"},
        "params/algorithms.yaml": {"arpo": "modified"},
        "own": "modified",
    }
    reward = [{"answer": {"wrong": 0.0}}, {"format": {"broken": -1.0}}]
    now = [reward[0], {"format": {"broken": -2.0}}]
    before = {"seed": 0, "reinforce": {"iterations": 2, "reward": reward}}
    after = {"seed": 7, "reinforce": {"iterations": 3, "reward": now}}
    assert reasons(
        [{"changed deps": deps}, {"changed outs": {"models/mine": "deleted"}}, "changed command"],
        {"params/mine.yaml": before, "params/algorithms.yaml": {"arpo": {"ratio": "token"}}},
        {"params/mine.yaml": after, "params/algorithms.yaml": {"arpo": {"ratio": "turn"}}},
    ) == [
        "seed: 0 -> 7",
        "reinforce.iterations: 2 -> 3",
        "reinforce.reward.format.broken: -1.0 -> -2.0",
        "algorithms.yaml arpo.ratio: token -> turn",
        "data: data/sources changed, own changed",
        "from earlier stages: data/mine/questions changed",
        "results: models/mine missing",
        "code: tasks/rollout.py, tasks/tools, tasks/trees, flows/__init__.py and 1 more",
        "changed command",
    ]


def test_key_that_comes_or_goes():
    deps = {"params/mine.yaml": {"judge": "new"}}
    assert reasons([{"changed deps": deps}], {}, {"params/mine.yaml": {"judge": "a model"}}) == [
        "judge: null -> a model"
    ]


def test_rows_that_others_have_added_to_a_table_are_named_and_not_shown():
    """After a merge of a new version, a dozen more rows are a line, not two hundred."""
    file, row = "params/benchmarks.yaml", {"scorer": "exact", "hub": None}
    before = dict.fromkeys(["a", "b", "c", "gone", "same"], row)
    now = {**dict.fromkeys(["a", "b", "c"], row | {"licence": "MIT"}), "same": row}
    now |= {f"new{number}": row for number in range(6)}
    changed = {name: "modified" for name in {**before, **now} if before.get(name) != now.get(name)}
    assert reasons([{"changed deps": {file: changed}}], {file: before}, {file: now}) == [
        "benchmarks.yaml a.licence: nothing -> MIT",
        "benchmarks.yaml b.licence: nothing -> MIT",
        "benchmarks.yaml rows changed, too: c",
        "benchmarks.yaml new rows: new0, new1, new2, new3 and 2 more",
        "benchmarks.yaml rows gone: gone",
    ]
