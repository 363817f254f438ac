"""An MCP server without the library, which starts at once.

It has some tools of mcp_server.py, and ``strange``, which answers in the ``way`` that a call asks
for. Calls are answered side by side.
"""

import json
import os
import sys
import time
from pathlib import Path
from threading import Lock, Thread


def schema(**arguments):
    properties = {name: {"type": kind} for name, kind in arguments.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}


TOOLS = {
    "add": schema(a="integer", b="integer"),
    "process": schema(),
    "slow": schema(seconds="number"),
    "stuck": schema(),
    "strange": schema(way="string"),
}
if os.environ.get("DEMO_CHANGES") and Path(os.environ["DEMO_CHANGES"]).exists():
    del TOOLS["add"]
WRITTEN = {
    "half": b'{"content": [{"type": "text", "text": "a\\ud800b"}]}',
    "bytes": b'{"content": [{"type": "text", "text": "a\xffb"}]}',
    "shape": b'{"content": "no list"}',
    "fine": b'{"content": [{"type": "text", "text": "fine"}]}',
}
writing = Lock()


def called(tool, values):
    """Return the result of a call, as it is written."""
    if tool == "strange":
        return WRITTEN[values["way"]] if values["way"] in WRITTEN else os._exit(3)
    if tool == "slow":
        time.sleep(values["seconds"])
    said = {
        "add": lambda: str(values["a"] + values["b"]),
        "process": lambda: str(os.getpid()),
        "slow": lambda: "late",
    }[tool]()
    return json.dumps({"content": [{"type": "text", "text": said}]}).encode()


def answered(message):
    if message["method"] == "initialize":
        version = message["params"]["protocolVersion"]
        about = {"protocolVersion": version, "capabilities": {"tools": {}}}
        return json.dumps({**about, "serverInfo": {"name": "strange", "version": "1"}}).encode()
    if message["method"] == "tools/list":
        listed = [{"name": name, "inputSchema": each} for name, each in TOOLS.items()]
        return json.dumps({"tools": listed}).encode()
    if message["method"] == "tools/call":
        return called(message["params"]["name"], message["params"].get("arguments", {}))
    return None


def reply(message):
    result = answered(message)
    body = b'"result": ' + result if result else b'"error": {"code": -32601, "message": "no"}'
    head = b'{"jsonrpc": "2.0", "id": %d, ' % message["id"]
    with writing:
        sys.stdout.buffer.write(head + body + b"}\n")
        sys.stdout.flush()


for line in sys.stdin:
    message = json.loads(line)
    if message.get("params", {}).get("name") == "stuck":
        time.sleep(600)  # and read nothing more
    if "id" in message:
        Thread(target=reply, args=(message,), daemon=True).start()
