"""The workload `demo` is the demo's job."""

from services.demo.job import GPUS_PER_REPLICA, REPLICAS_PER_NODE, Job
from services.scheduler.policies import create
from services.simulator import load, simulate
from services.simulator.draws import draw
from services.simulator.policy_decider import PolicyDecider
from services.simulator.run import SimulatedRun


def test_the_workload_says_what_the_job_does() -> None:
    """A demo that was changed alone would no longer be predicted."""
    job, workload = Job(), load("demo")
    assert workload.steps == job.steps
    assert workload.batch.groups == job.batch_size
    assert workload.batch.group_size == job.group_size
    assert workload.batch.mini_batch == job.mini_batch_size
    assert workload.batch.warmup_batches == job.warmup_batches
    assert workload.batch.supply == job.total_groups
    assert workload.topology.hybrid_replicas == job.hybrid_nodes * REPLICAS_PER_NODE
    assert workload.topology.standalone_replicas == job.standalone_nodes * REPLICAS_PER_NODE
    assert workload.topology.gpus_per_replica == GPUS_PER_REPLICA
    (mode,) = workload.lengths.modes
    assert (mode.mean, mode.log_std, mode.between) == (job.mean_tokens, job.log_std, job.between_prompts)
    assert workload.lengths.cap == job.max_tokens
    costs = workload.costs
    assert (costs.lend_s, costs.reclaim_s, costs.sync_s) == (job.lend_s, job.reclaim_s, job.sync_s)
    assert workload.training.step_s == job.training_s
    engine = workload.engine
    assert (engine.base_s, engine.per_request_s) == (job.decode_base_s, job.decode_slope_s)
    assert engine.prefill_tokens_per_s == job.prefill_tokens_per_s


def test_every_prompt_of_a_limited_supply_is_trained_on_once() -> None:
    """The warm-up takes the first of them, so the last step finds nothing that is not its own."""
    workload = load("demo")
    run = SimulatedRun(workload, draw(workload, 0), PolicyDecider(create("verl", workload.policy_config()), 10.0))
    run.begin()
    while not run.done:
        run.step()
    assert run.tally.trained_groups == len(run.groups.born) == workload.batch.supply
    assert run.in_flight == 0


def test_the_prediction_is_what_the_demo_measured() -> None:
    """docs/demo.md: five seeds took 1495 s without and 1285 s with switching on average; 5 % is what is promised."""
    workload = load("demo")
    for policy, measured in (("off", 1495), ("verl", 1285)):
        hours = [simulate(workload, policy, seed).hours for seed in range(10)]
        assert abs(sum(hours) / len(hours) * 3600 / measured - 1) < 0.05
