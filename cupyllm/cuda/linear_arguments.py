"""What gemv, skinny_gemm and tile_gemm are called with: one linear layer and its surroundings, checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyllm.cuda.arguments import check_array, check_inner_size, element_bf16
from cupyllm.cuda.loader import KernelLoader
from cupyllm.device import Array
from cupyllm.errors import DeviceError
from cupyllm.ops.reference import Norm


@dataclass(frozen=True)
class LinearCall:
    """norm(x) @ weight.T + bias + residual, or with gate_up SiLU(gate) * up of the two halves of the product's columns.

    x is (T, K) float32; weight (N, K), with gate_up (2 * N, K); bias (N,) has the weight's dtype; residual is (T, N)
    float32.
    """

    x: Array
    weight: Array
    bias: Array | None = None
    norm: Norm | None = None
    residual: Array | None = None
    gate_up: bool = False

    @property
    def tokens(self) -> int:
        """Rows of x: T."""
        return int(self.x.shape[0])

    @property
    def inner(self) -> int:
        """Columns of x and of the weight: K."""
        return int(self.x.shape[1])

    @property
    def outputs(self) -> int:
        """Columns of the output: N."""
        return int(self.weight.shape[0]) // (2 if self.gate_up else 1)

    @property
    def eps(self) -> float:
        return self.norm.eps if self.norm else 0.0

    def check(self, kernel: str, *, max_rows: int) -> dict[str, int]:
        """The constants of the call. Raises DeviceError naming the array or size that `kernel` does not support."""
        check_array(kernel, "x", self.x, np.float32, (None, None))
        bf16 = element_bf16(kernel, "weight", self.weight)
        check_array(kernel, "weight", self.weight, self.weight.dtype, (None, self.inner))
        check_inner_size(kernel, "K", self.inner)
        if self.weight.size >= 2**32:
            raise DeviceError(f"{kernel}: weight has {self.weight.size} elements; supported are less than 2^32")
        if max_rows < self.tokens:
            raise DeviceError(f"{kernel}: x has {self.tokens} rows; supported are up to {max_rows}")
        if self.norm is not None:
            check_array(kernel, "norm.weight", self.norm.weight, np.float32, (self.inner,))
        if self.bias is not None:
            check_array(kernel, "bias", self.bias, self.weight.dtype, (self.outputs,))
        if self.residual is not None:
            check_array(kernel, "residual", self.residual, np.float32, (self.tokens, self.outputs))
        return {"ELEMENT_BF16": bf16, "GATE_UP": int(self.gate_up)}

    def arrays(self, loader: KernelLoader) -> tuple[Array, ...]:
        """x, weight, norm weight, bias, residual: in the order of the kernels' arguments."""
        optional = (self.norm.weight if self.norm else None, self.bias, self.residual)
        return (self.x, self.weight, *(loader.nothing if array is None else array for array in optional))
