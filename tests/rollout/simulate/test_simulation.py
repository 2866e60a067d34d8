"""The virtual-time system: what must hold in every run, and what arithmetic says of simple ones."""

from __future__ import annotations

from collections import Counter
from statistics import NormalDist

import numpy as np
import pytest
from msgspec.structs import replace

from rollout.broker.actions import Action as BrokerAction
from rollout.broker.actions import GroupRecord, RevokeTickets
from rollout.broker.rules import Rules
from rollout.proxy.actions import Action as ProxyAction
from rollout.simulate.clock import SimulationStopped
from rollout.simulate.distributions import Constant, Empirical, Gaussian, LogNormal, normal
from rollout.simulate.scenario import EnvServers, Generators, Machines, Scenario, TrainingCost, Work
from rollout.simulate.simulation import Simulation

BROKER = Rules(
    steps=6, groups_per_batch=4, group_size=4, train_tasks=100, alpha=1.0, episode_deadline_s=1e6, hold_deadline_s=1e6
)
CALM = Scenario(
    broker=BROKER,
    generators=Generators(count=2, decode_base_s=0.02),
    work=Work(length=LogNormal(200, 1.0), task_share=0.5),
    training=TrainingCost(per_sample_s=0.1),
)
STORM = replace(
    CALM,
    broker=BROKER.changed(
        steps=8,
        redundant_groups=2,
        redundant_episodes=2,
        episode_deadline_s=300,
        max_groups_given_up=10**6,
        filter_constant_groups=True,
        max_attempts=50,
    ),
    generators=replace(CALM.generators, count=4, mtbf_s=120, restart_s=10, load_s=0.5, copy_s=0.2),
    work=replace(
        CALM.work,
        turns=Gaussian(3, 1),
        step_s=Gaussian(2, 4),
        hang_probability=0.02,
        fail_probability=0.02,
        step_deadline_s=30,
        success_spread=2.0,
    ),
    servers=EnvServers(count=3, capacity=20, slow_fraction=0.34, slow_factor=3, mtbf_s=200, restart_s=5),
    hop_s=0.01,
    status_s=3.0,
)
GUARDED = STORM.with_broker(hooks=["hedging", {"quarantine": {"failures": 3, "seconds": 20}}])


