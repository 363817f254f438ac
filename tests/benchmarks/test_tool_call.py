"""The benchmark of a call of the Python tool."""

from benchmarks import tool_call


def test_time_of_all_processes_of_a_call_is_counted(monkeypatch):
    """Those of the code are children of children of the worker, and have ended."""
    burn = "import time\nwhile time.process_time() < 0.2: pass\nprint('done')"
    monkeypatch.setattr(tool_call, "CODE", burn)
    monkeypatch.setattr(tool_call, "RESULT", "done")
    with tool_call.python_tool(
        tool_call.PythonTool.model_validate({"sandbox": "unshare", **tool_call.SETTINGS}), 1
    ) as run:
        processor, _ = tool_call.measured(run, 2)
    assert processor >= 180
