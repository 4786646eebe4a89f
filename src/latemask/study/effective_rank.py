"""Effective rank: how many directions carry the share tau of the energy of a set of vectors (MAE-LM section 2.2).

    rank_tau(H) = the smallest k with  sum_{i <= k} sigma_i^2  >=  tau sum_i sigma_i^2

The vectors are streamed: squared singular values of H [n, D] are the eigenvalues of its Gram matrix H' H [D, D], which
grows batch by batch, so that five million tokens need no more memory than one batch. Products and sums are float64:
squaring loses half of the digits, and a common mean (which real representations have) hides the rest behind it; and no
TF32 setting can touch them. At base size that adds some 15 % to the FLOPs of the forward passes that give the vectors.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from latemask.errors import Refusal
from latemask.study.energy import check_tau

ROUNDING = 1e-12
"""A share may miss tau by this, relatively, and still reach it."""
FEW_SAMPLES_SHARE = 0.1
"""A rank above this share of the vectors may be held down by their number: isotropic vectors, ten times as many as
dimensions, show a rank a tenth too low."""


def rank_tau(singular_values: Float[Tensor, " D"], tau: float = 0.9) -> int:
    """The tau-effective rank (MAE-LM section 2.2) from singular values in any order; 0 where all are zero.

    Raises ``Refusal`` for a tau outside 0..1, or values that are negative or not finite.
    """
    check_tau(tau)
    values = torch.as_tensor(singular_values).detach().double().cpu()
    if not bool((values >= 0).all() and values.isfinite().all()):
        raise Refusal("singular values", "negative or non-finite numbers", "finite numbers from 0")
    energy = values.square().sort(descending=True).values.cumsum(0)
    if energy.numel() == 0 or energy[-1] == 0:
        return 0
    return int((energy < tau * (1 - ROUNDING) * energy[-1]).sum()) + 1


class GramMatrix:
    """Second moments of vectors of ``width`` dimensions, seen once, in batches of any size and in any order.

    It lives where the first vectors live (on the CPU for devices without float64). Two of them add up to that of both
    sets.
    """

    def __init__(self, width: int):
        self.width, self.count = width, 0
        self._products = torch.zeros(width, width, dtype=torch.float64)
        self._sum = torch.zeros(width, dtype=torch.float64)

    def add(self, rows: Float[Tensor, "n D"]) -> None:
        """Take in n vectors. Raises ``Refusal`` where they have another width."""
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise Refusal("vectors", f"shape {list(rows.shape)}", f"[n, {self.width}]")
        rows = rows.detach()
        rows = (rows.cpu() if rows.device.type == "mps" else rows).double()
        if self._products.device != rows.device:
            self._products, self._sum = self._products.to(rows.device), self._sum.to(rows.device)
        self._products.addmm_(rows.T, rows)
        self._sum += rows.sum(0)
        self.count += len(rows)

    def __add__(self, other: GramMatrix) -> GramMatrix:
        """That of both sets together."""
        both = GramMatrix(self.width)
        both._products = self._products + other._products.to(self._products.device)
        both._sum = self._sum + other._sum.to(self._sum.device)
        both.count = self.count + other.count
        return both

    def matrix(self, centred: bool = False) -> Float[Tensor, "D D"]:
        """H' H, float64; centred: of the vectors less their mean. Raises ``Refusal`` where numbers are not finite."""
        if not bool(self._products.isfinite().all()):
            raise Refusal("vectors", "numbers that are not finite", "finite representations", "Has the run diverged?")
        if not centred or self.count == 0:
            return self._products
        return self._products - torch.outer(self._sum, self._sum) / self.count

    def directions(self, centred: bool = False) -> tuple[Float[Tensor, " D"], Float[Tensor, "D D"]]:
        """Energies (squared singular values) in falling order, and the unit directions that carry them, as columns.

        Energies below the rounding of the sums are 0.
        """
        energies, directions = torch.linalg.eigh(self.matrix(centred))
        floor = self.width * torch.finfo(torch.float64).eps * self._products.trace()
        energies = energies.masked_fill(energies <= floor, 0.0)
        return energies.flip(0), directions.flip(1)

    def spectrum(self, centred: bool = False) -> Float[Tensor, " D"]:
        """Singular values in falling order, float64."""
        return self.directions(centred)[0].sqrt()

    def rank(self, tau: float = 0.9, centred: bool = False) -> int:
        """``rank_tau`` of all vectors so far: at most their number, and one less centred. 0 for none or all zero."""
        return rank_tau(self.spectrum(centred), tau)

    def has_few_samples(self, tau: float = 0.9, centred: bool = False) -> bool:
        """Whether the rank is so near the number of vectors that more of them would show a higher one."""
        return is_capped(self.rank(tau, centred), self.count, self.width)


def is_capped(rank: int, count: int, width: int) -> bool:
    """Whether a rank found from ``count`` vectors may be held down by their number: none can be above ``width``."""
    return FEW_SAMPLES_SHARE * count < rank < width