class Watched(Simulation):
    """Looks into the engines: how many requests one held at most, and what of cancelled tickets they hold.

    It looks when everything of the instant of a cancel has been delivered.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.most_held = 0
        self.checks = 0
        self.left: list[int] = []
        """Cancelled tickets that an engine still had."""
        self.ends: list[GroupRecord] = []

    def _proxy(self, actions: list[ProxyAction], tokens: int = 0) -> None:
        super()._proxy(actions, tokens)
        self.most_held = max(self.most_held, *(len(generator._requests) for generator in self.generators))

    def _broker(self, actions: list[BrokerAction]) -> None:
        super()._broker(actions)
        self.ends += [action for action in actions if isinstance(action, GroupRecord)]
        cancelled = {each for action in actions if isinstance(action, RevokeTickets) for each in action.ticket_ids}
        if cancelled:
            self.clock.at(self.clock.now, self._look, cancelled)

    def _look(self, cancelled: set[int]) -> None:
        self.checks += 1
        held = (request.session for generator in self.generators for request in generator._requests.values())
        self.left += cancelled.intersection(held)


def test_measured_values_are_drawn_as_if_each_stood_for_itself() -> None:
    measured = Counter(float(int(100 * normal(1, draw) ** 2)) for draw in range(500))
    apart = sorted(measured.elements())
    drawn = Empirical.of(measured)
    assert len(drawn.values) < len(apart) and drawn.mean == sum(apart) / len(apart)
    for z in (-9.0, *(normal(2, draw) for draw in range(200)), 9.0):
        place = NormalDist().cdf(z) * (len(apart) - 1)
        assert drawn.at(z) == pytest.approx(np.interp(place, range(len(apart)), apart))
    assert Empirical.of({7.0: 1}).at(0.5) == 7.0


def test_means_and_reproducibility_of_distributions() -> None:
    draws = [normal(seed, 3) for seed in range(20_000)]
    for drawn in (
        Gaussian(10, 10),
        LogNormal(3000, 1.0),
        Gaussian(5, 0),
        Constant(2),
        Empirical.of({1.0: 1, 2.0: 1, 4.0: 1}),
    ):
        mean = sum(drawn.at(z) for z in draws) / len(draws)
        expected = 2.25 if isinstance(drawn, Empirical) else drawn.mean  # interpolated: (1.5 + 3) / 2
        assert mean == pytest.approx(expected, rel=0.05), drawn
    assert [normal(7, i) for i in range(4)] == [normal(7, i) for i in range(4)]


def test_a_step_takes_what_arithmetic_says() -> None:
    """16 equal responses of 50 tokens on 2 engines, alpha 0: 50 decode steps, prefill, then training."""
    engine = Generators(count=2, decode_base_s=0.02, decode_per_seq_s=0.001, prefill_tokens_per_s=1e9)
    scenario = Scenario(
        broker=BROKER.changed(alpha=0.0),
        generators=engine,
        work=Work(length=Constant(50)),
        training=TrainingCost(step_s=3.0, publish_s=0.5),
    )

    result = Simulation(scenario).run()
    assert result.step_s == pytest.approx(49 * (0.02 + 7 * 0.001) + 3.5, rel=1e-3)
    assert result.staleness == 0 and result.wasted == 0 and result.kept_over_issued == 1


def test_asynchrony_overlaps_training_and_generation() -> None:
    calm = Simulation(CALM.with_broker(steps=40)).run()
    synchronous = Simulation(CALM.with_broker(steps=40, alpha=0.0)).run()
    assert calm.useful_tokens_per_s > 1.1 * synchronous.useful_tokens_per_s
    assert 0 < calm.staleness <= 1


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "storm", [STORM, replace(STORM, cancellation=False), GUARDED], ids=["", "no cancel", "guarded"]
)
def test_storms_of_failures_break_no_rule(storm: Scenario, seed: int, alpha: float) -> None:
    """Every run ends, its books close, nothing stale is trained."""
    scenario = replace(storm.with_broker(alpha=alpha, seed=seed), seed=seed)
    simulation = Simulation(scenario)
    result = simulation.run()
    simulation.broker.ledger.check()

    assert result.report["freshness_violations"] == 0
    assert result.report["steps"] == scenario.broker.steps
    assert result.report["ledger"]["tokens"]["lost"] > 0, "generators died"
    assert simulation.record.failures > 0
    assert simulation.record.server_deaths > 0
    assert (result.report["hedged"] > 0) == (storm is GUARDED)


class Turns(Simulation):
    """Looks at what engines sample in the learner's turns."""

    turns = 0

    def _step(self) -> None:
        before = self._next
        super()._step()
        if before is not None and self._next is None:
            self._sampled = self._by_engine()

    def _publish(self, n: int) -> None:
        if self._training:
            self.turns += 1
            now = self._by_engine()
            assert all(now[each] == count for each, count in self._sampled.items() if each in now)
        super()._publish(n)

    def _by_engine(self) -> dict[tuple[int, int], int]:
        return {
            (each.index, each.incarnation): each.tokens + sum(each.running().values())
            for each in self._serving.values()
        }


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_storms_by_turns_break_no_rule_and_no_turn(seed: int, alpha: float) -> None:
    scenario = replace(STORM.with_broker(alpha=alpha, seed=seed).with_generators(alternate=True), seed=seed)
    simulation = Turns(replace(scenario, training=TrainingCost(step_s=20.0)))
    result = simulation.run()
    simulation.broker.ledger.check()
    assert simulation.turns == result.report["steps"] == scenario.broker.steps
    assert result.report["freshness_violations"] == 0 and result.report["ledger"]["tokens"]["lost"] > 0


@pytest.mark.parametrize(("alpha", "batches"), [(0.0, 1), (1.0, 2)])
def test_by_turns_training_and_generation_add_up(alpha: float, batches: int) -> None:
    """Equal responses of 50 tokens: a step is the learner's time and its share of the engines', which make as many
    batches in a turn as alpha allows."""
    engine = Generators(count=2, decode_base_s=0.02, prefill_tokens_per_s=1e9, alternate=True)
    scenario = Scenario(
        broker=BROKER.changed(alpha=alpha, steps=20),
        generators=engine,
        work=Work(length=Constant(50)),
        training=TrainingCost(step_s=3.0),
    )
    by_turns = Simulation(scenario).run().step_s
    assert by_turns == pytest.approx(49 * 0.02 / batches + 3.0, rel=0.02)
    apart = Simulation(scenario.with_generators(alternate=False)).run().step_s
    assert apart == pytest.approx(3.0 if alpha else by_turns, rel=0.02)


