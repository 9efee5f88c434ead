"""Train a causal language model.

    python train.py                                                    # recipes/quickstart.yaml, on the hardware at hand
    accelerate launch train.py --config recipes/pretrain_gpt2-124m_fineweb-edu.yaml
    accelerate launch --config_file accelerate_configs/ddp.yaml train.py optimizer.learning_rate=1e-3
    torchrun --nproc_per_node 2 train.py --config recipes/pretrain_synthetic.yaml

The recipe says what to learn, the Accelerate config only where it runs. This file is the same for all of them.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from acc_lm.cli.train import end_at_once, run_to_its_end
from acc_lm.config import Mode
from acc_lm.stop import SAVE, StopRequest

if TYPE_CHECKING:
    from acc_lm.config import Config
    from acc_lm.training import Ended, Reporter, Run

DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "quickstart.yaml"
# Each function imports what it needs, so that --help and a misspelt key are answered before torch is loaded.


def train(config: Config, stop_request: StopRequest, mode: Mode = Mode.TRAIN) -> int:
    """Build the run, then train, only evaluate, or only try every stage once; return the exit code."""
    from acc_lm import runtime, training
    from acc_lm.checkpointing import resuming

    run = build(config, mode)
    if run is None:  # the run had already finished, which has been printed
        return 0
    if run.is_main and mode != Mode.DRY_RUN:
        resuming.begin(run.output_dir, run.start.found, run.config, run.data, run.identity, trains=mode == Mode.TRAIN)
    report, code = training.Reporter(run, mode), 0
    if mode == Mode.DRY_RUN:
        training.try_everything(run)
    elif mode == Mode.EVAL_ONLY:
        training.evaluate_and_report(run, report, run.start.progress.step, stop_request.check)
    else:
        code = training.finish(run, report, fit(run, report, stop_request), stop_request.check)
    report.finish()
    runtime.close(run.accelerator)
    return code


def build(config: Config, mode: Mode) -> Run | None:
    """Build every part of the run, at the step where the last one stopped; return None if that one had finished."""
    from acc_lm import runtime, training
    from acc_lm.checkpointing.writing import check_disk_space
    from acc_lm.optimization.optimizer import build_optimizer
    from acc_lm.reporting.speed import Speed

    runtime.quiet_libraries()
    output_dir = Path(config.output_dir)
    accelerator = runtime.build_accelerator(config, output_dir)
    leave = partial(end_at_once, config.output_dir if mode == Mode.TRAIN else None)
    peers, memory = runtime.Peers(accelerator, config, leave), runtime.Memory(accelerator.device)
    earlier = training.find_start(accelerator, config, mode)
    if earlier is None:
        return None
    found, notes = earlier

    # Text -> rows -> rows of each step
    config, data = training.build_rows(accelerator, config, found, mode)
    peers.check_same(data.keys)
    plan = training.plan_steps(config, data, found)

    # Model and optimizer, distributed over the hardware by `prepare`
    model, facts = training.build_on_all(accelerator, config, data)
    notes += runtime.choose_threads(accelerator, model, config, found.state.get("threads"))
    memory.note("model built")
    model, optimizer = runtime.prepare(accelerator, model, build_optimizer(model, config.optimizer))
    memory.note("model prepared")
    identity = runtime.identify(accelerator, model, optimizer, config)
    if config.training.find_micro_batch_size:
        config, lines = runtime.fit_micro_batch(accelerator, model, optimizer, data.train, config)
        notes += lines
    check_disk_space(output_dir, model, config.checkpoint, plan.num_steps, found.progress.step + 1)

    start = training.load_start(accelerator, found, notes, config, data, facts.base, model, optimizer)
    speed = Speed(accelerator, config, identity, model, facts.flops, memory, start.progress, plan.num_steps)
    return training.Run(config, accelerator, peers, memory, data, plan, model, facts, optimizer, identity, start, speed)


def fit(run: Run, report: Reporter, stop_request: StopRequest) -> Ended:
    """Take optimizer steps until the last one, an early stop or a request to stop."""
    from acc_lm import runtime, training
    from acc_lm.checkpointing.saving import Saver
    from acc_lm.optimization.optimizer import set_learning_rate

    config, accelerator, model, optimizer, plan = run.config, run.accelerator, run.model, run.optimizer, run.plan
    runtime.warm_up(accelerator, model, run.data.train.__getitems__(range(run.micro_batch_size)))
    gradients = runtime.Gradients(accelerator, model)
    watch = training.Watchers(run, gradients)
    watch.catch_up(report, stop_request.check)
    saver = Saver(accelerator, run.output_dir, config, run.data.key, run.start.found, stop_request)
    progress, evaluation, stop, started = run.start.progress, None, None, time.monotonic()
    saving = stop_request.saving(runtime.cpu_group(accelerator, config.distributed.timeout_seconds, shared=True))
    with saving, saver, run.reading(), run.speed, run.peers:
        for step, batches in run.steps(watch.last_step):
            run.peers.at(f"step {step}", is_watched=True)
            rows, learning_rate = plan.order.rows_at(step), plan.learning_rate_at(step)
            set_learning_rate(optimizer, learning_rate)
            outcome = training.train_step(
                accelerator,
                model,
                optimizer,
                batches,
                step=step,
                seed=config.seed,
                num_targets=run.data.train.count_targets(rows),
                max_grad_norm=config.optimizer.max_grad_norm,
                gradients=gradients,
                router=run.model_facts.router,
            )
            progress = progress.advance(rows, outcome.num_targets)
            report.step_done(step)
            watch.note(step, outcome, saver)
            request = stop_request.agreed() if step < plan.num_steps else None
            stop = None if request == SAVE else request
            if plan.due.logs(step):
                report.training(step, training.training_metrics(run, watch, progress, outcome, learning_rate))
            run.peers.at(f"evaluating or saving after step {step}")
            run.speed.pause()
            evaluation, evaluates = None, plan.due.evaluates(step)
            if evaluates and not stop:
                evaluation = watch.evaluate(step, report, stop_request)
                if evaluation is None:  # a stop was requested during the evaluation
                    request = stop = stop_request.agreed()
            if evaluation or not evaluates:
                watch.end_epoch(step, report)
            metrics = evaluation.metrics() if evaluation else None
            if request or watch.early_stop or plan.due.saves(step) or (metrics and saver.is_among_best(metrics)):
                state, streams = watch.state_at(step), run.data.stream_states()
                with run.memory.phase("saving"):
                    saver.save(model, optimizer, progress, metrics, state, streams=streams, at_once=bool(request))
                stop_request.done()
            report.lines([*watch.divergence.news(), *saver.news(), *run.data.news()])
            if stop or watch.early_stop:
                break
            run.speed.begin_step()
    report.end_loop(saver.news())
    seconds = time.monotonic() - started
    return training.Ended(progress, evaluation, stop, watch.early_stop, saver.newest, saver.seconds_held, seconds)


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit code."""
    return run_to_its_end(train, arguments, DEFAULT_RECIPE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
