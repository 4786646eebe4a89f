"""Points that are trained together come out as each alone, whatever is drawn and launched between their updates."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from latemask.downstream.finetune import Bench
from latemask.downstream.lanes import Lane, in_turn
from test_finetune import FAST, problem_of, tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("name", DEVICES)
def test_together_as_alone(name):
    """Dropout, seeds, epochs and rates differ; the second one also has batches of its own."""
    device, model = torch.device(name), tiny_model()
    settings = [
        dataclasses.replace(FAST, epochs=3),
        dataclasses.replace(FAST, epochs=2, seed=1, batch_rows=5, dropout=0.4),
        dataclasses.replace(FAST, epochs=4, seed=2, learning_rate=1e-3),
    ]
    problem = problem_of(model)
    found = {}

    def keeping(place, point):
        found[place] = yield from Bench(model, problem, point, device).training(point)

    in_turn([keeping(place, point) for place, point in enumerate(settings)], device)
    for place, point in enumerate(settings):
        alone = Bench(model, problem, point, device).train(point)
        losses = [[entry["loss_so_far"] for entry in training.history] for training in (found[place], alone)]
        assert losses[0] == pytest.approx(losses[1], rel=0 if name == "cpu" else 1e-2)
        assert found[place].updates == alone.updates


@pytest.mark.parametrize("name", DEVICES)
def test_a_lane_leaves_the_random_numbers_outside_as_they_were(name):
    device = torch.device(name)
    torch.manual_seed(3)
    wanted = torch.rand(4, device=device), torch.rand(4)
    torch.manual_seed(3)
    first, second = Lane(device), Lane(device)
    drawn = []
    for lane in (first, second, first, second):
        with lane.entered():
            if len(drawn) < 2:
                torch.manual_seed(7 + len(drawn))
            drawn.append(torch.rand(4, device=device).cpu())
    found = torch.rand(4, device=device), torch.rand(4)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    for seed, numbers in ((7, drawn[0::2]), (8, drawn[1::2])):
        torch.manual_seed(seed)
        assert torch.equal(torch.cat(numbers), torch.cat([torch.rand(4, device=device).cpu() for _ in range(2)]))


def test_one_that_fails_closes_the_others():
    """Also where one of them fails as it is closed."""
    ended = []

    def counting(name, steps):
        try:
            for step in range(steps):
                if name == "breaks" and step == 2:
                    raise ValueError("broken")
                yield
        finally:
            ended.append((name, step))
            if name.startswith("long"):
                raise OSError("full")

    works = [counting("short", 1), counting("long", 9), counting("longer", 9), counting("breaks", 9)]
    with pytest.raises(OSError, match="full") as raised:
        in_turn(works, torch.device("cpu"))
    assert sorted(ended) == [("breaks", 2), ("long", 2), ("longer", 2), ("short", 0)]
    causes, error = [], raised.value
    while error is not None:
        causes.append(str(error))
        error = error.__context__
    assert "broken" in causes
