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

TARGETS = ("q_proj", "up_proj")  # a dense layer of attention, a structured one of the MLP
SIZES = {"width": 256, "depth": 4, "context": 128, "steps": 200}
SMOKE = {"width": 32, "depth": 1, "context": 32, "steps": 20}
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--smoke", action="store_true")


def lora() -> peft.LoraConfig:
    config = peft.LoraConfig(r=4, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    # PEFT's private way to name a layer that it does not know; the saved file leaves it out
    config._register_custom_module({StructuredLinear: peft.tuners.lora.Linear})
    return config


def main() -> None:
    sizes = SMOKE if parser.parse_args().smoke else SIZES
    width = sizes["width"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=sizes["depth"],
        num_attention_heads=width // 16,
    )
    base = convert(LlamaForCausalLM(config), BTT(rank=1), include="ffn")  # attention stays dense
    tokens = windows(4 * sizes["steps"], sizes["context"])

    adapted = peft.get_peft_model(copy.deepcopy(base), lora())
    adapted.print_trainable_parameters()
    adapters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2, weight_decay=0.0)
    losses = []
    for batch in tokens.split(4):
        loss = adapted(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected_logits = adapted.eval()(tokens[:4]).logits

    with TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)  # the adapters alone
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder, config=lora())
    torch.testing.assert_close(loaded.eval()(tokens[:4]).logits, expected_logits)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; the saved adapters give the same logits")

    merged = densify(adapted).merge_and_unload()
    torch.testing.assert_close(merged(tokens[:4]).logits, expected_logits, atol=1e-4, rtol=1e-4)
    print("densified and merged: the same logits, and an ordinary Llama")


if __name__ == "__main__":
    main()
