"""Sections of a recipe as many tests need them; ``model_copy(update=...)`` changes a field."""

from params.schema.base import Machine
from params.schema.reinforce import Update
from params.schema.reward_model import RewardModel
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
UPDATE = Update(
    learning_rate=1e-2,
    warmup_updates=0,
    weight_decay=0.1,
    adam_betas=(0.9, 0.95),
    gradient_clip=1e9,
    epochs=1,
    mini_batches=1,
    micro_batch_tokens=10_000,
    critic_learning_rate=1e-2,
    recompute=False,
)
REWARD_MODEL = RewardModel(
    labels=0.5,
    scored="all",
    held_out=0.4,
    questions=8,
    loss="classification",
    steps=6,
    batch=8,
    micro_batch_tokens=10_000,
    learning_rate=1e-2,
    warmup_steps=0,
    weight_decay=0.0,
    gradient_clip=1e9,
    save_every=2,
    again=None,
)
