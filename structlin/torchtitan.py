"""structlin's layers and optimizers in torchtitan 0.3, by its overrides and without a fork.

    ./run_train.sh ... --parallelism.spmd_backend partial_dtensor --override.imports \
        'structlin.torchtitan.feed_forward={"structure": "btt", "rank": 2}' \
        'structlin.torchtitan.optimizer={"name": "Muon", "lr": 0.02}'

torchtitan calls an override with the config that stands in its tree, and builds what the override
returns. It imports this module by the name in the command; nothing of structlin does. Under tensor
parallelism the axis of each layer is that of the dense layer in its place: the outermost one of y
where torchtitan cuts the rows of the weight, of x where it cuts the columns.
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.utils import _unflatten_optim_state_dict, init_optim_state
from torchtitan.config import derive, override
from torchtitan.distributed.parallel_dims import MeshAxisName, ParallelDims
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig, resolve_placements

from . import optim
from ._layer import linear
from ._layer.order import OrderedCores, store_outermost_
from ._structure.arguments import require_choice
from ._structure.cut import axis_of
from ._structure.families import family
from ._structure.structure import Structure
from .parallel import Layouts, divide_layer

__all__: list[str] = []  # overrides are named in a command

OPTIMIZERS = {"AdamW": optim.AdamW, "Muon": optim.Muon, "SOAP": optim.SOAP}


# ---- layers --------------------------------------------------------------------------------------


class Cores(nn.ParameterList, Module):
    """Cores as torchtitan wants every module; their layer draws them."""

    def reset_parameters(self) -> None:
        pass


class StoredCores(OrderedCores, Module):
    """`Cores` that tensor parallelism stores in another order."""

    def reset_parameters(self) -> None:
        pass


class StructuredLinear(linear.StructuredLinear, Module):
    """`structlin.StructuredLinear` under torchtitan's Module protocol.

    The cores lie as tensor parallelism wants them for every number of processes, one included. So a
    checkpoint moves between all of them.
    """

    _parallelized: bool

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        structure: dict[str, Any] = field(default_factory=dict)
        """`Structure.to_dict()`, as large as the layer or larger."""
        label: str = ""
        """What tables call the structure."""
        weight_norm: bool = False
        norm: float | None = None
        """Frobenius norm of the matrix at the start; None: structlin's own."""
        role: str | None = None
        """How tensor parallelism cuts it, "colwise" or "rowwise"; None: it stays whole."""

    def __init__(self, config: Config) -> None:
        structure = Structure.from_dict(config.structure)
        super().__init__(
            config.in_features,
            config.out_features,
            structure,
            config.bias,
            weight_norm=config.weight_norm,
        )
        self.label = config.label or self.label
        self.role = config.role
        if self.role is not None:
            store_outermost_(self, axis_of(structure, self.role))
        self.cores.__class__ = StoredCores if isinstance(self.cores, OrderedCores) else Cores
        if config.norm is not None:
            self.match_norm_(config.norm)

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Divide the layer over the processes of tensor parallelism; torchtitan calls this."""
        if self._parallelized:
            raise ValueError("parallelize() comes once for a layer, and was called twice")
        backend = parallel_dims.spmd_backend
        if backend != "partial_dtensor" and parallel_dims.world_size > 1:
            raise ValueError(
                f"parallelism.spmd_backend={backend!r}: on several processes structlin's layers "
                "run under 'partial_dtensor' alone; add --parallelism.spmd_backend partial_dtensor"
            )
        self._parallelized = True
        if parallel_dims.tp_enabled and self.role is not None:
            mesh = parallel_dims.get_mesh("tp")
            y = _find_output_placement(self._sharding_config, mesh)
            divide_layer(self, self.role, mesh, Layouts(None, y, False), src_data_rank=None)


def _find_output_placement(sharding: ShardingConfig, mesh: Any) -> Placement | None:
    """How the dense layer's y lies after it was redistributed; None: as it was made."""
    layout = sharding.out_dst_shardings
    return None if layout is None else resolve_placements(layout, mesh)[0]


def structured(
    cfg: Linear.Config, structure: str = "btt", weight_norm: bool = False, **options: Any
) -> StructuredLinear.Config:
    """The config of the structured layer that takes a dense one's place.

    For an override with a choice of layers of your own.

    Args:
        cfg: the dense layer's, exactly torchtitan's Linear.
        structure: name of a family, see `structlin.family`.
        weight_norm: as of `structlin.StructuredLinear`.
        options: of the family, `rank=2` for example.

    Raises:
        ValueError: the layer is another kind of Linear, a Float8Linear for example; the structure
            or an option is unknown or does not fit the widths.
    """
    kind = type(cfg)
    if kind is not Linear.Config:
        raise ValueError(
            f"a {kind.__qualname__} ({cfg.in_features} -> {cfg.out_features}) multiplies in its "
            "own way: structlin takes the place of torchtitan's Linear alone. Leave these layers "
            "out of the converter (filter_fqns of Float8), or out of override.imports"
        )
    chosen = family(structure, **options)
    return derive(
        cfg,
        StructuredLinear.Config,
        structure=chosen.structure(cfg.in_features, cfg.out_features).to_dict(),
        label=chosen.label,
        weight_norm=weight_norm,
        role=_find_role(cfg),
        norm=_measure_norm(cfg),
        param_init=None,
    )


