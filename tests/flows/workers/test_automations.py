"""Who is told about a run: events, the automations of automations.yaml, and a listener."""

import contextlib
import http.server
import json
import queue
import threading

import pytest
from prefect import flow, tags
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.context import refresh_global_settings_context

from flows.tracking import alarm_report, outcome_report
from flows.tracking.alarms import Alarm
from flows.tracking.outcome_report import Findings
from flows.tracking.run import start_run
from flows.workers import automations, connection, server
from tests import toy_project as toy

PATIENCE = 120  # seconds on a loaded machine


class Listener(http.server.BaseHTTPRequestHandler):
    """The other end of a webhook, as that of a chat."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.messages.put(json.loads(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def chat():
    """A chat's webhook: its address, and the messages that it gets."""
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    served.messages = queue.Queue()
    thread = threading.Thread(target=served.serve_forever, args=(0.01,))
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


@pytest.fixture
def reacting(tmp_path, monkeypatch, empty_store):
    """A server that reacts to events, as the configured one; a folder with a rejected run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(toy.ROOT))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    server.HOME.mkdir(parents=True)
    (tmp_path / ".beamline/mlflow.db").write_bytes(empty_store)
    with (tmp_path / "log").open("wb") as log:
        process, port = server.start_prefect("ui", 0, log)
        server.await_answer(process, port, "/api/health", log.name)
    monkeypatch.setenv("PREFECT_API_URL", f"http://{server.HOST}:{port}/api")
    refresh_global_settings_context()
    yield tmp_path
    server.stop(process)


def judged(folder, promote):
    (folder / "reports/toy").mkdir(parents=True, exist_ok=True)
    verdict = {"promote": promote, "reason": "3 points below the champion", "against": "champion"}
    (folder / "reports/toy/verdict.json").write_text(json.dumps(verdict))


def test_people_are_told_about_rejections_alarms_and_failures(reacting, chat, capsys):
    declared = automations.declared(toy.ROOT / automations.FILE)
    automations.install(declared)
    said = capsys.readouterr().out
    assert said.count("made the automation") == 2
    assert said.count("the server has no block 'be-told' (docs/deployments.md") == 3
    CustomWebhookNotificationBlock(
        name="chat",
        url=f"http://127.0.0.1:{chat.server_port}/",
        json_data={"text": "{{subject}}\n{{body}}"},
    ).save("be-told")
    automations.install(declared)
    said = capsys.readouterr().out
    assert (said.count("updated the automation"), said.count("made the automation")) == (2, 3)

    @flow(name="retrain")
    def ending():
        run = start_run("toy", {"mlflow.source.git.commit": "c" * 40})
        found = Findings(["success 3 → 2 %"], server="http://here", question="/page/1#question=2")
        for promote in (True, False):  # nobody is told about the first
            judged(reacting, promote)
            outcome_report.emit_verdict("toy", run, found)
        alarm_report._emit("toy", Alarm("no_spread", 7, "all rewards are equal"), run.commit)

    @flow(name="retraining", flow_run_name="retraining toy")
    def failing():
        raise RuntimeError("no room")

    with connection.prefect_server():
        ending()
        with tags("retraining"), contextlib.suppress(RuntimeError):
            failing()
    texts = {chat.messages.get(timeout=PATIENCE)["text"] for _ in range(3)}
    assert texts == {
        "toy is not promoted\nsuccess 3 → 2 %\nhttp://here/page/1#question=2\n",
        "toy: no_spread in iteration 7\nall rewards are equal",
        "retraining toy has failed\nFlow run encountered an exception: RuntimeError: no room",
    }
    assert chat.messages.empty()
