"""An MCP server without the library, which starts at once.

It has some tools of mcp_server.py, and ``strange``, which answers in the ``way`` that a call asks
for. Calls are answered side by side, or with DEMO_SERIAL one after the other.
"""

import json
import os
import subprocess
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
    # Of this name, tests say which it is.
    **({os.environ["DEMO_NAME"]: schema()} if "DEMO_NAME" in os.environ else {}),
}
if os.environ.get("DEMO_CHANGES") and Path(os.environ["DEMO_CHANGES"]).exists():
    del TOOLS["add"]
WRITTEN = {
    "half": b'{"content": [{"type": "text", "text": "a\\ud800b"}]}',
    "bytes": b'{"content": [{"type": "text", "text": "a\xffb"}]}',
    "shape": b'{"content": "no list"}',
    "fine": b'{"content": [{"type": "text", "text": "fine"}]}',
    "unknown": b'{"content": [{"type": "text", "text": "before"}, {"type": "hologram", "x": 1},'
    b' {"type": "image"}, 7, {"type": "text", "text": "after"}]}',
    "resource": b'{"content": [{"type": "resource", "resource": {"uri": "a:b", "text": "held"}},'
    b' {"type": "resource_link", "uri": "a:b", "name": "n"}, {"type": "resource", "resource": 1}]}',
    "parts": b'{"content": [' + b"{}, " * 200_000 + b"{}]}",
    "keys": json.dumps(
        {"content": [], "structuredContent": {"k": os.environ.get("DEMO_TOKEN")}}
    ).encode(),
    "none": b"null",
    "list": b"[]",
    "empty": b"{}",
    "deep": b'{"content": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "number": b'{"content": [{"type": "text", "text": 7}]}',
    "error": b'{"content": [{"type": "text", "text": "no"}], "isError": "maybe"}',
    "structured": b'{"content": [], "structuredContent": [1]}',
}
writing = Lock()
note = b'{"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progress": 1}}\n'


def child():
    """Start two processes in sessions of their own, and write down their ids."""
    nested = (
        "import os, time; n = os.fork(); n or os.setsid(); n and print(os.getpid(), n, flush=True);"
        "time.sleep(600)"
    )
    started = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", nested], stdout=subprocess.PIPE, start_new_session=True
    )
    Path(os.environ["DEMO_CHILD"]).write_bytes(started.stdout.readline())


def flood():
    with writing:
        sys.stdout.buffer.write(note * 2**10)
        sys.stdout.flush()


SPENT = {  # what a call does before it answers well
    "errors": lambda: [os.write(2, b"e" * 2**16) for _ in range(2**8)],  # 16 MiB
    "flood": flood,
    "line": lambda: [os.write(1, b"x" * 2**16) for _ in range(2**9)],  # 32 MiB
    "child": child,
}


def called(tool, values):
    """Return the result of a call, as it is written."""
    if tool == "strange" and values["way"] in SPENT:
        SPENT[values["way"]]()
        return WRITTEN["fine"]
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
        # A schema of results that they would not fit.
        more = {"outputSchema": {"type": "object", "required": ["nothing"]}}
        listed = [{"name": name, "inputSchema": each, **more} for name, each in TOOLS.items()]
        page = int(message.get("params", {}).get("cursor") or 0)
        following = {"none": None, "many": None, "ever": str(page + 1), "same": "7"}[
            os.environ.get("DEMO_LIST", "none")
        ]
        if page:
            listed = [{"name": f"{page}-{n}", "inputSchema": schema()} for n in range(50)]
        if os.environ.get("DEMO_LIST") == "many":
            listed += [{"name": f"t{n}", "inputSchema": schema()} for n in range(1000)]
        cursor = {"nextCursor": following} if following else {}
        return json.dumps({"tools": listed, **cursor}).encode()
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


def serve():
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("params", {}).get("name") == "stuck":
            time.sleep(600)  # and read nothing more
        if "id" not in message:
            continue
        if "DEMO_SERIAL" in os.environ:
            reply(message)
        else:
            Thread(target=reply, args=(message,), daemon=True).start()


if __name__ == "__main__":
    serve()
