"""Train a causal language model.

    python train.py                                                    # recipes/quickstart.yaml, on whatever is here
    accelerate launch train.py --config recipes/pretrain_gpt2-124m_fineweb-edu.yaml
    accelerate launch --config_file accelerate_configs/ddp.yaml train.py optimizer.learning_rate=1e-3
    torchrun --nproc_per_node 2 train.py --config recipes/pretrain_synthetic.yaml

The recipe says what to learn, the Accelerate config only where. This file is the same for all of them.
"""

from __future__ import annotations

import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc_lm.cli.arguments import Mode
from acc_lm.cli.outcome import end_at_once, run_to_its_end
from acc_lm.errors import EXIT_PREEMPTED, ConfigError, Preempted
from acc_lm.redaction import printable
from acc_lm.stop import SAVE, StopRequest

if TYPE_CHECKING:
    from acc_lm.config import Config

DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "quickstart.yaml"


def train(config: Config, stop_request: StopRequest, mode: Mode = Mode.TRAIN) -> int:
    """Train as the recipe says, or only evaluate, or only try everything once; returns the exit code."""
    # Imported here and not above, so that --help and a misspelt key answer at once.
    from acc_lm import history, resuming, retention, runtime
    from acc_lm.checkpoint import load_checkpoint
    from acc_lm.console import Bar, closing_block, start_block
    from acc_lm.data import build_data
    from acc_lm.divergence import Watch
    from acc_lm.dry_run import try_everything
    from acc_lm.early_stopping import EarlyStopping
    from acc_lm.epochs import Epochs
    from acc_lm.evaluation import Evaluation, check_best_metric, evaluate_all
    from acc_lm.export import export_model
    from acc_lm.model import build_empty_model, build_model
    from acc_lm.optimizer import build_optimizer, set_learning_rate
    from acc_lm.order import MicroBatches
    from acc_lm.progress import Progress, is_due
    from acc_lm.rows import build_loader
    from acc_lm.samples import write_samples
    from acc_lm.saving import Saver, check_disk_space
    from acc_lm.schedule import build_schedule
    from acc_lm.speed import Speed
    from acc_lm.step import in_steps, train_step
    from acc_lm.summary import write_summary
    from acc_lm.timetable import Timetable
    from acc_lm.tracking import Tracking

    training, output_dir, length = config.training, Path(config.output_dir), config.data.sequence_length
    runtime.quiet_libraries()
    accelerator = runtime.build_accelerator(config, output_dir)
    leave = partial(end_at_once, config.output_dir if mode == Mode.TRAIN else None)
    peers, memory = runtime.Peers(accelerator, config, leave), runtime.Memory(accelerator.device)
    is_main = accelerator.is_main_process
    say = partial(print, flush=True) if is_main else lambda *lines, **how: None

    # Where the last run stopped, if there was one
    found = retention.Found(None)
    if mode != Mode.DRY_RUN:
        found = retention.find_checkpoint(accelerator, output_dir, config.checkpoint)
    if mode == Mode.TRAIN and resuming.is_complete(accelerator, output_dir, config):
        return 0
    if mode == Mode.EVAL_ONLY and not found.checkpoint and not config.model.name_or_path:
        raise ConfigError(f"--eval-only must have model.name_or_path or a checkpoint in {output_dir}, got neither")
    notes = [f"{folder} was passed over: {problem}" for folder, problem in found.damaged]
    if found.checkpoint:
        notes += resuming.check_same_recipe(
            found.checkpoint, config, accelerator.mixed_precision, accelerator.num_processes,
            evaluates=mode == Mode.EVAL_ONLY,
        )  # fmt: skip

    # Text -> rows, after a look at whether the model can run at all
    tokenizer = runtime.check_run(config)
    runtime.keep_libraries()
    day = resuming.day_of_run(accelerator, config, found, tokenizer if mode == Mode.EVAL_ONLY else None)
    data = build_data(config.data, config.tokenizer, tokenizer, config.seed, training.global_batch_size, is_main, day)
    config = resuming.with_day(config, data.template_day)
    num_evaluated = training.eval_batches and training.eval_batches * training.global_batch_size
    check_best_metric(data, config.checkpoint.best_metric, num_evaluated)
    peers.check_same(data.keys)
    lag = found.checkpoint.progress.lag(training.global_batch_size) if found.checkpoint else 0
    order = data.order(config.seed, training.global_batch_size, lag)
    num_steps = training.max_steps or order.count_steps(training.num_epochs or 1)
    due = Timetable(config, order, num_steps)
    learning_rate_at = build_schedule(config.schedule, config.optimizer, num_steps, order.global_batch_size, lag)

    # Model and optimizer, spread over the hardware by `prepare`
    runs_on = config.adapter, data.packs, accelerator.device.type
    model, model_facts = runtime.initialise_once(
        accelerator,
        lambda: build_model(config.model, data.tokenizer, length, config.seed, *runs_on),
        lambda facts: build_empty_model(config.model, data.tokenizer, length, facts, *runs_on),
    )
    memory.note("model built")
    model, optimizer = runtime.prepare(accelerator, model, build_optimizer(model, config.optimizer))
    memory.note("model prepared")
    identity = runtime.identify(accelerator, model, optimizer, config)
    if training.find_micro_batch_size:
        config, lines = runtime.fit_micro_batch(accelerator, model, optimizer, data.train, config)
        training, notes = config.training, [*notes, *lines]
    check_disk_space(output_dir, model, config.checkpoint, num_steps)

    progress, resumed_from, origin = Progress(), None, resuming.origin_of(data.tokenizer, model_facts.base)
    if found.checkpoint:
        resuming.check_same_origin(found.checkpoint, config, data.key, origin, data.former_key)
        progress = load_checkpoint(accelerator, found.checkpoint, model, optimizer)
        resumed_from = found.checkpoint.folder
        notes.append(f"resumed from {resumed_from} at step {progress.step} ({found.checked})")
    first_tokens = progress.tokens
    if is_main and mode != Mode.DRY_RUN:
        resuming.begin(output_dir, found, config, data, identity, trains=mode == Mode.TRAIN)
    best_metric = config.checkpoint.best_metric
    early_stopping = EarlyStopping(training, best_metric, found.checkpoint)
    speed = Speed(accelerator, config, identity, model, model_facts.flops, memory, progress, num_steps)
    tracking = Tracking(accelerator)
    if mode == Mode.TRAIN:
        tracking.start(config, output_dir, due.metrics)
    say(
        start_block(config, identity, model_facts, data, order, num_steps, tracking.description),
        *map(printable, notes),
        sep="\n",
    )
    if mode == Mode.DRY_RUN:
        try_everything(accelerator, model, optimizer, data, order, config, model_facts.router)
        runtime.close(accelerator)
        return 0
    micro_batch_size = runtime.split_global_batch(training, accelerator.num_processes)[0]
    bar = Bar(num_steps, progress.step, enabled=is_main)

    def evaluate() -> Evaluation:
        with speed.evaluating():
            return evaluate_all(accelerator, model, data, micro_batch_size, num_evaluated, stop_request.check)

    def evaluate_and_log() -> Evaluation:
        result = evaluate()
        samples = write_samples(accelerator, model, data, config, progress.step, stop_request.check)
        if is_main:
            history.append(output_dir, progress.step, result.metrics())
            history.draw(output_dir, output_dir.name, best_metric)
        tracking.log(progress.step, {**result.metrics(), **samples})
        bar.show_evaluation(progress.step, result)
        return result

    def report_epoch() -> None:
        if metrics := epochs.end(progress.step, learning_rate_at(progress.step)):
            if is_main:
                history.append(output_dir, progress.step, metrics)
            tracking.log(progress.step, metrics)
            bar.show_epoch(metrics)

    if mode == Mode.EVAL_ONLY:
        evaluate_and_log()
        runtime.close(accelerator)
        return 0

    # A stop saves at once and leaves what was due to the run that goes on.
    runtime.warm_up(accelerator, model, data.train.__getitems__(range(micro_batch_size)))
    gradients = runtime.Gradients(accelerator, model)
    watch = Watch(
        accelerator, gradients, training, order, output_dir, progress.step - runtime.count_updates(optimizer),
        found.checkpoint.state if found.checkpoint else None,
    )  # fmt: skip
    epochs = Epochs(order, watch, output_dir, found.checkpoint)
    if resumed_from:
        if due.evaluates(progress.step):
            known = runtime.on_main(accelerator, lambda: history.evaluation_at(output_dir, progress.step, best_metric))
            early_stopping.count(progress.step, known or evaluate_and_log().metrics())
        report_epoch()

    # The loop
    last_step = progress.step if early_stopping.reason else num_steps
    micro_batches = MicroBatches(
        order, micro_batch_size=micro_batch_size, process=accelerator.process_index,
        num_processes=accelerator.num_processes, first_step=progress.step + 1, last_step=last_step,
        lengths=data.padded_lengths,
    )  # fmt: skip
    loader = build_loader(
        data.train, micro_batches, config.data.num_workers, pin_memory=accelerator.device.type == "cuda"
    )
    saver = Saver(accelerator, output_dir, config, data.key, found, stop_request)
    started, result, stop = time.monotonic(), None, None
    streams = found.checkpoint.state.get("streams") if found.checkpoint else None
    reading = data.reading(order, progress.step, streams, accelerator.process_index, accelerator.num_processes)
    with stop_request.saving(accelerator, config.distributed.timeout_seconds), saver, reading, speed, peers:
        for batches in in_steps(speed.reading(loader), accelerator.gradient_accumulation_steps):
            step = progress.step + 1
            peers.at(f"step {step}", is_watched=True)
            rows = order.rows_at(step)
            learning_rate = learning_rate_at(step)
            set_learning_rate(optimizer, learning_rate)
            outcome = train_step(
                accelerator, model, optimizer, batches, step=step, seed=config.seed, router=model_facts.router,
                num_targets=data.train.count_targets(rows), max_grad_norm=config.optimizer.max_grad_norm, gradients=gradients,
            )  # fmt: skip
            progress = progress.advance(rows, outcome.num_targets)
            bar.advance(step)
            if watch.note(step, outcome):
                saver.wait()
                back = resuming.rewind(accelerator, output_dir, model, optimizer, config.checkpoint)
                num_skipped = step - runtime.count_updates(optimizer)
                watch.rewound(step, back.progress.step, num_skipped, back.state.get("recent_losses", ()))
            if is_due(step, config.distributed.check_parameters_every, 0):
                runtime.check_replicas(accelerator, model, step)
            request = stop_request.agreed() if step < num_steps else None
            stop = None if request == SAVE else request
            result = None

            if due.logs(step):
                sources = data.by_source(order, progress.samples_seen)
                metrics = {
                    "train/loss": watch.look(step),
                    "train/grad_norm": float(outcome.grad_norm),
                    "train/learning_rate": learning_rate,
                    "train/epoch": order.epochs_at(progress.samples_seen),
                    "train/tokens": float(progress.tokens),
                    **speed.metrics(progress.tokens),
                    "train/skipped_steps": float(watch.num_skipped),
                    **(outcome.router_loss.metrics() if outcome.router_loss else {}),
                    **{f"train/tokens/{name}": float(source["tokens"]) for name, source in sources.items()},
                }
                metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON has no others
                if is_main:
                    history.append(output_dir, step, metrics)
                tracking.log(step, metrics)
                bar.show(step, metrics)
                if speed.slow:
                    bar.line(speed.slow)
            peers.at(f"evaluating or saving after step {step}")
            speed.pause()
            if due.evaluates(step) and not stop:
                try:
                    result = evaluate_and_log()
                    early_stopping.count(step, result.metrics())
                except Preempted:  # the run that goes on makes up for it
                    request = stop = stop_request.agreed()
            if result or not due.evaluates(step):
                report_epoch()
            measured = result.metrics() if result else None
            if request or early_stopping.reason or due.saves(step) or (measured and saver.is_among_best(measured)):
                watch.look(step)  # what has diverged is not saved
                state = watch.state | epochs.state | early_stopping.state | origin
                streams = data.stream_states()
                with memory.phase("saving"):
                    saver.save(model, optimizer, progress, measured, state, streams=streams, at_once=bool(request))
                stop_request.done()
            for line in [*watch.news(), *saver.news(), *data.news()]:
                bar.line(line)
            if stop or early_stopping.reason:
                break
            speed.begin_step()
    for line in saver.news():
        bar.line(line)
    bar.close()

    # What came out
    peers.at("the export")
    facts: dict[str, Any] = {
        **progress.facts,
        "num_steps": num_steps,
        "tokens_per_second": (progress.tokens - first_tokens) / (time.monotonic() - started),
        "sources": data.by_source(order, progress.samples_seen),
        "last_checkpoint": saver.newest,
        "seconds_held_by_saving": saver.seconds_held,
        "best_checkpoint": retention.link_best(accelerator, output_dir, best_metric),
        "best_evaluation": history.best(history.read(output_dir), best_metric),
        "resumed_from": resumed_from,
        "eval_files": data.facts.eval_files,
        "peak_memory_gb": runtime.gather_objects(accelerator, memory.peak_gb),
        "peak_memory_gb_by_phase": runtime.gather_objects(accelerator, memory.phases),
    }
    if stop:
        say(f"stopped by {stop} after step {progress.step}, saved {saver.newest}; the same command goes on from there")
        if is_main:
            write_summary(output_dir, status="preempted", exit_code=EXIT_PREEMPTED, reason=stop, **facts)
        tracking.finish()
        runtime.close(accelerator)
        return EXIT_PREEMPTED
    if resumed_from and progress.tokens == first_tokens:
        say(f"already complete: step {progress.step} of {num_steps}")
    if early_stopping.reason:
        say(early_stopping.reason)
    step = progress.step
    if config.exports_best and (best := resuming.load_best(accelerator, output_dir, best_metric, model, optimizer)):
        result, step = None if best != step else result, best
        say(f"final/ holds the weights of step {step}, the best by {best_metric}")
    if result is None:
        result = evaluate()
    final = export_model(accelerator, model, optimizer, data, config, result.held_out, step, progress.step)
    if is_main:
        bits_per_byte = data.facts.beside_compressors(result.held_out.bits_per_byte, result.held_out.num_targets)
        facts |= {"exported_step": step, "bits_per_byte": bits_per_byte, "final": final}
        write_summary(output_dir, status="completed", exit_code=0, reason=early_stopping.reason, **facts)
        print(closing_block(config, data, bits_per_byte, final))
    tracking.finish()
    runtime.close(accelerator)
    return 0


def main(arguments: list[str]) -> int:
    """What the command line asks for; returns the exit code."""
    return run_to_its_end(train, arguments, DEFAULT_RECIPE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
