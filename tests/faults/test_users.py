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

ACTIONS = {}
# One case for each family and number of cores, and one that is padded.
CASES = {(type(case[0]), len(case[0].structure(*case[1:]).cores)): case for case in SMALL}
CASES["padded"] = (BTT(rank=2), 11, 7)


def action(function):
    """A row of the table: takes a layer, returns the layer that its user goes on with."""
    ACTIONS[function.__name__.replace("_", " ")] = function
    return function


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


@action
def nothing(layer):
    return layer


@action
def parametrize_a_core(layer):
    parametrize.register_parametrization(layer.cores, "0", Doubled())
    return layer


@action
def parametrize_and_remove(layer):
    parametrize.register_parametrization(layer.cores, "0", Doubled())
    parametrize.remove_parametrizations(layer.cores, "0")
    return layer


@action
def parametrize_and_remove_without_keeping(layer):
    parametrize.register_parametrization(layer.cores, "0", nn.Identity())
    parametrize.remove_parametrizations(layer.cores, "0", leave_parametrized=False)
    return layer


@action
def weight_norm(layer):
    parametrizations.weight_norm(layer.cores, "0")
    return layer


@action
def weight_norm_and_remove(layer):
    parametrizations.weight_norm(layer.cores, "0")
    parametrize.remove_parametrizations(layer.cores, "0")
    return layer


@action
def old_weight_norm(layer):
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(layer.cores, "0")
    return layer


@action
def old_weight_norm_and_remove(layer):
    nn.utils.remove_weight_norm(old_weight_norm(layer).cores, "0")
    return layer


@action
def prune_a_core(layer):
    prune.l1_unstructured(layer.cores, "0", 0.5)
    return layer


@action
def prune_and_remove(layer):
    prune.l1_unstructured(layer.cores, "0", 0.5)
    prune.remove(layer.cores, "0")
    return layer


@action
def prune_identity_and_remove(layer):
    prune.remove(prune.identity(layer.cores, "0"), "0")
    return layer


@action
def register_a_core_again(layer):
    first = layer.cores._parameters.pop("0")
    layer.cores.register_parameter("0", first)
    return layer


@action
def set_a_core(layer):
    layer.cores[0] = nn.Parameter(torch.randn_like(layer.cores[0]))
    return layer


@action
def set_all_cores(layer):
    layer.cores = nn.ParameterList(torch.randn_like(core) for core in layer.cores)
    return layer


@action
def write_data(layer):
    for core in layer.cores:
        core.data = core.data.clone().mul_(3)
    return layer


@action
def vector_to_parameters(layer):
    vector = nn.utils.parameters_to_vector(layer.parameters())
    nn.utils.vector_to_parameters(vector.flip(0), layer.parameters())
    return layer


@action
def hooks(layer):
    layer.register_forward_hook(lambda module, inputs, y: y + 0)
    layer.register_forward_pre_hook(lambda module, inputs: inputs)
    layer.register_full_backward_hook(lambda module, inputs, outputs: None)
    layer.cores[0].register_hook(lambda gradient: gradient)
    return layer


@action
def deepcopy(layer):
    return copy.deepcopy(layer)


@action
def pickled(layer):
    return pickle.loads(pickle.dumps(layer))


@action
def saved_whole(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@action
def state_to_another(layer):
    other = StructuredLinear(
        layer.in_features, layer.out_features, layer.structure, dtype=torch.float64
    )
    other.load_state_dict(layer.state_dict())
    return other


@action
def state_to_another_in_another_order(layer):
    other = StructuredLinear(
        layer.in_features, layer.out_features, layer.structure, dtype=torch.float64
    )
    other.load_state_dict(dict(reversed(layer.state_dict().items())))
    return other


@action
def state_assigned(layer):
    other = StructuredLinear(layer.in_features, layer.out_features, layer.structure, device="meta")
    other.load_state_dict(layer.state_dict(), assign=True)
    return other


@action
def state_through_a_file(layer):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    layer.reset_parameters()
    layer.load_state_dict(torch.load(file, weights_only=True))
    return layer


@action
def to_empty(layer):
    state = copy.deepcopy(layer.state_dict())
    layer.to("meta").to_empty(device="cpu").load_state_dict(state)
    return layer


@action
def average_of_weights(layer):
    average = torch.optim.swa_utils.AveragedModel(layer)
    average.update_parameters(layer)
    train(layer)
    average.update_parameters(layer)
    return average.module


@action
def share_memory(layer):
    return layer.share_memory()


@action
def freeze_a_core(layer):
    layer.cores[0].requires_grad_(False)
    return layer


@action
def inference_mode(layer):
    with torch.inference_mode():
        return copy.deepcopy(layer)


@action
def wrap_and_unwrap(layer):
    return nn.DataParallel(nn.Sequential(layer)).module[0]


@action
def half_and_back(layer):
    return layer.half().double()


@action
def bfloat16(layer):
    return layer.bfloat16()


@action
def eval_and_train(layer):
    return layer.eval().train().requires_grad_(False).requires_grad_(True)


@action
def apply_a_function(layer):
    return layer.apply(
        lambda module: [
            nn.init.normal_(parameter) for parameter in module.parameters(recurse=False)
        ]
    )


@action
def reset(layer):
    layer.reset_parameters()
    return layer


@action
def from_dense(layer):
    return layer.from_dense_(torch.randn(layer.out_features, layer.in_features))


UNTRAINED = {"inference mode", "bfloat16"}  # no gradients there, or none with a known bound


@pytest.mark.parametrize(
    "case", CASES.values(), ids=lambda case: f"{case[0].label}-{case[1]}-{case[2]}"
)
@pytest.mark.parametrize("name", ACTIONS)
def test_the_layer_multiplies_by_what_its_state_tells(name, case):
    layer = ACTIONS[name](layer_of(case))
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
        model = nn.Sequential(ACTIONS[name](layer_of(case)))
        x = tokens(5, case[1])
        y = model(x)
        save(model, tmp_path / str(n))
        dense = nn.Sequential(nn.Linear(case[1], case[2]))
        torch.testing.assert_close(load(dense, tmp_path / str(n))(x), y)
        torch.testing.assert_close(densify(model)(x), y)
