"""The command that compares a judge with labelled answers."""

import json
import math
from pathlib import Path

import pytest

from flows.commands import judge as command
from flows.commands.judge import agreement, load_labelled
from tasks import recipes
from tasks.chat import FOLDER
from tests.chat_server import open_chat_server
from tests.judges import TEMPLATE, honest, settings

ROOT = Path(__file__).parents[2]


def found(*scores, missing=0):
    return [
        {"score": score, "without_verdict": float(n < missing)} for n, score in enumerate(scores)
    ]


def test_agreement_by_hand():
    """Seven of ten agree; a verdict that is missing is among the disagreements."""
    labels = [True] * 7 + [False] * 3
    compared = agreement(labels, found(1, 1, 1, 1, 1, 0, 0, 1, 0, 0, missing=1))
    assert (compared.agreed, compared.accuracy) == (7, 0.7)
    assert compared.confusion == [[2, 1], [2, 5]]
    by_chance = 0.7 * 0.6 + 0.3 * 0.4
    assert compared.kappa == pytest.approx((0.7 - by_chance) / (1 - by_chance))
    z, share = 1.959964, 0.7
    centre, spread = share + z**2 / 20, z * math.sqrt(share * 0.3 / 10 + z**2 / 400)
    bounds = [(centre - spread) / (1 + z**2 / 10), (centre + spread) / (1 + z**2 / 10)]
    assert [compared.low, compared.high] == pytest.approx(bounds, abs=1e-5)
    assert compared.without_verdict == 1
    assert math.isnan(agreement([True, True], found(1, 1)).kappa)


def test_every_fault_of_a_file_is_named(tmp_path):
    good = {"question": "q", "accepted": "a", "answer": "a", "right": True}
    rows = [good, good | {"right": 1}, good | {"accepted": []}, {"question": "q"}, 3]
    file = tmp_path / "labels.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n{\n")
    with pytest.raises(ValueError, match=r"line 2: 'right' = 1") as caught:
        load_labelled(file)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0][-1] for line in lines] == ["2", "3", "4", "5", "6"]
    file.write_text(json.dumps(good | {"question": "a\u2028b"}, ensure_ascii=False))
    assert [each.asked.question for each in load_labelled(file)] == ["a\u2028b"]
    for text in ("", "\xff"):
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=r"labels\.jsonl"):
            load_labelled(file)


def test_command_reports_agreement_and_asks_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(FOLDER, str(tmp_path / "chat"))
    file = tmp_path / "labels.jsonl"
    rows = [
        {"question": f"What is {n}?", "accepted": [str(n)], "answer": str(answer), "right": right}
        for n, answer, right in [(1, 1, True), (2, 2, True), (3, 4, False), (5, 6, True)]
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    with open_chat_server(honest) as server:
        recipe = recipes.load("smoke").model_copy(update={"judge": settings(server)})
        monkeypatch.setattr(recipes, "load", lambda name, folder: recipe)
        monkeypatch.setattr(command.judge, "load_prompt", lambda file: TEMPLATE)
        for asked, cached in ((4, 0), (0, 4)):
            assert command.main(["smoke", "--labelled", str(file)]) == 0
            printed = capsys.readouterr().out
            assert "accuracy 75.0% (3 of 4)" in printed
            assert f"{asked} requests asked, {cached} taken from disk" in printed
        assert len(server.requests) == 4
    assert command.main(["smoke", "--labelled", str(tmp_path / "none")]) == 2
