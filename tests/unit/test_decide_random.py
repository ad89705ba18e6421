"""Random lives of a job: crashes between any two writes, old views, lost and late children, changing minds.

Never two live attempts, never a lost outcome, no budget spent twice, no promotion without evidence, always an end.
"""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.unit.job_story import short_spec
from tests.unit.job_world import World, WorldChild, is_over

from ctj_api.names import VERBS
from ctj_api.status import Phase
from ctj_operator.core.decide import decide
from ctj_operator.core.decision import Decision
from ctj_operator.core.observed import Observed

LADDERS = (
    [{"name": "single", "strategy": "single", "steps": 8}, {"name": "full", "strategy": "ddp"}],
    [
        {"name": "single", "strategy": "single", "steps": 4},
        {"name": "ddp", "strategy": "ddp", "steps": 4, "processesPerNode": 2},
        {"name": "zero3", "strategy": "zero3", "processesPerNode": 2},
    ],
    [{"name": "only", "strategy": "fsdp"}],
)
EXIT_CODES = (1, 11, 12, 13, 14, 15, 16, 137, 143)
VANISHED = 0
MANY_PASSES = 500


class Life(RuleBasedStateMachine):
    """Everything that can happen around one job, in any order."""

    world: World

    @initialize(
        ladder=st.sampled_from(LADDERS),
        failures=st.integers(0, 2),
        disruptions=st.integers(0, 2),
        fallbacks=st.integers(0, 2),
        rollbacks=st.integers(0, 2),
        on_timeout=st.sampled_from(["Fail", "Rollback"]),
        fate=st.sampled_from([None, None, None, VANISHED, *EXIT_CODES]),
    )
    def begin(
        self,
        *,
        ladder: Any,
        failures: int,
        disruptions: int,
        fallbacks: int,
        rollbacks: int,
        on_timeout: str,
        fate: int | None,
    ) -> None:
        self.fate = fate
        """How every attempt ends from the moment on when nobody interferes any more; None: well."""
        hold = {"timeout": "10m", "onTimeout": on_timeout}
        spec = short_spec(
            ladder=ladder,
            training={"steps": 16, "globalBatchSize": 4, "microBatchSize": 2},
            restart={"maxFailures": failures, "maxDisruptions": disruptions},
            remedies={"maxFallbacks": fallbacks, "maxRollbacks": rollbacks, "hold": hold},
        )
        self.world = World(spec=spec)
        self.old: tuple[Observed, Decision] | None = None
        self.run(1)

    # Runners

    @rule(done=st.integers(0, 4))
    def run_once_and_perhaps_die(self, done: int) -> None:
        """One pass; the runner dies after `done` of its writes (recording is the first of them)."""
        observed = self.world.observe()
        decision = decide(observed, now=self.world.now)
        self._write(observed, decision, done=done)

    @rule(passes=st.integers(1, 4))
    def run(self, passes: int) -> None:
        for _ in range(passes):
            observed = self.world.observe()
            self._write(observed, decide(observed, now=self.world.now), done=99)

    @rule()
    def look_and_fall_asleep(self) -> None:
        """A second runner reads and decides, but writes only later."""
        observed = self.world.observe()
        self.old = (observed, decide(observed, now=self.world.now))

    @precondition(lambda self: self.old is not None)
    @rule()
    def wake_up_with_an_old_view(self) -> None:
        assert self.old is not None
        observed, decision = self.old
        self.old = None
        if decision.create is not None or decision.status != observed.status:
            self._write(observed, decision, done=99)

    def _write(self, observed: Observed, decision: Decision, *, done: int) -> None:
        if decision.status != observed.status:
            if done == 0 or not self.world.record(observed, decision):
                return
            done -= 1
        for action in self.world.actions(decision)[:done]:
            action()

    # Children; `then` is how many passes the runner makes of it before anything else happens

    @precondition(lambda self: any(not child.visible for child in self.world.children))
    @rule(then=st.integers(0, 2))
    def become_visible(self, then: int) -> None:
        for child in self.world.children:
            child.visible = True
        self.run(then)

    @precondition(lambda self: self._live(lambda child: not child.running and not child.queued and not child.deleting))
    @rule(then=st.integers(0, 2))
    def start_pods(self, then: int) -> None:
        child = self._child()
        child.running = child.visible = True
        self.run(then)

    @precondition(lambda self: self._live(lambda child: child.running))
    @rule(steps=st.integers(1, 6), save=st.booleans(), then=st.integers(0, 2))
    def train(self, steps: int, save: bool, then: int) -> None:
        child = self._child()
        self.world.train(child, steps)
        if save:
            self.world.save(child)
        self.run(then)

    @precondition(lambda self: self._live(lambda child: child.running))
    @rule(evidence=st.sampled_from(["good", "good", "bad", "missing"]), bad=st.integers(0, 3), then=st.integers(0, 2))
    def finish(self, evidence: str, bad: int, then: int) -> None:
        self.world.finish(self._child(), evidence, bad=bad)
        self.run(then)

    @precondition(lambda self: self._live(lambda child: child.running))
    @rule(exit_code=st.sampled_from(EXIT_CODES), then=st.integers(0, 2))
    def die(self, exit_code: int, then: int) -> None:
        self.world.die(self._child(), exit_code)
        self.run(then)

    @precondition(lambda self: self._live(lambda child: child.told_to_stop))
    @rule(then=st.integers(0, 2))
    def stop_as_told(self, then: int) -> None:
        self.world.stop_as_told(self._child())
        self.run(then)

    @precondition(lambda self: self._live(lambda child: child.deleting))
    @rule(then=st.integers(0, 2))
    def go_when_deleted(self, then: int) -> None:
        self.world.die(self._child(), 143)
        self.run(then)

    @precondition(lambda self: any(child.visible for child in self.world.children))
    @rule(index=st.integers(0, 5), then=st.integers(0, 2))
    def lose_a_child(self, index: int, then: int) -> None:
        seen = [child for child in self.world.children if child.visible]
        self.world.vanish(seen[-1 - index % len(seen)])
        self.run(then)

    @precondition(lambda self: self._live(lambda child: child.visible))
    @rule(queued=st.booleans())
    def let_the_queue_decide(self, queued: bool) -> None:
        child = self._child()
        child.queued, child.running = queued, False

    def _live(self, wanted: Callable[[WorldChild], bool]) -> bool:
        child = self.world.live()
        return child is not None and wanted(child)

    def _child(self) -> WorldChild:
        child = self.world.live()
        assert child is not None
        return child

    # People and time

    @rule(seconds=st.sampled_from([1, 6, 40, 400, 4000]))
    def wait(self, seconds: int) -> None:
        self.world.now += seconds

    @rule(suspend=st.booleans())
    def suspend_or_resume(self, suspend: bool) -> None:
        self.world.edit(suspend=suspend)

    @rule(image=st.sampled_from(["a:1", "a:2"]))
    def change_the_image(self, image: str) -> None:
        self.world.edit(image=image)

    @rule(verb=st.sampled_from(VERBS))
    def ask(self, verb: str) -> None:
        self.world.annotate(verb)

    @rule()
    def retry(self) -> None:
        self.world.edit(retryToken=f"retry-{self.world.version}")

    # The end

    def teardown(self) -> None:
        """Nobody interferes any more: whatever becomes of its attempts, every job comes to an end."""
        if not hasattr(self, "world"):
            return
        self.world.edit(suspend=False)
        for _ in range(MANY_PASSES):
            self.run(1)
            if is_over(self.world.status) and self.world.live() is None:
                break
            self._behave()
            self.world.now += 400
        assert self.world.status.phase in (Phase.SUCCEEDED, Phase.FAILED), self.world.status
        self.run(3)
        assert self.world.live() is None

    def _behave(self) -> None:
        child = self.world.live()
        if child is None:
            return
        child.visible, child.queued = True, False
        if child.deleting:
            self.world.die(child, 143)
        elif child.told_to_stop:
            self.world.stop_as_told(child)
        elif not child.running:
            child.running = True
        elif self.fate is None:
            self.world.finish(child, "good")
        elif self.fate == VANISHED:
            self.world.vanish(child)
        else:
            self.world.die(child, self.fate)


class TestLife(Life.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(
        max_examples=40,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
