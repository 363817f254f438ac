"""Sections of a recipe as many tests need them; ``model_copy(update=...)`` changes a field."""

from params.schema.base import Machine
from tasks.tools.python import PythonTool

MACHINE = Machine(threads=1, device="cpu", precision="float32")
HALF = MACHINE.model_copy(update={"precision": "bfloat16"})
PYTHON = PythonTool(
    sandbox="auto",
    cpu_seconds=1,
    wall_seconds=20,
    memory_mib=256,
    processes=8,
    file_mib=4,
    output_characters=2000,
)
