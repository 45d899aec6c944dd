"""diffusers: the roles of layers in its diffusion transformers."""

from .host import Host


class Diffusers(Host):
    """Diffusion transformers such as Flux, and the blocks that their U-Nets share with them.

    `proj_out` of a whole model is its head. Of a block it is the last layer, in Flux the largest
    one: it reads attention and MLP side by side.
    """

    roles = (
        ("ffn", r"(^|\.)single_transformer_blocks\.\d+\.proj_out$"),
        ("ffn", r"(^|\.)ff(_context)?\.net\.\d+(\.|$)"),
    )
