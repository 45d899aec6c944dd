"""What users do to a module: the layer still multiplies by the matrix that its state tells.

The matrix is told from the state dict alone, by one `torch.einsum` over the cores that it names.
"""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from structlin import BTT, StructuredLinear
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
        if name in state:
            cores.append(state[name])
        elif f"{name}_mask" in state:
            cores.append(state[f"{name}_orig"] * state[f"{name}_mask"])
        else:
            cores.append(2 * state[f"cores.parametrizations.{n}.original"])
    return cores


def check(layer: StructuredLinear) -> None:
    cores = read_cores(layer)
    dtype = cores[0].dtype
    matrix = einsum_matrix(layer.structure, [core.double() for core in cores])
    matrix = matrix[: layer.out_features, : layer.in_features]
    x = tokens(5, layer.in_features)
    bound = {"atol": 1e-9, "rtol": 1e-9} if dtype == torch.float64 else {"atol": 0.05, "rtol": 0.05}
    for training in (True, False):
        with torch.set_grad_enabled(training):
            y = layer(x.to(dtype).requires_grad_())
            torch.testing.assert_close(y.double(), x @ matrix.mT + layer.bias.double(), **bound)
            torch.testing.assert_close(layer.to_dense().double(), matrix, **bound)


def train(layer: StructuredLinear) -> None:
    """One step, so that what a tool computed before is old."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = tokens(5, layer.in_features, dtype=layer.cores[0].dtype).requires_grad_()
    layer(x).square().mean().backward()
    optimizer.step()


def parametrize_and_remove(layer: StructuredLinear) -> None:
    parametrize.register_parametrization(layer.cores, "0", Doubled())
    parametrize.remove_parametrizations(layer.cores, "0")


def prune_and_remove(layer: StructuredLinear) -> None:
    prune.l1_unstructured(layer.cores, "0", 0.5)
    prune.remove(layer.cores, "0")


def to_empty(layer: StructuredLinear) -> None:
    state = copy.deepcopy(layer.state_dict())
    layer.to("meta").to_empty(device="cpu").load_state_dict(state)


CHANGES = {  # what a user does to a layer
    "parametrize a core": lambda m: parametrize.register_parametrization(m.cores, "0", Doubled()),
    "parametrize and remove": parametrize_and_remove,
    "prune a core": lambda m: prune.l1_unstructured(m.cores, "0", 0.5),
    "prune and remove": prune_and_remove,
    "set a core": lambda m: m.cores.__setitem__(0, nn.Parameter(torch.randn_like(m.cores[0]))),
    "to empty": to_empty,
    "half and back": lambda m: m.half().double(),
    "bfloat16": lambda m: m.bfloat16(),
    "from dense": lambda m: m.from_dense_(torch.randn(m.out_features, m.in_features)),
    "nothing": lambda m: None,
}


def state_to_another(
    layer: StructuredLinear, state: dict[str, Tensor] | None = None, assign: bool = False
) -> StructuredLinear:
    place = {"device": "meta"} if assign else {"dtype": torch.float64}
    other = StructuredLinear(layer.in_features, layer.out_features, layer.structure, **place)
    other.load_state_dict(state or layer.state_dict(), assign=assign)
    return other


COPIES = {  # what a user goes on with instead
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "state to another": state_to_another,
    "state in another order": lambda m: state_to_another(m, dict(reversed(m.state_dict().items()))),
    "state assigned": lambda m: state_to_another(m, assign=True),
}


def act(name: str, layer: StructuredLinear) -> nn.Module:
    """The layer that the user has afterwards."""
    if name in COPIES:
        return COPIES[name](layer)
    CHANGES[name](layer)
    return layer


@pytest.mark.parametrize(
    "case", CASES.values(), ids=lambda case: f"{case[0].label}-{case[1]}-{case[2]}"
)
@pytest.mark.parametrize("name", [*CHANGES, *COPIES])
def test_the_layer_multiplies_by_what_its_state_tells(name, case):
    layer = act(name, layer_of(case))
    check(layer)
    if name != "bfloat16":  # no gradients with a known bound
        train(layer)
        check(layer)
