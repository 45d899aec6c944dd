"""torchtitan: how the weights of its experts lie. In all else its models are plain torch.

What torchtitan imports from here by name is in `structlin.torchtitan`.
"""

from collections.abc import Mapping

from torch import nn

from .host import ROWS, Host, find_by_class_name

_EXPERTS = {
    "GroupedExperts": {"w1_EFD": ROWS, "w2_EDF": ROWS, "w3_EFD": ROWS},
    "FusedGroupedExperts": {"w13": "e m f n", "w2_EDF": ROWS},
    "GptOssGroupedExperts": {"mlp1_weight_EGD": "e (m f) n", "mlp2_weight_EDF": ROWS},
}


class Torchtitan(Host):
    """Language models whose experts are named by their dimensions."""

    def layouts_of(self, module: nn.Module) -> Mapping[str, str]:
        return find_by_class_name(module, _EXPERTS)