def test_the_death_of_a_server_takes_its_episodes_with_it_and_nothing_else() -> None:
    """The only failures are servers' deaths: no step fails, no generator dies. The episodes are done again."""
    work = Work(length=LogNormal(200, 1.0), turns=Constant(3), step_s=Gaussian(2, 1))
    calm = replace(CALM.with_broker(max_attempts=50), work=work, servers=EnvServers(count=3, capacity=20))
    storm = replace(calm, servers=replace(calm.servers, mtbf_s=20, restart_s=5))
    simulation = Simulation(storm)
    result = simulation.run()
    simulation.broker.ledger.check()
    tokens = result.report["ledger"]["tokens"]
    assert simulation.record.server_deaths > 0 and simulation.record.failures == 0
    assert tokens["lost"] == 0 and tokens["failed"] > 0
    assert result.report["steps"] == storm.broker.steps and result.report["freshness_violations"] == 0

    undisturbed = Simulation(calm).run()

    assert undisturbed.report["ledger"]["tokens"]["failed"] == 0
    assert result.step_s > undisturbed.step_s


def test_a_cluster_of_64_machines_loses_some_and_breaks_no_rule() -> None:
    """1 024 generators, on 64 machines with their environment servers, some of which are lost."""
    calm = Scenario(
        broker=BROKER.changed(steps=3, groups_per_batch=64, group_size=16, train_tasks=4000, max_attempts=50),
        generators=Generators(count=1024, max_num_seqs=8, load_s=0.5, copy_s=1.0),
        work=Work(length=LogNormal(300, 0.5), task_share=0.5, turns=Constant(2), step_s=Constant(1)),
        servers=EnvServers(count=64, capacity=1000),
        training=TrainingCost(step_s=10.0, publish_s=1.0),
        status_s=5.0,
    )
    simulation = Simulation(replace(calm, machines=Machines(count=64, mtbf_s=600, restart_s=30)))
    result = simulation.run()
    simulation.broker.ledger.check()

    lost = simulation.record.machines_lost
    assert lost > 2 and simulation.record.server_deaths == lost
    assert result.report["steps"] == 3 and result.report["freshness_violations"] == 0
    assert result.report["ledger"]["tokens"]["lost"] > 0
    assert result.step_s < 2 * Simulation(calm).run().step_s, "a machine costs its own share, not the run's"


def test_a_finished_task_does_not_lose_its_place_again_and_again() -> None:
    """F4 with R > 0: finished groups are surplus in every step, and every task is trained in the end (P = 1)."""
    scenario = CALM.with_broker(
        steps=40, groups_per_batch=8, group_size=2, alpha=2.0, redundant_groups=4, hold_patience=1.0
    )
    simulation = Watched(replace(scenario, work=Work(length=LogNormal(200, 1.2), task_share=0.5)))
    simulation.run()
    cut_offs = [record.cut_offs for record in simulation.ends if record.end == "trained"]
    assert len(cut_offs) == 40 * 8 and max(cut_offs) <= 2


@pytest.mark.parametrize("mtbf_s", [0.0, 30.0])
def test_turns_on_generators_of_different_versions_never_go_backwards(mtbf_s: float) -> None:
    """Six small generators that load slowly, one after another: an episode's turns hop between them.

    Where they die, turns are asked again of others.
    """
    work = Work(length=Constant(16), turns=Constant(6), step_s=Gaussian(0.2, 0.2))
    small = Generators(count=6, max_num_seqs=2, decode_base_s=0.02, load_s=2.0, mtbf_s=mtbf_s, restart_s=3)
    scenario = replace(CALM.with_broker(steps=12), work=work, generators=small, training=TrainingCost(step_s=2.0))
    simulation = Simulation(scenario)
    result = simulation.run()  # it asserts the order of every episode's versions

    assert result.staleness > 0 and result.report["freshness_violations"] == 0
    assert not simulation.record.failures
    assert (result.report["ledger"]["tokens"]["lost"] > 0) == (mtbf_s > 0)


