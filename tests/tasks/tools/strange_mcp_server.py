"""An MCP server without the library, which answers a call in the ``way`` that the call asks for."""

import json
import sys

SCHEMA = {"type": "object", "properties": {"way": {"type": "string"}}, "required": ["way"]}
WRITTEN = {
    "half": b'{"content": [{"type": "text", "text": "a\\ud800b"}]}',
    "bytes": b'{"content": [{"type": "text", "text": "a\xffb"}]}',
    "shape": b'{"content": "no list"}',
    "fine": b'{"content": [{"type": "text", "text": "fine"}]}',
}


def answered(message):
    if message["method"] == "initialize":
        version = message["params"]["protocolVersion"]
        about = {"protocolVersion": version, "capabilities": {"tools": {}}}
        return json.dumps({**about, "serverInfo": {"name": "strange", "version": "1"}}).encode()
    if message["method"] == "tools/list":
        return json.dumps({"tools": [{"name": "answer", "inputSchema": SCHEMA}]}).encode()
    if message["method"] == "tools/call":
        way = message["params"]["arguments"]["way"]
        return WRITTEN[way] if way in WRITTEN else sys.exit(3)
    return None


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = answered(message)
        body = b'"result": ' + result if result else b'"error": {"code": -32601, "message": "no"}'
        head = b'{"jsonrpc": "2.0", "id": %d, ' % message["id"]
        sys.stdout.buffer.write(head + body + b"}\n")
        sys.stdout.flush()
