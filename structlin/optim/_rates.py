"""Groups whose "lr" is the dense model's rate: how a step scales it, and how files say so."""

from typing import Any

from torch import Tensor, nn

from .._structure.arguments import require_keys

KEPT = "keeps_ratios"  # of a group: its "lr" is the dense model's, its step's is lr * lr_mult
AVERAGES = ("momentum_buffer", "exp_avg")  # of a state: each has the shape of its parameter
GUARD = "guards_ratios"  # of the last group of a state, which has no parameters


def scale_rates(groups: list[dict[str, Any]]) -> list[float | Tensor]:
    """Multiply each group's rate by its `lr_mult`. Returns the rates of before."""
    rates = [group["lr"] for group in groups]
    for group in groups:
        if group["lr_mult"] != 1:
            group["lr"] = group["lr"] * group["lr_mult"]
    return rates


def set_rates(groups: list[dict[str, Any]], rates: list[float | Tensor]) -> None:
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


def add_guard(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state with one more group, as the last one, without parameters.

    An optimizer of torch that would step at the dense rates refuses a state that has more groups
    than itself."""
    groups = state_dict["param_groups"]
    guard = {**groups[-1], "params": [], GUARD: True}
    if "param_names" in guard:
        guard["param_names"] = []
    return {**state_dict, "param_groups": [*groups, guard]}


def remove_guard(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state without the group of `add_guard`, which not every format of files keeps."""
    groups = [group for group in state_dict["param_groups"] if not group.get(GUARD)]
    return {**state_dict, "param_groups": groups}


def require_kept(state_dict: Any, origin: str) -> None:
    """Raises ValueError where the rates of a state have the ratios in them, as of `origin`."""
    require_keys("state_dict", state_dict, "state", "param_groups")
    if not all(group.get(KEPT) for group in state_dict["param_groups"]):
        raise ValueError(
            "state_dict was saved without keep_ratios, its rates have the ratios in them: load it "
            f"into {origin}"
        )


def require_names(groups: list[dict[str, Any]], saved_groups: list[dict[str, Any]]) -> None:
    """Raises ValueError where a state is of other parameters, or has them in another order."""
    names = [name for group in groups for name in group.get("param_names", [])]
    saved = [name for group in saved_groups for name in group.get("param_names", [])]
    if saved == names:
        return
    missing = sorted(set(names) - set(saved))
    unknown = sorted(set(saved) - set(names))
    difference = f"it lacks {missing[:5]} and has {unknown[:5]} besides"
    if set(names) == set(saved):
        difference = "its parameters are in another order or in other groups"
    raise ValueError(f"state_dict is of another model: {difference}")


def require_shapes(groups: list[dict[str, Any]], state_dict: dict[str, Any]) -> None:
    """Raises ValueError where an average of a state is of another shape than its parameter, as in
    the state of the same model with other ranks or widths."""
    saved_groups = state_dict["param_groups"]
    for group, saved_group in zip(groups, saved_groups, strict=False):
        pairs = zip(group["params"], saved_group["params"], strict=False)
        for n, (parameter, number) in enumerate(pairs):
            state = state_dict["state"].get(number, {})
            for key in AVERAGES:
                average = state.get(key)
                if not isinstance(average, Tensor) or average.shape == parameter.shape:
                    continue
                names = group.get("param_names")
                name = names[n] if names else f"parameter {n} of its group"
                raise ValueError(
                    f"state_dict is of another model: {name} is {tuple(parameter.shape)} here and "
                    f"{tuple(average.shape)} there"
                )


def require_new(groups: list[dict[str, Any]], params: list[Tensor]) -> None:
    """Raises ValueError where a parameter is in a group already. If one is twice among `params`,
    torch warns."""
    held = {id(parameter) for group in groups for parameter in group["params"]}
    if any(id(parameter) in held for parameter in params):
        raise ValueError("some parameters appear in more than one parameter group")


def list_parameters(params: Any) -> list[Tensor]:
    """What a group has as `params`: also a module, one parameter, or pairs of names and them."""
    if isinstance(params, set):
        raise TypeError("params is a set, whose order changes from run to run: pass a list")
    entries = params.parameters() if isinstance(params, nn.Module) else params
    entries = [entries] if isinstance(entries, Tensor) else entries
    parameters = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    if not all(isinstance(parameter, Tensor) for parameter in parameters):
        raise TypeError("params must be parameters, (name, parameter) pairs, or dicts with them")
    return parameters
