"""A language model of random weights and a tokenizer of single bytes, for tests of the notebook."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT = "{% for turn in messages %}{{ turn.content }}{% endfor %}"


def make_tiny() -> tuple[Any, Any]:
    """The model, of two blocks, and its tokenizer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = models.BPE({letter: n for n, letter in enumerate(letters)}, [])
    tokenizer = Tokenizer(pairs)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT)
    return LlamaForCausalLM(config).eval(), fast