def test_servers_that_keep_dying_are_quarantined() -> None:
    """Nothing fails but by the deaths of servers."""
    scenario = replace(
        CALM.with_broker(hooks=[{"quarantine": {"failures": 2}}], max_attempts=50), servers=EnvServers(4, 20)
    )
    assert Simulation(scenario).run().report["hooks"]["quarantines"] == 0
    dying = replace(scenario, servers=replace(scenario.servers, mtbf_s=6, restart_s=1))
    assert Simulation(dying).run().report["hooks"]["quarantines"] > 0


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_kv_memory_for_two_requests_lets_two_run(alpha: float) -> None:
    """8 equal responses for each engine: two at a time take four times as long as all at once."""
    work = Work(length=Constant(50), prompt_tokens=100, max_tokens=100)
    plenty = replace(
        CALM.with_broker(alpha=alpha),
        work=work,
        training=TrainingCost(),
        generators=Generators(count=2, prefill_tokens_per_s=1e9),
    )

    free = Watched(plenty)
    tight = Watched(plenty.with_generators(kv_tokens=2 * 200 + 50, kv_admission="whole"))
    free_s = free.run().step_s
    tight_s = tight.run().step_s

    assert tight.most_held == 2 < 8 <= free.most_held
    assert tight_s == pytest.approx(4 * 49 * 0.02, rel=0.05)
    assert tight_s > 3 * free_s


def test_memory_for_two_whole_responses_lets_many_expected_ones_run() -> None:
    machines = Generators(count=2, prefill_tokens_per_s=1e9, kv_tokens=2_300)
    work = Work(length=Constant(50), prompt_tokens=100, max_tokens=1_000)
    expected = replace(CALM, work=work, training=TrainingCost(), generators=machines)

    whole_s = Watched(expected.with_generators(kv_admission="whole")).run().step_s
    assert Watched(expected).run().step_s < whole_s / 2


def test_cancels_reach_the_engines_within_the_round() -> None:
    storm = replace(STORM, hop_s=0.0)
    simulation = Watched(storm)
    simulation.run()
    assert simulation.checks > 10 and simulation.record.cancels > 10
    assert simulation.left == []
    deaf = Watched(replace(storm, cancellation=False))
    deaf.run()

    assert deaf.left, "without cancellation engines go on with such tickets"


def test_the_same_setting_gives_the_same_run() -> None:
    first, second = (replace(Simulation(STORM).run(), cpu_s=0.0) for _ in range(2))
    assert first == second


def test_a_run_that_cannot_end_says_so() -> None:
    hopeless = CALM.with_work(fail_probability=1.0)
    with pytest.raises(SimulationStopped, match="failed every attempt"):
        Simulation(hopeless).run()
    with pytest.raises(SimulationStopped, match="no end within"):
        Simulation(CALM, limit_s=1.0).run()


def test_the_per_turn_barrier_waits_for_the_slowest_at_every_turn() -> None:
    """Two phases a turn: all generations end, then all environments; without it each episode goes its own way."""
    work = Work(length=Constant(10), turns=Constant(4), step_s=Gaussian(10, 10))
    scenario = replace(CALM.with_broker(alpha=0.0), work=work, training=TrainingCost())
    free = Simulation(scenario).run()
    locked = Simulation(scenario.with_broker(hooks=["turn_barrier"])).run()
    assert locked.step_s > free.step_s + 5

    even = replace(scenario, work=replace(work, step_s=Constant(10)))
    assert Simulation(even.with_broker(hooks=["turn_barrier"])).run().step_s == pytest.approx(
        Simulation(even).run().step_s, rel=0.02
    )


@pytest.mark.parametrize("baseline", ["turn_barrier", "batch_barrier", "pin_prompts"])
def test_baselines_survive_failures(baseline: str) -> None:
    scenario = STORM.with_broker(alpha=0.0, redundant_groups=0, redundant_episodes=0, hooks=[baseline])
    simulation = Simulation(scenario)
    assert simulation.run().report["freshness_violations"] == 0
    simulation.broker.ledger.check()


def test_pinned_prompts_keep_the_responses_of_a_prompt_together() -> None:
    """One prompt of 16 responses on 4 generators: one works; as requests of their own, all do."""
    scenario = replace(
        CALM.with_broker(alpha=0.0, groups_per_batch=1, group_size=16, steps=2),
        generators=Generators(count=4, max_num_seqs=64),
    )
    spread = Simulation(scenario)
    pinned = Simulation(scenario.with_broker(hooks=["pin_prompts"]))
    spread.run()
    pinned.run()

    assert all(generator.tokens for generator in spread.generators)
    assert sum(generator.tokens > 0 for generator in pinned.generators) <= 2  # one a step
