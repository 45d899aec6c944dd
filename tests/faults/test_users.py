"""What users do to a module: the layer still multiplies by the matrix that its state tells.

The matrix is told from the state dict alone, by one `torch.einsum` over the cores that it names.
"""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from structlin import BTT, StructuredLinear, densify, load, save
from tests.catalogue import SMALL, einsum_matrix, layer_of, tokens

# One case for each family and number of cores, and one that is padded.
CASES = {(type(case[0]), len(case[0].structure(*case[1:]).cores)): case for case in SMALL}
CASES["padded"] = (BTT(rank=2), 11, 7)


class Doubled(nn.Module):
    def forward(self, core: Tensor) -> Tensor:
        return 2 * core


def read_cores(layer: StructuredLinear) -> list[Tensor]:
    """The cores that the state tells: as they are, or from what a tool of torch keeps instead."""
    state, cores = layer.state_dict(), []
    for n in range(len(layer.structure.cores)):
        name = f"cores.{n}"
        kept = f"cores.parametrizations.{n}.original"
        if name in state:
            cores.append(state[name])
        elif f"{name}_mask" in state:
            cores.append(state[f"{name}_orig"] * state[f"{name}_mask"])
        elif f"{name}_g" in state:
            direction = state[f"{name}_v"]
            cores.append(state[f"{name}_g"] * direction / direction.norm(dim=(1, 2), keepdim=True))
        elif f"{kept}0" in state:
            direction = state[f"{kept}1"]
            cores.append(state[f"{kept}0"] * direction / direction.norm(dim=(1, 2), keepdim=True))
        else:
            cores.append(2 * state[kept])
    return cores


def check(layer: StructuredLinear) -> None:
    cores = read_cores(layer)
    dtype = cores[0].dtype
    matrix = einsum_matrix(layer.structure, [core.double() for core in cores])
    matrix = matrix[: layer.out_features, : layer.in_features]
    x = tokens(5, layer.in_features)
    trains = not cores[0].is_inference()
    bound = {"atol": 1e-9, "rtol": 1e-9} if dtype == torch.float64 else {"atol": 0.05, "rtol": 0.05}
    for mode in ("training", "inference") if trains else ("inference",):
        with torch.set_grad_enabled(mode == "training"):
            y = layer(x.to(dtype).requires_grad_(trains))
            torch.testing.assert_close(y.double(), x @ matrix.mT + layer.bias.double(), **bound)
            torch.testing.assert_close(layer.to_dense().double(), matrix, **bound)


