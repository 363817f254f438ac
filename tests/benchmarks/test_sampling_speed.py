"""The measurement of a policy in a folder, with a small random one."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import sampling_speed
from tasks.policy.load_model import save_model


def test_a_policy_in_a_folder(tmp_path, capsys, tokenizer):
    torch.manual_seed(0)
    sizes = {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    save_model(LlamaForCausalLM(LlamaConfig(**sizes, **heads)), tmp_path)
    tokenizer.save_pretrained(tmp_path)
    small = ["--questions", "2", "--leaves", "2", "--repetitions", "1"]
    sampling_speed.main(["--policy", str(tmp_path), *small])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "loat" in line]
    assert [row[1].strip() for row in rows] == ["float32", "bfloat16"]
    assert all(float(row[4]) > 0 for row in rows)
    differences = [float(row[5].split(",")[1]) for row in rows]
    assert differences[0] < 1e-5 and differences[1] < 0.1
