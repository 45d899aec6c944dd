"""A compressed model healed by transformers' Trainer: it learns from the dense model's logits, and
a resumed run ends as the run without a break.

    python examples/recipes/heal_with_trainer.py                    # a small Llama on characters
    python examples/recipes/heal_with_trainer.py --optimizer muon
    python examples/recipes/heal_with_trainer.py --smoke            # seconds: does it run?

On a cluster replace `make_dense` by `from_pretrained`, and `windows` by your tokens; `accelerate
launch` starts it on many GPUs. The recipe is that of `benchmarks.compression.heal`: linear warm-up,
cosine to zero, divergence of the distributions of the next token; cores and norms learn.
"""

import argparse
import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from characters import VOCABULARY, require, windows

require("transformers", "accelerate")

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from structlin import LowRank, compress
from structlin.optim import AdamW, Muon

SIZES = {"width": 128, "depth": 4, "context": 128, "batch": 8, "steps": 60, "log_every": 5}
SMOKE = {"width": 32, "depth": 1, "context": 32, "batch": 4, "steps": 6, "log_every": 1}
TEMPERATURE = 1.0
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
parser.add_argument("--smoke", action="store_true")


class HealingTrainer(Trainer):
    """A Trainer whose loss is the divergence from what a dense teacher predicts."""

    def __init__(self, *positional: Any, teacher: nn.Module, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        with torch.no_grad():
            t = self.teacher(input_ids=inputs["input_ids"]).logits
        # T^2 KL(softmax(t / T) || softmax(s / T)), the mean over tokens; logits are (batch, tokens,
        # vocabulary)
        log_q = (outputs.logits.float() / TEMPERATURE).log_softmax(-1).flatten(0, 1)
        log_p = (t.float() / TEMPERATURE).log_softmax(-1).flatten(0, 1)
        loss = nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
        loss = TEMPERATURE**2 * loss
        return (loss, outputs) if return_outputs else loss


def make_dense(sizes: dict[str, int]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes["width"],
        intermediate_size=2 * sizes["width"],
        num_hidden_layers=sizes["depth"],
        num_attention_heads=sizes["width"] // 16,
        initializer_range=0.1,  # so that the random teacher predicts something
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def make_trainer(folder: str, options: argparse.Namespace) -> HealingTrainer:
    sizes = SMOKE if options.smoke else SIZES
    arguments = TrainingArguments(
        folder,
        max_steps=sizes["steps"],
        save_steps=sizes["steps"] // 2,
        logging_steps=sizes["log_every"],
        per_device_train_batch_size=sizes["batch"],
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, sizes["steps"] // 20),
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    teacher = make_dense(sizes)
    rows = windows(512, sizes["context"])
    batches = [{"input_ids": part} for part in rows[:64].split(8)]
    student = copy.deepcopy(teacher)
    student = compress(student, LowRank(rank=1), batches, keep=0.5, include="model.layers.*")
    student.get_input_embeddings().requires_grad_(False)
    student.get_output_embeddings().requires_grad_(False)
    if options.optimizer == "muon":
        optimizer = Muon(student, lr=0.02, other_lr=arguments.learning_rate)
    else:
        optimizer = AdamW(student, lr=arguments.learning_rate, weight_decay=0.0)
    data = [{"input_ids": row} for row in rows]
    optimizers = (optimizer, None)  # the Trainer makes the scheduler
    return HealingTrainer(
        student, arguments, teacher=teacher, train_dataset=data, optimizers=optimizers
    )


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        whole = make_trainer(folder, options)
        whole.train()
        checkpoint = Path(folder) / f"checkpoint-{whole.args.save_steps}"
        resumed = make_trainer(folder, options)
        resumed.train(resume_from_checkpoint=str(checkpoint))
    losses = losses_of(whole)
    print(f"divergence {losses[0]:.4f} -> {losses[-1]:.4f}, resumed {losses_of(resumed)[-1]:.4f}")
    for name, parameter in whole.model.named_parameters():
        if not torch.equal(parameter, resumed.model.get_parameter(name)):
            raise SystemExit(f"the resumed run differs in {name}")


if __name__ == "__main__":
    main()
