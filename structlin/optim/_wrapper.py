"""An optimizer around another one."""

from typing import Any

from torch.optim import Optimizer


def _of_base(name: str) -> Any:
    return property(
        lambda self: getattr(self.base, name), lambda self, value: setattr(self.base, name, value)
    )


class Wrapper(Optimizer):
    """A torch optimizer whose groups, state and state dict are those of `base`. It has hooks of its
    own."""

    base: Optimizer
    param_groups: Any = _of_base("param_groups")
    state: Any = _of_base("state")
    defaults: Any = _of_base("defaults")

    def __init__(self, base: Optimizer) -> None:
        self.__setstate__({"base": base})

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.base.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self.base.load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
