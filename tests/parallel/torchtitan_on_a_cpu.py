"""torchtitan 0.3.0 on a CPU, and a llama of two layers for its own trainer. Tests alone use this.

torchtitan takes "cuda" where torch finds no accelerator. What it then asks of the GPU is answered
here by the CPU. FlexAttention, whose backward pass torch has not on CPUs, gives way to SDPA, and
gloo, which has no PREMUL_SUM, sums.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torchtitan.tools import utils

utils.device_type, utils.device_module = "cpu", torch.cpu
utils.get_local_device = lambda: torch.device("cpu")
for name, function in {  # what DeviceMemoryMonitor asks of torch.cuda
    "current_device": lambda: 0,
    "get_device_name": lambda device=None: "CPU",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=1 << 34),
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
    "memory_stats": lambda device=None: {},
}.items():
    setattr(torch.cpu, name, function)
if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13 has none
    torch.distributed.set_timeout = lambda timeout, group=None: None

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig, derive, override  # noqa: E402
from torchtitan.config.configs import DebugConfig  # noqa: E402
from torchtitan.config.override import OverrideConfig  # noqa: E402
from torchtitan.distributed import fsdp  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    ScaledDotProductAttention,
)
from torchtitan.models.llama3 import (  # noqa: E402
    _EMBEDDING_INIT,
    _NORM_INIT,
    _build_llama3_layers,
    _output_linear_init,
    model_registry,
)
from torchtitan.models.llama3.model import Llama3Model  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

DIM, VOCABULARY, LENGTH, BATCH, LR = 64, 64, 32, 8, 3e-3

_disable_division = fsdp.disable_fsdp_gradient_division


def _sum_only(model):
    """As it was, by SUM."""
    _disable_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = _sum_only


class CausalAttention(ScaledDotProductAttention):
    """One document a sequence: no masks."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        pass


@override(target=FlexAttention.Config)
def causal(cfg: FlexAttention.Config) -> CausalAttention.Config:
    return derive(cfg, CausalAttention.Config)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **kwargs):
        super().__init__()

    def encode(self, *args, **kwargs):
        return []

    def decode(self, *args, **kwargs):
        return ""

    def get_vocab_size(self):
        return VOCABULARY


class Counting(BaseDataLoader):
    """Sequences that count in steps, from a seeded start: every rank its share of one global
    batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, local_batch_size, **kwargs):
        self.world, self.rank, self.batch, self.step = dp_world_size, dp_rank, local_batch_size, 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.step)
            batch = self.world * self.batch
            first = torch.randint(VOCABULARY, (batch, 1), generator=generator)
            by = torch.randint(1, 4, (batch, 1), generator=generator)
            tokens = (first + by * torch.arange(LENGTH + 1)) % VOCABULARY
            tokens = tokens[self.rank * self.batch : (self.rank + 1) * self.batch]
            positions = torch.arange(LENGTH).expand(self.batch, LENGTH).contiguous()
            self.step += 1
            yield (
                {"input": tokens[:, :-1].contiguous(), "positions": positions},
                tokens[:, 1:].contiguous(),
            )

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state_dict):
        self.step = state_dict["step"]


def configure(folder, overrides, steps=10, replicas=1, interval=0, stop=None, **parallelism):
    """The trainer's config: a llama of two layers, on so many replicas.

    Args:
        interval: steps between two checkpoints; 0: none.
        stop: the step to load, of those in `folder`.
    """
    spec = model_registry("debugmodel")
    spec.model = Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=_EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=_NORM_INIT),
        lm_head=Linear.Config(
            in_features=DIM, out_features=VOCABULARY, param_init=_output_linear_init(DIM)
        ),
        layers=_build_llama3_layers(
            n_layers=2,
            dim=DIM,
            n_heads=4,
            hidden_dim=256,
            attn_backend="flex",
            rope=ComplexRoPE.Config(dim=DIM // 4, max_seq_len=LENGTH, theta=10000),
        ),
    )
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=NoTokenizer.Config(),
        dataloader=Counting.Config(),
        optimizer=default_adamw(lr=LR, fused=False),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=10),
        training=TrainingConfig(
            local_batch_size=BATCH // replicas,
            seq_len=LENGTH,
            steps=steps,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(
            enable=interval > 0, interval=interval or 500, load_step=-1 if stop is None else stop
        ),
        parallelism=ParallelismConfig(**parallelism),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0, enable_structured_logging=False),
        override=OverrideConfig(imports=[f"{__name__}.causal", *overrides]),
    )
