"""Decides how the layers' matrices are updated: Muon, on all matrices of one shape at once.

Called by ``train``. On two CPU cores ``torch.optim.Muon``, which takes one matrix at a time, would
cost a quarter of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

POLYNOMIAL = (3.4445, -4.7750, 2.0315)  # Newton-Schulz coefficients of the Muon authors


def orthogonalise(stack: Tensor, rounds: int = 5) -> Tensor:
    """Bring the singular values of matrices [N, R, C] near 1 by Newton-Schulz iterations."""
    a, b, c = POLYNOMIAL
    flip = stack.shape[1] > stack.shape[2]
    x: Tensor = stack.mT if flip else stack
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    done: Tensor = x.mT if flip else x
    return done


class StackedMuon:
    """Nesterov momentum, orthogonalised, scaled to AdamW's usual update size."""

    def __init__(self, matrices: list[nn.Parameter], momentum: float = 0.95) -> None:
        self.momentum = momentum
        self.stacks: list[list[nn.Parameter]] = []
        for shape in sorted({tuple(matrix.shape) for matrix in matrices}):
            self.stacks.append([matrix for matrix in matrices if tuple(matrix.shape) == shape])
        self.buffers = [torch.zeros(len(s), *s[0].shape) for s in self.stacks]

    @torch.no_grad()
    def step(self, rate: float, decay: float) -> None:
        """Update every matrix from its gradient."""
        for matrices, buffer in zip(self.stacks, self.buffers, strict=True):
            grads = torch.stack([m.grad for m in matrices if m.grad is not None])
            buffer.lerp_(grads, 1.0 - self.momentum)
            update = orthogonalise(grads.lerp(buffer, self.momentum))
            scale = rate * 0.2 * max(buffer.shape[1:]) ** 0.5
            values: list[Tensor] = [m.data for m in matrices]
            torch._foreach_mul_(values, 1.0 - rate * decay)
            torch._foreach_add_(values, list(update.unbind()), alpha=-scale)