def train(layer: StructuredLinear) -> None:
    """One step, so that what a tool computed before is old."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = tokens(5, layer.in_features, dtype=layer.cores[0].dtype).requires_grad_()
    layer(x).square().mean().backward()
    optimizer.step()


def old_weight_norm(layer: StructuredLinear) -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(layer.cores, "0")


def old_weight_norm_and_remove(layer: StructuredLinear) -> None:
    old_weight_norm(layer)
    nn.utils.remove_weight_norm(layer.cores, "0")


def weight_norm_and_remove(layer: StructuredLinear) -> None:
    parametrizations.weight_norm(layer.cores, "0")
    parametrize.remove_parametrizations(layer.cores, "0")


def parametrize_and_remove(layer: StructuredLinear) -> None:
    parametrize.register_parametrization(layer.cores, "0", Doubled())
    parametrize.remove_parametrizations(layer.cores, "0")


def parametrize_and_remove_without_keeping(layer: StructuredLinear) -> None:
    parametrize.register_parametrization(layer.cores, "0", nn.Identity())
    parametrize.remove_parametrizations(layer.cores, "0", leave_parametrized=False)


def prune_and_remove(layer: StructuredLinear) -> None:
    prune.l1_unstructured(layer.cores, "0", 0.5)
    prune.remove(layer.cores, "0")


def set_all_cores(layer: StructuredLinear) -> None:
    layer.cores = nn.ParameterList(torch.randn_like(core) for core in layer.cores)


def write_data(layer: StructuredLinear) -> None:
    for core in layer.cores:
        core.data = core.data.clone().mul_(3)


def vector_to_parameters(layer: StructuredLinear) -> None:
    vector = nn.utils.parameters_to_vector(layer.parameters())
    nn.utils.vector_to_parameters(vector.flip(0), layer.parameters())


def hooks(layer: StructuredLinear) -> None:
    layer.register_forward_hook(lambda module, inputs, y: y + 0)
    layer.register_forward_pre_hook(lambda module, inputs: inputs)
    layer.register_full_backward_hook(lambda module, inputs, outputs: None)
    layer.cores[0].register_hook(lambda gradient: gradient)


def through_a_file(value: object, weights_only: bool) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def state_through_a_file(layer: StructuredLinear) -> None:
    state = through_a_file(layer.state_dict(), weights_only=True)
    layer.reset_parameters()
    layer.load_state_dict(state)


def to_empty(layer: StructuredLinear) -> None:
    state = copy.deepcopy(layer.state_dict())
    layer.to("meta").to_empty(device="cpu").load_state_dict(state)


def draw_anew(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


CHANGES = {  # what a user does to a layer
    "parametrize a core": lambda m: parametrize.register_parametrization(m.cores, "0", Doubled()),
    "parametrize and remove": parametrize_and_remove,
    "parametrize and remove without keeping": parametrize_and_remove_without_keeping,
    "weight norm": lambda m: parametrizations.weight_norm(m.cores, "0"),
    "weight norm and remove": weight_norm_and_remove,
    "old weight norm": old_weight_norm,
    "old weight norm and remove": old_weight_norm_and_remove,
    "prune a core": lambda m: prune.l1_unstructured(m.cores, "0", 0.5),
    "prune and remove": prune_and_remove,
    "prune identity and remove": lambda m: prune.remove(prune.identity(m.cores, "0"), "0"),
    "register a core again": lambda m: m.cores.register_parameter(
        "0", m.cores._parameters.pop("0")
    ),
    "set a core": lambda m: m.cores.__setitem__(0, nn.Parameter(torch.randn_like(m.cores[0]))),
    "set all cores": set_all_cores,
    "write data": write_data,
    "vector to parameters": vector_to_parameters,
    "hooks": hooks,
    "state through a file": state_through_a_file,
    "to empty": to_empty,
    "freeze a core": lambda m: m.cores[0].requires_grad_(False),
    "half and back": lambda m: m.half().double(),
    "bfloat16": lambda m: m.bfloat16(),
    "eval and train": lambda m: m.eval().train().requires_grad_(False).requires_grad_(True),
    "apply a function": lambda m: m.apply(draw_anew),
    "reset": lambda m: m.reset_parameters(),
    "from dense": lambda m: m.from_dense_(torch.randn(m.out_features, m.in_features)),
    "share memory": lambda m: m.share_memory(),
    "nothing": lambda m: None,
}


def state_to_another(
    layer: StructuredLinear, state: dict[str, Tensor] | None = None, assign: bool = False
) -> StructuredLinear:
    place = {"device": "meta"} if assign else {"dtype": torch.float64}
    other = StructuredLinear(layer.in_features, layer.out_features, layer.structure, **place)
    other.load_state_dict(state or layer.state_dict(), assign=assign)
    return other


def average_of_weights(layer: StructuredLinear) -> nn.Module:
    average = torch.optim.swa_utils.AveragedModel(layer)
    average.update_parameters(layer)
    train(layer)
    average.update_parameters(layer)
    return average.module


def copy_under_inference_mode(layer: StructuredLinear) -> StructuredLinear:
    with torch.inference_mode():
        return copy.deepcopy(layer)


COPIES = {  # what a user goes on with instead
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "saved whole": lambda m: through_a_file(m, weights_only=False),
    "state to another": state_to_another,
    "state in another order": lambda m: state_to_another(m, dict(reversed(m.state_dict().items()))),
    "state assigned": lambda m: state_to_another(m, assign=True),
    "average of weights": average_of_weights,
    "inference mode": copy_under_inference_mode,
    "wrap and unwrap": lambda m: nn.DataParallel(nn.Sequential(m)).module[0],
}


def act(name: str, layer: StructuredLinear) -> nn.Module:
    """The layer that the user has afterwards."""
    if name in COPIES:
        return COPIES[name](layer)
    CHANGES[name](layer)
    return layer


UNTRAINED = {"inference mode", "bfloat16"}  # no gradients there, or none with a known bound


@pytest.mark.parametrize(
    "case", CASES.values(), ids=lambda case: f"{case[0].label}-{case[1]}-{case[2]}"
)
@pytest.mark.parametrize("name", [*CHANGES, *COPIES])
def test_the_layer_multiplies_by_what_its_state_tells(name, case):
    layer = act(name, layer_of(case))
    check(layer)
    if name not in UNTRAINED:
        train(layer)
        check(layer)


@pytest.mark.parametrize(
    "case", CASES.values(), ids=lambda case: f"{case[0].label}-{case[1]}-{case[2]}"
)
def test_a_layer_that_was_changed_is_saved_and_made_dense_as_it_is(case, tmp_path):
    pytest.importorskip("safetensors")
    for n, name in enumerate(
        (
            "register a core again",
            "parametrize and remove",
            "prune and remove",
            "prune identity and remove",
        )
    ):
        model = nn.Sequential(act(name, layer_of(case)))
        x = tokens(5, case[1])
        y = model(x)
        save(model, tmp_path / str(n))
        dense = nn.Sequential(nn.Linear(case[1], case[2]))
        torch.testing.assert_close(load(dense, tmp_path / str(n))(x), y)
        torch.testing.assert_close(densify(model)(x), y)
