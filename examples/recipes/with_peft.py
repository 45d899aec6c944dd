"""PEFT: LoRA on structured layers and on the dense ones beside them, saved, loaded, and merged.

    python examples/recipes/with_peft.py
    python examples/recipes/with_peft.py --smoke          # seconds: does it run?

The cores are frozen, the adapters learn. An adapter of a dense layer merges into it. One of a
structured layer does not, since the sum has neither structure: `densify` the model first.
"""

import argparse
import copy
from tempfile import TemporaryDirectory

import torch
from characters import VOCABULARY, require, windows

require("peft", "transformers")

import peft
from transformers import LlamaConfig, LlamaForCausalLM

from structlin import BTT, StructuredLinear, convert, densify

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--smoke", action="store_true")


def lora(*targets: str) -> peft.LoraConfig:
    config = peft.LoraConfig(r=4, target_modules=list(targets), task_type="CAUSAL_LM")
    config._register_custom_module({StructuredLinear: peft.tuners.lora.Linear})
    return config


def main() -> None:
    small = parser.parse_args().smoke
    width, depth, context, steps = (32, 1, 32, 20) if small else (256, 4, 128, 200)
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": depth}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=width // 16, **sizes)
    base = convert(LlamaForCausalLM(config), BTT(rank=1), include="ffn")  # attention stays dense
    tokens = windows(4 * steps, context)

    adapted = peft.get_peft_model(copy.deepcopy(base), lora("q_proj", "up_proj"))
    adapted.print_trainable_parameters()
    optimizer = torch.optim.AdamW(
        [p for p in adapted.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
    )
    losses = []
    for batch in tokens.split(4):
        loss = adapted(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected = adapted.eval()(tokens[:4]).logits

    with TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)  # the adapters alone
        loaded = peft.PeftModel.from_pretrained(
            copy.deepcopy(base), folder, config=lora("q_proj", "up_proj")
        )
    torch.testing.assert_close(loaded.eval()(tokens[:4]).logits, expected)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the saved adapters give the same logits")

    merged = densify(adapted).merge_and_unload()
    torch.testing.assert_close(merged(tokens[:4]).logits, expected, atol=1e-4, rtol=1e-4)
    print("densified and merged: the same logits, and an ordinary Llama")


if __name__ == "__main__":
    main()