def _find_role(cfg: Linear.Config) -> str | None:
    """How tensor parallelism cuts the dense weight; None: not at all."""
    if cfg.sharding_config is None:
        return None
    weight = cfg.sharding_config.state_shardings.get("weight")
    if weight is None:
        return None
    placement = weight.axis_types[MeshAxisName.TP]
    # Shard(0) cuts the rows of the weight (out_features, in_features), which are features of y
    roles = {0: "colwise", 1: "rowwise", None: None}
    return roles[getattr(placement, "dim", None)]


def _measure_norm(cfg: Linear.Config) -> float | None:
    """The Frobenius norm of the dense weight at the start, from a draw that leaves no trace.

    All rows are drawn, as a fused projection draws its parts one by one, and 64 columns.
    """
    draw = (cfg.param_init or {}).get("weight")
    if draw is None:
        return None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        sample = torch.empty(cfg.out_features, min(cfg.in_features, 64))
        draw(sample)
    root_mean_square = sample.square().mean().sqrt().item()
    return root_mean_square * sqrt(cfg.in_features * cfg.out_features)


# torchtitan's patterns; the first star is for the way from the trainer's config to the model's
ATTENTION = "*layers.*.attention.*"
FEED_FORWARD = "*layers.*.feed_forward.w[123]"
SHARED_EXPERTS = "*layers.*.shared_experts.w[123]"


@override(target=Linear.Config, fqns=[FEED_FORWARD, SHARED_EXPERTS], description="structured MLPs")
def feed_forward(
    cfg: Linear.Config, structure: str = "btt", weight_norm: bool = False, **options: Any
) -> StructuredLinear.Config:
    """The linear layers of all MLPs; see `structured`."""
    return structured(cfg, structure, weight_norm, **options)


@override(target=Linear.Config, fqns=[ATTENTION], description="structured attention")
def attention(
    cfg: Linear.Config, structure: str = "btt", weight_norm: bool = False, **options: Any
) -> StructuredLinear.Config:
    """The linear layers of all attentions; see `structured`."""
    return structured(cfg, structure, weight_norm, **options)


@override(
    target=Linear.Config,
    fqns=[ATTENTION, FEED_FORWARD, SHARED_EXPERTS],
    description="structured blocks",
)
def layers(
    cfg: Linear.Config, structure: str = "btt", weight_norm: bool = False, **options: Any
) -> StructuredLinear.Config:
    """All linear layers of the blocks but routers of experts; see `structured`."""
    return structured(cfg, structure, weight_norm, **options)


# ---- optimizers ----------------------------------------------------------------------------------


class Optimizers(OptimizersContainer):  # type: ignore[type-arg]
    """One of structlin's optimizers for each part of the model.

    They read what each parameter is from the model, so there are no patterns of names.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        name: str = "Muon"
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts
        self.optimizers = []
        parameters = []
        for model in model_parts:
            part_optimizer = OPTIMIZERS[config.name](model, **config.options)
            _name_parameters(part_optimizer, model)
            self.optimizers.append(part_optimizer)
            for group in part_optimizer.param_groups:
                parameters += group["params"]
        self._validate_params(parameters)
        self._post_init(parameters)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a checkpoint, with the names by which structlin's optimizers check it.

        torchtitan's own way leaves the names out.
        """
        for part_optimizer in self.optimizers:
            init_optim_state(part_optimizer)
            state = _unflatten_optim_state_dict(part_optimizer, state_dict)
            for group, live_group in zip(
                state["param_groups"], part_optimizer.param_groups, strict=True
            ):
                group["param_names"] = live_group["param_names"]
            part_optimizer.load_state_dict(state)


def _name_parameters(part_optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Write into each group the names that torchtitan's checkpoints have for its parameters."""
    names = {}
    for name, parameter in model.named_parameters():
        names[parameter] = canonical_fqn(name)
    for group in part_optimizer.param_groups:
        group["param_names"] = [names[parameter] for parameter in group["params"]]


@override(target=OptimizersContainer.Config, description="structlin's optimizer")
def optimizer(
    cfg: OptimizersContainer.Config, name: str = "Muon", **options: Any
) -> Optimizers.Config:
    """structlin's optimizer in place of torchtitan's.

    Args:
        cfg: torchtitan's own, whose groups are not read: options are given here.
        name: "AdamW", with structlin's ratios, "Muon" or "SOAP".
        options: of that optimizer, `lr=0.02` for example.

    Raises:
        ValueError: `name` is another.
    """
    require_choice("name", name, tuple(OPTIMIZERS))
    return derive(cfg, Optimizers.Config, name=name, options=options)
