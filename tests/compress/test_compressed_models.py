"""Sequential calibration of the models that people have: each arrives at its layers in its own way.

The oracle is the theorem: where the structure can hold every matrix, nothing changes; and where it
cannot, no layer's outputs are further from the dense model's than its weights are.
"""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from benchmarks import zoo
from structlin import LowRank, StructuredLinear, plan, plan_compression
from structlin._compress.replay import CheckNumbers
from tests.compress.test_project import Routed

WIDTH = 16
IDS = torch.randint(3, 50, (6, 10), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[::2, 7:] = 0
PADDED = IDS * MASK
IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class UNet(nn.Module):
    """Each block on the way up reads what one on the way down made."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            kept.append(x := layer(x).tanh())
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], dim=-1)).tanh()
        return x


def masked() -> list[dict[str, Tensor]]:
    pairs = zip(PADDED.split(3), MASK.split(3), strict=True)
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in pairs]


def timm_vit() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zoo.import_timm()
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": 2}
    return timm.models.VisionTransformer(**sizes, num_classes=3)


def encoder() -> tuple[nn.Module, list[object]]:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    parts = zip(torch.randn(6, 10, WIDTH).split(3), (MASK == 0).split(3), strict=True)
    batches = [{"src": part, "src_key_padding_mask": mask} for part, mask in parts]
    return nn.TransformerEncoder(layer, 2), batches


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))


def decoded(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [batch | {"decoder_input_ids": batch["input_ids"][:, :5]} for batch in batches]


BUILD = {
    "bert": lambda: (zoo.MODELS["bert"](), masked()),
    "gpt2": lambda: (zoo.MODELS["gpt2"](), [{"input_ids": ids} for ids in IDS.split(2)]),
    "llama": lambda: (zoo.MODELS["llama"](), list(IDS.split(3))),
    "vit": lambda: (zoo.MODELS["vit"](), list(IMAGES.split(3))),
    "t5": lambda: (zoo.MODELS["t5"](), decoded(masked())),
    "timm": lambda: (timm_vit(), list(IMAGES.split(3))),
    "encoder": encoder,
    "mlp": lambda: (mlp(), list(torch.randn(30, WIDTH).split(10))),
    "experts": lambda: (Routed(), list(torch.randn(24, WIDTH).split(3))),
}
MORE = {  # without padding
    "t5": lambda: (
        zoo.MODELS["t5"](),
        decoded([{**each, "attention_mask": torch.ones_like(MASK[:3])} for each in masked()]),
    ),
    "u-net": lambda: (UNet(), list(torch.randn(60, WIDTH).split(20))),
    "swin": lambda: (zoo.MODELS["swin"](), list(IMAGES.split(3))),
    "mlp": BUILD["mlp"],
    "vit": BUILD["vit"],
}


def build(name: str, kinds=BUILD) -> tuple[nn.Module, list[object]]:
    if name in zoo.MODELS:
        pytest.importorskip("transformers")
    return kinds[name]()


def run(model: nn.Module, batch: object) -> Tensor:
    with torch.no_grad(), CheckNumbers(model):  # torch's fused encoder puts zeros at padding
        output = model(**batch) if isinstance(batch, dict) else model(batch)
    return output if isinstance(output, Tensor) else output[0]


def full_rank(model: nn.Module) -> dict[str, LowRank]:
    """Of each linear layer that is converted, a low-rank structure that holds any matrix."""
    layers = [d.layer for d in plan(model, LowRank(rank=1)).decisions if d.structure]
    return {each.name: LowRank(rank=min(each.in_features, each.out_features)) for each in layers}


@pytest.mark.parametrize("name", BUILD)
def test_a_structure_that_holds_every_matrix_changes_nothing(name):
    model, batches = build(name)
    model = model.eval().double()
    batches = [to_double(batch) for batch in batches]
    before = [run(model, batch) for batch in batches]
    biases = {name: p.detach().clone() for name, p in model.named_parameters()}
    overrides = full_rank(model)
    planned = plan_compression(model, LowRank(rank=1), batches, overrides=overrides, keep=None)
    converted = [decision for decision in planned.decisions if decision.structure is not None]
    assert [*planned.projections] == [decision.layer.name for decision in converted]
    planned.apply()
    assert max(planned.errors.values()) < 1e-6
    for batch, y in zip(batches, before, strict=True):
        torch.testing.assert_close(run(model, batch), y, rtol=1e-6, atol=1e-6)
    for name, module in model.named_modules():
        if isinstance(module, StructuredLinear) and module.bias is not None:
            torch.testing.assert_close(module.bias, biases[f"{name}.bias"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MORE)
def test_each_layer_is_fitted_to_what_reaches_it_in_the_compressed_model(name):
    torch.manual_seed(0)
    model, batches = build(name, MORE)
    model, batches = model.eval().double(), [to_double(batch) for batch in batches]
    planned = plan_compression(model, LowRank(rank=3), batches, keep=None)
    dense = record_outputs(model, batches, planned.errors)
    biases = {name: model.get_submodule(name).bias is not None for name in planned.errors}
    new = record_outputs(planned.apply(), batches, planned.errors)
    assert len(planned.errors) > 1
    for name, error in planned.errors.items():
        y, made = dense[name], new[name]
        whole = (y - y.mean(0) if biases[name] else y).norm()
        assert error == pytest.approx(((y - made).norm() / whole).item(), rel=1e-5), name


def record_outputs(model: nn.Module, batches: list[object], names) -> dict[str, Tensor]:
    """The rows that these modules return for all batches."""
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: rows[name].append(output.flatten(0, -2))
        )
        for name in names
    ]
    for batch in batches:
        run(model, batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in rows.items()}


def to_double(batch: object) -> object:
    if isinstance(batch, dict):
        return {name: to_double(each) for name, each in batch.items()}
    floating = isinstance(batch, Tensor) and batch.is_floating_point()
    return batch.double() if floating else batch


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_no_run_keeps_the_keys_and_values_of_all_layers(name, monkeypatch):
    transformers = pytest.importorskip("transformers")
    model, batches = build(name)
    made, real = [], transformers.cache_utils.Cache.__init__

    def count(self, *args, **options):
        made.append(self)
        return real(self, *args, **options)

    monkeypatch.setattr(transformers.cache_utils.Cache, "__init__", count)
    run(model, batches[0])
    usual = len(made)
    made.clear()
    plan_compression(model, LowRank(rank=2), batches, keep=None)
    assert usual
    assert not made


@pytest.mark.parametrize("name", BUILD)
def test_their_blocks_are_found_and_refined_and_sizes_go_by_sensitivity(name):
    torch.manual_seed(0)
    model, batches = build(name)
    model.eval()
    planned = plan_compression(model, LowRank(rank=1), batches, keep=0.6, refine=60)
    assert len(planned.blocks) == {"t5": 4, "mlp": 1, "experts": 1}.get(name, 2)
    assert all(after <= before for before, after in planned.blocks.values())
    assert any(after < before for before, after in planned.blocks.values())
    planned.apply()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, recall):
        skip, scale = recall()
        y = self.first(skip / scale).relu()
        skip, scale = recall()
        return self.second(torch.cat([y, skip], dim=-1)) * scale


class Keeping(nn.Module):
    """Two blocks read what the model keeps for them while it runs, somewhere."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.parts, self.place = nn.ModuleList(Part() for _ in range(2)), place
        self.skip, self.names, self.pair, self.context = None, {}, [], Context()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            skip, scale = x.tanh(), x.detach().abs().amax()
            if self.place == "buffer":
                self.scale.copy_(scale)
            if self.place == "data of a buffer":
                self.scale.data.copy_(scale)
            if self.place == "list":
                self.pair.clear()
                self.pair += [skip, scale]
            self.names["scale"], self.context.scale, self.skip = scale, scale, skip
            x = part(self.recall if self.place else lambda kept=(skip, scale): kept)
        return x

    def recall(self):
        places = {
            "buffer": self.scale.clone(),
            "data of a buffer": self.scale.clone(),
            "object": self.context.scale,
            "list": self.pair[-1:],
        }
        scale = places.get(self.place, self.names["scale"])
        return self.pair if self.place == "list" else (self.skip, scale)


class Context:
    scale = None


@pytest.mark.parametrize("place", ["dict", "buffer", "data of a buffer", "list", "object"])
def test_what_a_model_keeps_while_it_runs_is_that_of_each_batch_alone(place):
    batches = [n * torch.randn(10 + n, WIDTH) for n in range(1, 5)]
    plain, keeping = Keeping(""), Keeping(place)
    keeping.load_state_dict(plain.state_dict())
    expected, found = (
        plan_compression(model, LowRank(rank=1), batches, keep=0.6, refine=8)
        for model in (plain, keeping)
    )
    assert found.errors == expected.errors
    assert found.blocks == expected.blocks
    assert any(after < before for before, after in found.blocks.values())
    for name, projection in expected.projections.items():
        for core, other in zip(projection.cores, found.projections[name].cores, strict=True):
            assert torch.equal(core, other)
    copy.deepcopy(keeping)  # it keeps nothing that has a graph
