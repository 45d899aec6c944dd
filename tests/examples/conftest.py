"""The examples, which import each other by name, and a text that their models learn."""

import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "notebooks")]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, naïvely. " * 40, encoding="utf-8")
    return path


@pytest.fixture
def write_gguf():
    return write


def write(path, pre="smollm", width=32):
    """A llama of one block of random weights and its tokenizer of byte pairs."""
    gguf = pytest.importorskip("gguf")
    tokens = ["<|endoftext|>", *map(chr, range(ord("!"), ord("["))), "Ġ", "01"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(["0 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(tokens), width),
        "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,),
        "blk.0.ffn_norm.weight": (width,),
        "blk.0.attn_q.weight": (width, width),
        "blk.0.attn_k.weight": (width // 2, width),
        "blk.0.attn_v.weight": (width // 2, width),
        "blk.0.attn_output.weight": (width, width),
        "blk.0.ffn_gate.weight": (2 * width, width),
        "blk.0.ffn_up.weight": (2 * width, width),
        "blk.0.ffn_down.weight": (width, 2 * width),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, random.normal(0, 0.2, size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
