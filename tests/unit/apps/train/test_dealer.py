"""Each image comes once in an epoch, also after ranks have died at different places of the survivors."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from apps.train import dealer as dealer_module
from apps.train.data import Sampler, epoch_order
from apps.train.dealer import Dealer, Place

N, BATCH, SEED, EPOCHS = 106, 3, 7, 3


class Ranks:
    """Ranks of a job whose communicators are stand-ins, and whose steps a test makes one by one."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch, keep_batch: bool = False) -> None:
        monkeypatch.setattr(dealer_module, "gather_objects", lambda *_: self.places)
        self.places: list[Place] = []
        self.comms: dict[int, Any] = {
            rank: SimpleNamespace(rank=rank, size=size, recovery=None, mpi_comm=None, timeout=1) for rank in range(size)
        }
        self.dealers = {rank: Dealer(N, BATCH, comm, SEED, keep_batch) for rank, comm in self.comms.items()}
        self.drawn: list[Counter[int]] = [Counter() for _ in range(EPOCHS)]

    def draw(self, *ranks: int) -> list[bool]:
        """Make a step of some ranks; return whether it has images, of each."""
        found = []
        for rank in ranks:
            epoch, batch = self.dealers[rank].epoch, self.dealers[rank].draw()
            self.drawn[epoch].update([] if batch is None else batch.tolist())
            found.append(batch is not None)
        return found

    def die(self, dead: int) -> None:
        """Let a rank die; the others regroup where they are."""
        saved = {rank: one.save() for rank, one in self.dealers.items() if rank != dead}
        self.places = [place for place, _ in saved.values()]
        for number, (rank, state) in enumerate(saved.items()):
            self.comms[rank].rank, self.comms[rank].size = number, len(saved)
            self.dealers[rank].renew(state, ())
        self.dealers = {rank: self.dealers[rank] for rank in saved}

    def finish(self) -> None:
        """Make the steps of all epochs, of all ranks at the same pace from the last rank's place on."""
        while (last := max((one.epoch, one.images) for one in self.dealers.values())) < (EPOCHS, 0):
            behind = [rank for rank, one in self.dealers.items() if (one.epoch, one.images) < last]
            results = self.draw(*(behind or self.dealers))
            assert len(set(results)) == 1, results
        assert {(one.epoch, one.images) for one in self.dealers.values()} == {(EPOCHS, 0)}


def test_without_deaths_batches_are_those_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(4, monkeypatch)
    for epoch in range(2):
        for step in range(N // 12):
            for rank, dealer in ranks.dealers.items():
                batch = dealer.draw()
                assert batch is not None
                assert batch.tolist() == Sampler(N, BATCH, rank, 4, SEED).epoch(epoch)[step].tolist()
        assert {dealer.draw() for dealer in ranks.dealers.values()} == {None}


# Steps of all ranks before the death; ranks that draw once more before they notice it.
DEATHS = [
    pytest.param(3, (), id="all in the same step"),
    pytest.param(3, (1,), id="one survivor in the next step"),
    pytest.param(3, (0, 3), id="two survivors in the next step"),
    pytest.param(7, (3,), id="one survivor in the last step of the epoch"),
    pytest.param(8, (3,), id="one survivor has ended the epoch"),
    pytest.param(9, (0,), id="one survivor in the first step of the next epoch"),
    pytest.param(0, (), id="before the first step"),
]


@pytest.mark.parametrize(("steps", "ahead"), DEATHS)
def test_only_a_batch_of_the_dead_rank_is_lost(
    monkeypatch: pytest.MonkeyPatch, steps: int, ahead: tuple[int, ...]
) -> None:
    ranks = Ranks(4, monkeypatch)
    for _ in range(steps):
        ranks.draw(0, 1, 2, 3)
    ranks.draw(*ahead)
    ranks.die(2)
    ranks.finish()
    for drawn in ranks.drawn:
        assert set(drawn.values()) == {1}
        # The end of an epoch, which fills no global batch, is left out besides.
        assert N - len(drawn) < 9 + (BATCH if ahead else 0)
    assert N - len(ranks.drawn[2]) == N % 9


def test_survivors_deal_whole_batches_and_weigh_their_parts_by_images(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(4, monkeypatch, keep_batch=True)
    ranks.draw(0, 1, 2, 3)
    order = epoch_order(N, SEED, 0).tolist()
    for dead, sizes in ((2, [4, 4, 4]), (0, [6, 6]), (3, [12])):
        ranks.die(dead)
        first = ranks.dealers[1].images
        parts = [dealer.draw() for dealer in ranks.dealers.values()]
        assert [len(part) for part in parts if part is not None] == sizes
        assert [i for part in parts if part is not None for i in part.tolist()] == order[first : first + 12]
        weights = [dealer.weight(n) for dealer, n in zip(ranks.dealers.values(), sizes, strict=True)]
        assert weights == [1.0] * len(sizes)
        assert {(one.global_batch, one.n_steps) for one in ranks.dealers.values()} == {(12, N // 12)}


def test_parts_that_differ_count_by_their_images(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(5, monkeypatch, keep_batch=True)
    ranks.die(1)
    parts = [dealer.draw() for dealer in ranks.dealers.values()]
    sizes = [len(part) for part in parts if part is not None]
    assert (sorted(sizes), sum(sizes)) == ([3, 4, 4, 4], 15)
    for dealer, size in zip(ranks.dealers.values(), sizes, strict=True):
        assert dealer.weight(size) / len(sizes) == pytest.approx(size / 15)


def test_a_newcomer_keeps_the_batch_of_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(4, monkeypatch, keep_batch=True)
    ranks.draw(0, 1, 2, 3)
    comm: Any = SimpleNamespace(rank=0, size=1, recovery=None, mpi_comm=None, timeout=1)
    newcomer = Dealer(N, BATCH, comm, SEED, keep_batch=True)
    comm.rank, comm.size, ranks.places = 2, 3, [(0, 12)]  # it takes the place of one of two that have died
    newcomer.renew(newcomer.enter(ranks.dealers[0].save()), ())
    drawn = newcomer.draw()
    assert (newcomer.global_batch, drawn is not None and len(drawn)) == (12, 4)


def test_another_death_before_all_are_at_the_place_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(4, monkeypatch)
    ranks.draw(0, 1, 2, 3)
    ranks.draw(0, 1)
    ranks.die(3)
    ranks.draw(2)
    ranks.draw(0)  # as one of three, before rank 2 has come there
    ranks.die(1)
    ranks.draw(2)
    assert ranks.dealers[2].global_batch == 9
    ranks.finish()
    assert all(set(drawn.values()) == {1} for drawn in ranks.drawn)
    assert N - len(ranks.drawn[0]) < 6 + 2 * BATCH
    assert N - len(ranks.drawn[2]) == N % 6


def test_a_resumed_run_goes_on_behind_the_images_that_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, later = Ranks(4, monkeypatch), Ranks(2, monkeypatch)
    for _ in range(3):
        ranks.draw(0, 1, 2, 3)
    for dealer in later.dealers.values():
        dealer.seek(0, ranks.dealers[0].images)
        assert dealer.position == 36 // 6
    later.finish()
    assert not ranks.drawn[0].keys() & later.drawn[0].keys()
    assert len(ranks.drawn[0]) + len(later.drawn[0]) == N - (N - 36) % 6
