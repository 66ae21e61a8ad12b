"""The scramble null: orientation of the core destroyed, spectra and spans kept."""

from __future__ import annotations

import torch
from torch import Tensor


def null_scale(sigma: Tensor) -> Tensor:
    """Scale of the closure of a scramble to leading order, ``sum s^6 / (sum s^2)^3``.

    A scrambled head's closure is about ``null_scale * chi^2_1``; ``1 / k^2`` for a flat spectrum.
    The cosines do not enter at this order. NaN for a zero spectrum.
    """
    largest = sigma.amax(-1, keepdim=True)
    power = (sigma / torch.where(largest > 0, largest, 1.0)).square()
    total = power.sum(-1)
    return torch.where(total > 0, power.pow(3).sum(-1) / total.pow(3), torch.nan)
