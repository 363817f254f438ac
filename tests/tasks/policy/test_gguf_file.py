import json
import sys

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from params.schema.prepare import PretrainedPolicy
from tasks.policy import load_model
from tasks.policy.lean_transformers import transformers
from tests.sections import MACHINE

FILE = "tiny.Q8_0.gguf"
ATTENTION = {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
NAMES = {  # of transformers -> of the format
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.": "blk.",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **ATTENTION,
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def settings(name, file=FILE):
    return PretrainedPolicy(kind="pretrained", name=str(name), revision=None, context=64, gguf=file)


@pytest.fixture(scope="module")
def llama(tokenizer):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(llama, tokenizer, tmp_path_factory):
    """A package whose folder has a model in GGUF, with weights of 8 bits."""
    folder = tmp_path_factory.mktemp("packages") / "tiny_in_gguf"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('it was imported')")
    write(folder / FILE, llama, tokenizer)
    return folder


def write(file, model, tokenizer, scaling=None):
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if scaling == "tensor":  # as llama.cpp writes Llama 3's
        writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    elif scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, tokenizer)
    for name, weight in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            writer.add_tensor(*tensor(name, weight, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer, tokenizer):
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_ids)
    kinds = [
        gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL
        for i in range(len(pieces))
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def tensor(name, weight, config):
    """Return name, values and kind of a weight; heads have their halves interleaved there."""
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for part, count in heads.items():
        if f"self_attn.{part}_proj" in name:
            rows, columns = weight.shape
            halves = weight.reshape(count, 2, rows // count // 2, columns)
            weight = halves.transpose(1, 2).reshape(rows, columns)
    for of_transformers, of_format in NAMES.items():
        name = name.replace(of_transformers, of_format)
    values = weight.numpy()
    if weight.ndim == 1:
        return name, values
    kind = gguf.GGMLQuantizationType.Q8_0
    return name, gguf.quants.quantize(values, kind), None, kind


def test_a_policy_in_gguf_becomes_an_ordinary_folder(
    folder, llama, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.delitem(sys.modules, folder.name, raising=False)
    assert load_model.fetch_config(settings(folder.name))["model_type"] == "llama"
    model, its_tokenizer = load_model.fetch_policy(settings(folder.name))
    load_model.save_model(model, tmp_path)
    its_tokenizer.save_pretrained(tmp_path)
    loaded = load_model.load_policy(tmp_path, MACHINE)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "lm_head.weight" not in names, "the head is the embedding"
    tokens = torch.tensor([tokenizer.encode("<answer>56</answer>")])
    with torch.no_grad():
        expected, logits = llama(tokens).logits, loaded(tokens).logits
    assert (logits - expected).abs().max() < 0.03 * expected.abs().max()  # weights of 8 bits
    again = load_model.load_tokenizer(tmp_path)
    assert again.encode("7 + 8 é") == its_tokenizer.encode("7 + 8 é")
    assert (again.eos_token, again.chat_template) == (tokenizer.eos_token, tokenizer.chat_template)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("cut.gguf", lambda whole: whole[: len(whole) // 2], "cannot be read"),
        ("header.gguf", lambda whole: whole[:100], "cannot be read"),
        ("other.gguf", lambda whole: whole.replace(b"llama", b"lalma"), "cannot be read"),
        ("version.gguf", lambda whole: whole[:4] + b"\x63" + whole[5:], "v99"),
        ("counts.gguf", lambda whole: whole[:14] + b"\x10" + whole[15:], "cannot be read"),
        ("few.gguf", lambda whole: whole[:8] + b"\x05" + whole[9:], "has no weights for model"),
        ("name.gguf", lambda whole: whole.replace(b"1.ffn_up.w", b"1.ffn_uq.w"), "up_proj"),
        ("heads.gguf", lambda whole: whole.replace(b"head_count_kv", b"head_count_kw"), "size"),
        ("ones.gguf", lambda whole: whole[:-2000] + b"\xff" * 2000, "not finite"),
        ("zeros.gguf", lambda whole: whole[:-50_000] + bytes(50_000), "nothing but zeros"),
        ("text.gguf", lambda whole: b"version https://git-lfs", "is no GGUF file: fetch it again"),
        ("empty.gguf", lambda whole: b"", "is no GGUF file: fetch it again"),
        ("gone.gguf", None, f"is no file of .*: choose of {FILE}"),
    ],
)
def test_a_bad_file_is_one_line_with_its_name(folder, tmp_path, file, content, said):
    whole = (folder / FILE).read_bytes()
    (tmp_path / (file if content else FILE)).write_bytes(content(whole) if content else whole)
    with pytest.raises(ValueError, match=f"'prepare.policy.gguf' = '{file}' .*{said}") as raised:
        load_model.fetch_policy(settings(tmp_path, file))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("scaling", ["tensor", "yarn"])
def test_positions_that_transformers_would_not_scale_are_refused(
    scaling, llama, tokenizer, tmp_path
):
    write(tmp_path / FILE, llama, tokenizer, scaling)
    with pytest.raises(ValueError, match=r"scales its positions by .*rope"):
        load_model.fetch_policy(settings(tmp_path))
