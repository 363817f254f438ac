import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

from flows.tracking import progress
from flows.tracking.progress import Progress

ROOT = Path(__file__).parents[3]


def test_quick_work_prints_one_line(capsys):
    work = Progress("rollout", total=3)
    for _ in range(3):
        work.advance(1)
    assert capsys.readouterr().out == ""
    work.close()
    assert capsys.readouterr().out == "rollout: 3 of 3\n"


def test_long_work_prints_a_line_now_and_then(capsys, monkeypatch):
    work = Progress("reinforce", total=80, done=10)
    work.advance(2)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)  # the most, before the least
    work.note(reward=0.123456, success=1 / 3)
    work.advance(1)
    assert capsys.readouterr().out == "reinforce: 13 of 80, reward 0.123, success 0.333\n"
    monkeypatch.setattr(progress, "LINE_EVERY", 1e9)
    work.advance(1)
    assert capsys.readouterr().out == ""


def test_lines_come_soon_then_seldom_and_say_how_long_it_takes(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    work = Progress("cold start", total=300, done=100, unit="steps")
    printed = []  # the seconds after which there was a line
    for second in range(12, 12 * 150, 12):
        now[0] = 100.0 + second
        work.advance(1)
        if said := capsys.readouterr().out:
            printed.append(second)
            left = int(said.split(" of ")[0].split()[-1])
            assert f", about {progress.duration(12 * (300 - left))} left\n" in said
    assert printed[:4] == [12, 24, 36, 48]  # each step, while a run is young
    assert printed[-1] - printed[-2] == printed[-2] - printed[-3] == 60
    work.advance(51)
    work.close()
    assert capsys.readouterr().out == "cold start: 300 of 300 steps, in 30 min\n"


def test_a_line_of_the_same_number_comes_once_a_minute(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    work = Progress("reflexion", total=8, unit="questions")
    for second in range(10, 130, 10):  # rounds in which no task ends
        now[0] = float(second)
        work.advance(0)
    assert capsys.readouterr().out == "reflexion: 0 of 8 questions\n" * 2


def test_times_are_short():
    times = [progress.duration(seconds) for seconds in (0.4, 99, 100, 5990, 6000, 90_000)]
    assert times == ["0 s", "99 s", "2 min", "100 min", "1.7 h", "25.0 h"]


def test_newest_value_is_shown(capsys):
    work = Progress("cold start", total=2)
    work.note(loss=2.0)
    work.note(loss=1.5)
    work.advance(2)
    work.close()
    assert capsys.readouterr().out == "cold start: 2 of 2, loss 1.5\n"


def test_reused_work_is_not_none_done(capsys):
    Progress("evaluate/trained", total=30, unit="questions").close()
    assert capsys.readouterr().out == (
        "evaluate/trained: all 30 questions done before, and reused\n"
    )


def test_terminal_shows_a_bar_and_a_log_has_lines(tmp_path):
    code = """if True:
        import logging
        from flows.tracking.progress import Progress
        work = Progress("rollout", total=4, done=1)
        work.note(loss=0.5)
        logging.basicConfig(level="INFO", filename="log", format="%(message)s")
        work.advance(3)
        work.close()
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        timeout=600,
    )
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert ran.returncode == 0
    assert "rollout: 4 of 4" not in shown, "the line is rewritten in place"
    assert "rollout: 100%" in shown
    assert "4/4" in shown
    assert "loss=0.5" in shown
    assert (tmp_path / "log").read_text() == "rollout: 4 of 4, loss 0.5\n"
