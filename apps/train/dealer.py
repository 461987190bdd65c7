"""The training images of each rank, also after ranks have died.

A death is noticed within a call, and at that moment one survivor may have ended a step that another one is still in:
it has drawn the images of the next step as one of the former ranks. The survivors therefore exchange the last place
that one of them has drawn up to, all draw up to there as the former ranks, and deal again from there on. The images of
the dead rank in between are lost; all others come once in each epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from apps.train.data import Sampler, epoch_order
from collectives import Communicator
from collectives.consistency.descriptions import gather_objects

Place = tuple[int, int]
"""An epoch, and the number of its images that have been drawn."""


class _Share(NamedTuple):
    """The images of one of `size` ranks, from a place on, where a step has so many images."""

    start: Place
    rank: int
    size: int
    images: int


_State = tuple[Place, Sequence[_Share]]


class Dealer:
    """Deals the training images to the ranks of a communicator; deals again among the survivors after a death.

    Each global batch has the next images of the epoch's order, and rank r takes the r-th part of it, as in `Sampler`.
    Where it does not divide by the ranks, their parts differ by one image, and `weight` makes up for that.

    Parameters
    ----------
    n_samples
        Number of training images.
    batch
        Images of each rank and step.
    comm
        Ranks that draw images. Making a dealer is collective if they regroup.
    seed
        Of the order.
    keep_batch
        Keep the global batch after a death: survivors have larger parts. Otherwise each part stays.

    Attributes
    ----------
    epoch
        The epoch under way, from 0 on.
    images
        Number of its images that the ranks have drawn.

    Raises
    ------
    ValueError
        There are fewer images than one global batch.
    """

    def __init__(self, n_samples: int, batch: int, comm: Communicator, seed: int, keep_batch: bool = False) -> None:
        Sampler(n_samples, batch, comm.rank, comm.size, seed)  # which refuses too few images
        self._n_samples, self._batch, self._comm, self._seed = n_samples, batch, comm, seed
        self._keep_batch = keep_batch
        self.epoch = self.images = 0
        # that of the last batch, and those to come
        self._shares = [_Share((0, 0), comm.rank, comm.size, batch * comm.size)]
        self._order = epoch_order(n_samples, seed, 0), 0
        if comm.recovery is not None:
            comm.recovery.join(self)

    @property
    def global_batch(self) -> int:
        """Images of all ranks in a step."""
        return self._shares[0].images

    def weight(self, n_images: int) -> float:
        """Return the weight of a mean over some of this rank's images, so that the ranks' mean is over all images."""
        return n_images * self._shares[0].size / self._shares[0].images

    @property
    def n_steps(self) -> int:
        """Steps of a whole epoch on this number of ranks."""
        return self._n_samples // self.global_batch

    @property
    def position(self) -> int:
        """Steps from the start of the run, if all of it had been on this number of ranks."""
        return self.epoch * self.n_steps + self.images // self.global_batch

    def draw(self) -> Tensor | None:
        """Return the indices of this rank's next images; None at the end of an epoch, where the next one begins.

        The images that do not fill a global batch are left out.
        """
        while len(self._shares) > 1 and self._shares[1].start <= (self.epoch, self.images):
            del self._shares[0]
        if self.images + self.global_batch > self._n_samples:
            self.seek(self.epoch + 1, 0)
            return None
        _, rank, size, n = self._shares[0]
        first, end = (self.images + n * part // size for part in (rank, rank + 1))
        self.images += n
        order, epoch = self._order
        if epoch != self.epoch:
            order = epoch_order(self._n_samples, self._seed, self.epoch)
            self._order = order, self.epoch
        return order[first:end]

    def seek(self, epoch: int, images: int) -> None:
        """Go on in an epoch behind as many of its images."""
        self.epoch, self.images = epoch, images

    # Survivor of deaths, see `collectives.recovery.survivors` ---------------------------------------------------------

    def save(self) -> _State:
        """Return place and shares."""
        return (self.epoch, self.images), tuple(self._shares)

    def describe(self) -> str:
        """Return the images and their order."""
        return f"{self._n_samples} images in batches of {self._batch} by seed {self._seed}"

    def enter(self, peers: _State) -> _State:
        """Return the state of a newcomer, which goes on where its peers are."""
        return peers

    def restart(self, saved: _State) -> None:
        """Deal from the start, where the dealer is."""
        self._shares = [self._share((0, 0), saved)]

    def renew(self, saved: _State, survivors: tuple[int, ...]) -> Mapping[int, int | None]:
        """Deal again from the last place that a survivor has drawn up to; collective."""
        own, shares = saved
        start = max(gather_objects(self._comm.mpi_comm, own, self._comm.timeout))
        ahead = [share for share in shares[1:] if share.start < start]
        self.seek(*own)
        self._shares = [shares[0], *ahead, self._share(start, saved)]
        return {}

    def _share(self, start: Place, saved: _State) -> _Share:
        size = self._comm.size
        return _Share(start, self._comm.rank, size, saved[1][-1].images if self._keep_batch else self._batch * size)
