"""timm: its linear layer, and how its models name their heads."""

from .host import Host


class Timm(Host):
    """Vision models. `no_weight_decay`, which others have too, is read with the parameters."""

    roles = (("head", r"(^|\.)head_dist(\.|$)"),)
    plain_linears = ("timm.layers.linear.Linear",)
    head_methods = ("get_classifier",)
