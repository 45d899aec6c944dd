"""A process that uses structlin keeps the classes of torch and transformers as they were."""

import subprocess
import sys

import pytest

PROGRAM = """
import importlib.util, sys, tempfile, warnings
import torch
from torch import nn

CLASSES = [nn.Module, nn.Linear, torch.Tensor, nn.Parameter]
CLASSES += [torch.optim.Optimizer, torch.optim.AdamW]
has_transformers = importlib.util.find_spec("transformers")
if has_transformers:
    from transformers import GPT2Config, GPT2LMHeadModel, PretrainedConfig, PreTrainedModel
    from transformers.quantizers.base import HfQuantizer
    CLASSES += [PreTrainedModel, GPT2LMHeadModel, PretrainedConfig, HfQuantizer]


def look():
    found = {}
    for place in (*CLASSES, nn.modules.module, sys.modules["torch.optim.optimizer"]):
        for name, value in vars(place).items():
            if name in ("_abc_impl", "__builtins__"):
                continue
            held = list(value.items()) if isinstance(value, dict) and "hooks" in name else None
            found[place.__name__, name] = id(value), held
    return found


def compare(step):
    now = look()
    changed = [place for place in before.keys() | now if before.get(place) != now.get(place)]
    assert not changed, f"{step} changed {changed}"


def build():
    if has_transformers:
        config = GPT2Config(vocab_size=50, n_positions=8, n_embd=32, n_layer=1, n_head=2)
        return GPT2LMHeadModel(config)
    return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50))


warnings.simplefilter("ignore")
tokens = torch.arange(8)[None]
model = build()
model(tokens)
torch.optim.AdamW(model.parameters(), fused=True)  # torch and transformers load what they load late
before = look()
import structlin
compare("import structlin")
if has_transformers:
    import structlin.hf
    compare("import structlin.hf")
structlin.convert(model, structlin.BTT())
compare("convert")
structlin.compress(build(), structlin.LowRank(rank=4), [tokens])
compare("compress")
groups = structlin.param_groups(model, 0.01)
compare("param_groups")
optimizer = structlin.keep_ratios(torch.optim.AdamW(groups), model)
compare("keep_ratios")
y = model(tokens)
(y.logits if has_transformers else y).square().mean().backward()
optimizer.step()
compare("a step")
other = torch.optim.SGD(nn.Linear(2, 2).parameters())
assert not other._optimizer_step_pre_hooks and not other._optimizer_step_post_hooks
assert type(other) is torch.optim.SGD
structlin.summary(model)
compare("summary")
with tempfile.TemporaryDirectory() as folder:
    structlin.save(model, folder)
    if has_transformers:
        model.save_pretrained(folder)
compare("save_pretrained")
print("the same")
"""


@pytest.mark.slow
def test_a_process_is_the_same_before_and_after():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.endswith("the same\n"), done.stderr[-2000:]
