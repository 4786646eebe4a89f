"""Jobs over cards, each once: after the one that it needs, and with a card to itself where it is timed."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar


class Job(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def after(self) -> str | None:
        """The job that must be done before."""

    @property
    def is_alone(self) -> bool:
        """Whether nothing else may run on its card."""

    @property
    def needs_no_more(self) -> bool:
        """Whether what it needs of the job before is there, though that one is not done."""


J = TypeVar("J", bound=Job)


class Queue(Generic[J]):
    """Each card takes the first job whose turn has come, until none is left or ``is_over`` says so.

    ``run`` (job, card) says whether the job is done; where it is not (or raises), those after it are not begun.
    """

    def __init__(self, jobs: Sequence[J], run: Callable[[J, int], bool], is_over: Callable[[], bool] = lambda: False):
        self.jobs, self.run, self.is_over = list(jobs), run, is_over
        self.done: set[str] = set()
        self.failed: set[str] = set()
        self._taken: set[str] = set()
        self._running: dict[int, list[J]] = defaultdict(list)
        self._raised: list[Exception] = []
        self._changed = threading.Condition()

    @property
    def left(self) -> list[J]:
        """Jobs that were not begun, since the time was over."""
        return [job for job in self.jobs if job.name not in self._taken]

    def work(self, cards: Sequence[int], at_once: int = 1) -> None:
        """Until no job is left, with up to ``at_once`` on each card. Raises what a job raised, after the others."""
        with ThreadPoolExecutor(len(cards) * at_once) as pool:
            for card in cards:
                for _ in range(at_once):
                    pool.submit(self._work, card)
        if self._raised:
            raise self._raised[0]

    def _work(self, card: int) -> None:
        while (job := self._next(card)) is not None:
            is_done = False
            try:
                is_done = self.run(job, card)
            except Exception as error:
                self._raised.append(error)
            with self._changed:
                (self.done if is_done else self.failed).add(job.name)
                self._running[card].remove(job)
                self._changed.notify_all()

    def _next(self, card: int) -> J | None:
        with self._changed:
            while not self.is_over():
                hopeless = {job.name for job in self.left if job.after in self.failed and not job.needs_no_more}
                self._taken |= hopeless
                self.failed |= hopeless
                if not self.left:
                    return None
                ready = [job for job in self.left if job.after is None or job.after in self.done or job.needs_no_more]
                if ready and self._has_room(card, ready[0]):
                    self._taken.add(ready[0].name)
                    self._running[card].append(ready[0])
                    return ready[0]
                self._changed.wait(1)
        return None

    def _has_room(self, card: int, job: J) -> bool:
        running = self._running[card]
        return not running or not (job.is_alone or any(other.is_alone for other in running))
