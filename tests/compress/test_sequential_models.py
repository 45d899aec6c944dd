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
from structlin._compress.calibration import plain_calls

WIDTH = 16
IDS = torch.randint(3, 50, (6, 10), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[::2, 7:] = 0
PADDED = IDS * MASK
IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def of_the_zoo(name: str) -> nn.Module:
    pytest.importorskip("transformers")
    return zoo.MODELS[name]()


def masked() -> list[dict[str, Tensor]]:
    pairs = zip(PADDED.split(3), MASK.split(3), strict=True)
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in pairs]


def bert() -> tuple[nn.Module, list[object]]:
    return of_the_zoo("bert"), masked()


def gpt2() -> tuple[nn.Module, list[object]]:
    return of_the_zoo("gpt2"), [{"input_ids": ids} for ids in IDS.split(2)]


def llama() -> tuple[nn.Module, list[object]]:
    return of_the_zoo("llama"), list(IDS.split(3))


def vit() -> tuple[nn.Module, list[object]]:
    return of_the_zoo("vit"), list(IMAGES.split(3))


def swin() -> tuple[nn.Module, list[object]]:
    return of_the_zoo("swin"), list(IMAGES.split(3))


def t5() -> tuple[nn.Module, list[object]]:
    batches = [batch | {"decoder_input_ids": batch["input_ids"][:, :5]} for batch in masked()]
    return of_the_zoo("t5"), batches


def timm_vit() -> tuple[nn.Module, list[object]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zoo.import_timm()
    timm = pytest.importorskip("timm")
    kind = timm.models.VisionTransformer
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": 2}
    return kind(**sizes, num_classes=3), list(IMAGES.split(3))


def encoder() -> tuple[nn.Module, list[object]]:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    x = torch.randn(6, 10, WIDTH)
    hidden = MASK == 0
    batches = [
        {"src": part, "src_key_padding_mask": mask}
        for part, mask in zip(x.split(3), hidden.split(3), strict=True)
    ]
    return nn.TransformerEncoder(layer, 2), batches


def sequential() -> tuple[nn.Module, list[object]]:
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
    return model, list(torch.randn(30, WIDTH).split(10))


class Experts(nn.Module):
    """A router sends each token to one of four experts; a batch may call only some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            if (rows := chosen == n).any():
                y[rows] = expert(x[rows])
        return self.last(x + y)


def experts() -> tuple[nn.Module, list[object]]:
    return Experts(), list(torch.randn(24, WIDTH).split(3))


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


def u_net() -> tuple[nn.Module, list[object]]:
    return UNet(), list(torch.randn(60, WIDTH).split(20))


def encoder_decoder() -> tuple[nn.Module, list[object]]:
    """Without padding."""
    model, batches = t5()
    return model, [{**batch, "attention_mask": torch.ones_like(MASK[:3])} for batch in batches]


MODELS = [bert, gpt2, llama, vit, t5, timm_vit, encoder, sequential, experts]


def run(model: nn.Module, batch: object) -> Tensor:
    with torch.no_grad(), plain_calls(model):  # torch's fused encoder puts zeros at padding
        output = model(**batch) if isinstance(batch, dict) else model(batch)
    return output if isinstance(output, Tensor) else output[0]


def test_of_several_threads_the_last_one_restores_what_is_of_the_whole_process():
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    first, second = plain_calls(compiled), plain_calls(compiled)
    first.__enter__()
    with second:
        first.__exit__(None, None, None)  # as another thread does while this one is at work
        assert not torch.backends.mha.get_fastpath_enabled()
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch._dynamo.eval_frame._stance.stance == "default"


def full_rank(model: nn.Module) -> dict[object, LowRank]:
    """Of each linear layer, a low-rank structure that holds any matrix of its shape."""
    shapes = {
        name: module.weight.shape
        for name, module in model.named_modules()
        if getattr(module, "weight", None) is not None and module.weight.ndim == 2
    }
    return {name: LowRank(rank=min(shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize("build", MODELS)
def test_a_structure_that_holds_every_matrix_changes_nothing(build):
    model, batches = build()
    model = model.eval().double()
    batches = [to_double(batch) for batch in batches]
    before = [run(model, batch) for batch in batches]
    biases = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = full_rank(model)
    planned = plan_compression(
        model, LowRank(rank=1), batches, overrides=by_name(names, model), keep=None
    )
    converted = [decision for decision in planned.decisions if decision.structure is not None]
    assert [*planned.projections] == [decision.layer.name for decision in converted]
    planned.apply()
    assert max(planned.errors.values()) < 1e-6
    for batch, y in zip(batches, before, strict=True):
        torch.testing.assert_close(run(model, batch), y, rtol=1e-6, atol=1e-6)
    for name, module in model.named_modules():
        if isinstance(module, StructuredLinear) and module.bias is not None:
            torch.testing.assert_close(module.bias, biases[f"{name}.bias"], rtol=1e-6, atol=1e-6)


def by_name(names: dict[object, LowRank], model: nn.Module) -> dict[object, LowRank]:
    """The overrides of the layers that `plan` would convert by itself."""
    chosen = {d.layer.name for d in plan(model, LowRank(rank=1)).decisions if d.structure}
    return {name: family for name, family in names.items() if name in chosen}


@pytest.mark.parametrize("build", [encoder_decoder, u_net, swin, sequential, vit])
def test_each_layer_is_fitted_to_what_reaches_it_in_the_compressed_model(build):
    torch.manual_seed(0)
    model, batches = build()
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


@pytest.mark.parametrize("build", [gpt2, llama, t5])
def test_no_run_keeps_the_keys_and_values_of_all_layers(build, monkeypatch):
    transformers = pytest.importorskip("transformers")
    model, batches = build()
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


@pytest.mark.parametrize("build", MODELS)
def test_their_blocks_are_found_and_refined_and_sizes_go_by_sensitivity(build):
    torch.manual_seed(0)
    model, batches = build()
    model.eval()
    planned = plan_compression(model, LowRank(rank=1), batches, keep=0.6, refine=60)
    assert len(planned.blocks) == {t5: 4, sequential: 1, experts: 1}.get(build, 2)
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
