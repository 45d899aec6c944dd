"""CoLA's matrix-free spectral algorithms run on a layer, as an operator that never forms the
matrix."""

import pytest
import torch

from structlin import BTT, Monarch, StructuredLinear
from tests.catalogue import einsum_matrix, every_structure, one_einsum, random_cores, tokens

cola = pytest.importorskip("cola")
to_cola = pytest.importorskip("examples.cola_operator").to_cola


@every_structure
def test_the_operator_is_the_same_matrix_and_multiplies_vectors(structure):
    cores, x = random_cores(structure), tokens(structure.in_features)
    operator = to_cola(structure, cores)
    assert operator.shape == (structure.out_features, structure.in_features)
    torch.testing.assert_close(operator @ x, one_einsum(structure, cores, x[None])[0])
    torch.testing.assert_close(operator.to_dense(), einsum_matrix(structure, cores))


@pytest.mark.parametrize("structure", [BTT(rank=2), BTT(rank=2, cores=3), Monarch(blocks=4)])
def test_spectral_norm_trace_and_products_are_those_of_the_dense_matrix(structure):
    layer = StructuredLinear(64, 64, structure, dtype=torch.float64)
    operator = to_cola(layer.structure, [core.detach() for core in layer.cores])
    dense, lanczos = layer.to_dense().detach(), cola.linalg.Lanczos(max_iters=64)
    norm = cola.linalg.eigmax(cola.PSD(operator.T @ operator), alg=lanczos).sqrt()
    torch.testing.assert_close(norm, torch.linalg.matrix_norm(dense, 2))
    torch.testing.assert_close(cola.linalg.trace(operator), dense.trace())
    x = torch.randn(64, 3, dtype=torch.float64)
    torch.testing.assert_close(operator @ x, dense @ x)
    torch.testing.assert_close(operator.T @ x, dense.T @ x)
