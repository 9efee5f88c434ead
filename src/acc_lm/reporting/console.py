"""Terminal output of a run: the start block, a progress bar or plain lines, and the score at the end."""

from __future__ import annotations

import math
import sys
import threading
import time
from pathlib import Path

from tqdm import tqdm

from acc_lm.config import Config
from acc_lm.data import Data
from acc_lm.errors import first_line
from acc_lm.evaluation.held_out import Evaluation
from acc_lm.export.exported import sample_text
from acc_lm.modeling.build import ModelFacts
from acc_lm.modeling.flops import Flops, peak_of
from acc_lm.redaction import printable
from acc_lm.rows.order import RowOrder
from acc_lm.run_files.log_file import append_lines
from acc_lm.run_files.names import LOG, PICTURE, SUMMARY
from acc_lm.runtime import Identity, Ranks, split_global_batch
from acc_lm.text.tokenizer import new_tokens


def start_block(
    config: Config,
    identity: Identity,
    ranks: Ranks,
    model: ModelFacts,
    data: Data,
    order: RowOrder,
    num_steps: int,
    tracking: str,
) -> str:
    """Text that describes everything that determines the run, shown before its first step."""
    training = config.training
    micro, accumulation = split_global_batch(training, identity.num_processes)
    tokens = training.global_batch_size * config.data.sequence_length
    facts = data.facts
    processes = "1 process" if identity.num_processes == 1 else f"{identity.num_processes} processes"
    shared = f" / {identity.rows_in_parts} parts of a row" if identity.rows_in_parts > 1 else ""
    shared += f" / {identity.layers_in_parts} parts of the layers" if identity.layers_in_parts > 1 else ""
    lines = [
        (
            "strategy",
            f"{identity.strategy}, {processes}, {identity.device}, {identity.precision}, {identity.threads} threads each",
        ),
        ("processes", ranks.description),
        ("placement", identity.placement),
        (
            "global batch",
            f"{training.global_batch_size} = {micro} micro x {identity.num_processes} processes{shared} x {accumulation} accumulation",
        ),
        (
            "step",
            f"{tokens:,} tokens; {num_steps:,} steps = {order.places_after(num_steps) * config.data.sequence_length:,} tokens",
        ),
        (
            "model",
            f"{model.num_parameters:,} parameters ({model.num_trainable:,} trained); attention: {model.attention}; loss: {model.loss}",
        ),
        ("speed", _of_what(config, identity, model.flops)),
        *lines_of_text(config, data, order),
        *_line_of_new_tokens(config, data),
        ("tracking", tracking),
        ("output", config.output_dir),
    ]
    if model.router:
        ahead = "; a second forward pass finds it" if model.router.is_exact and accumulation > 1 else ""
        lines.append(("experts", model.router.description + ahead))
    lines += _lines_of_data(config, data, order, num_steps)
    if "entropy_rate" in facts.source:
        lines.append(("floor", f"{facts.source['entropy_rate']:.4f} nats per symbol, the entropy rate of the source"))
    lines += notes_of_text(data)
    if model.dropout > 0:
        lines.append(
            (
                "note",
                f"dropout {model.dropout}: its masks depend on the split, so other splits agree in distribution only",
            )
        )
    lines += [("note", note) for note in identity.notes]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def lines_of_text(config: Config, data: Data, order: RowOrder) -> list[tuple[str, str]]:
    """Pairs (name, text) for the training text, the held-out text and the rows."""
    facts = data.facts
    text = f"{facts.train_bytes / 1e6:.2f} MB, {facts.train_documents:,} documents, {facts.train_tokens:,} tokens"
    if "streams" in facts.source:
        text, in_rows = facts.source["streams"], f"{config.data.sequence_length} tokens each, as the streams give them"
    else:
        in_rows = f"{data.num_rows:,} of {config.data.sequence_length} tokens; 1 epoch = {order.count_steps(1):,} steps"
    held_out = f"{facts.eval_bytes / 1e6:.2f} MB, {facts.eval_documents:,} documents, {facts.eval_tokens:,} tokens"
    if facts.train_bytes:
        held_out += f", {facts.eval_bytes / (facts.train_bytes + facts.eval_bytes):.1%} of all"
    lines = [("text", f"{text} ({facts.vocab_size:,} ids)"), ("held out", held_out), ("rows", in_rows)]
    return [*lines[:1], ("encoder", facts.encoder), *lines[1:]] if facts.encoder else lines


def _line_of_new_tokens(config: Config, data: Data) -> list[tuple[str, str]]:
    """Pair (name, text) for the tokens that the recipe adds; none without any."""
    tokens = [*config.tokenizer.add_tokens, *config.tokenizer.add_special_tokens]
    if not tokens:
        return []
    ids = data.tokenizer.convert_tokens_to_ids(tokens)
    text = f"{len(tokens):,} with ids {min(ids):,} to {max(ids):,}"
    is_existing = config.tokenizer.name_or_path or config.model.name_or_path
    known = [token for token in tokens if token not in new_tokens(data.tokenizer)] if is_existing else []
    if known:
        more = f" and {len(known) - 3:,} more" if len(known) > 3 else ""
        text += f"; in the vocabulary before: {', '.join(map(repr, known[:3]))}{more}"
    return [("new tokens", text)]


def notes_of_text(data: Data) -> list[tuple[str, str]]:
    """Pairs (name, text) for what is left out of the text, and for what is in both splits."""
    facts, lines = data.facts, []
    if "ended" in facts.source:
        lines.append(("note", f"reading the text ended after {facts.source['ended']}"))
    if facts.skipped_records:
        lines.append(("note", f"{facts.skipped_records} records without usable text were skipped"))
    if facts.shared_documents:
        lines.append(("warning", f"{facts.shared_documents} held-out documents are in the training text too"))
    return lines


def _lines_of_data(config: Config, data: Data, order: RowOrder, num_steps: int) -> list[tuple[str, str]]:
    """Pairs (name, text) for each source of a mixture, each evaluation set, and the content of rows."""
    facts, lines = data.facts, []
    by_source = data.by_source(order, order.places_after(num_steps))
    num_targets = sum(source["tokens"] for source in by_source.values())
    for (name, source), num_rows in zip(by_source.items(), data.mixture.sizes if data.mixture else (), strict=True):
        share = f"{source['tokens'] / num_targets:.1%} of the tokens, {source['passes']:.2f} passes"
        lines.append(("source", f"{name}: {share} over its {num_rows:,} rows"))
    for name, about in data.set_facts.items():
        conversations = f"; {about.conversations}" if about.conversations else ""
        size = f"{about.num_bytes / 1e6:.2f} MB, {about.documents:,} documents, {about.tokens:,} tokens"
        lines.append(("evaluated", f"{name}: {size}{conversations}"))
    if facts.conversations:
        lines.append(("learned", facts.conversations))
    if data.packs:
        lines.append(data.train.fill)
    return lines


def _of_what(config: Config, identity: Identity, flops: Flops) -> str:
    """Description of the FLOP per token and of the hardware's peak, the two parts of MFU."""
    if flops.unknown:
        return f"no MFU: {flops.unknown}"
    full, causal = (flops.of_token(config.data.sequence_length, causal) for causal in (False, True))
    unit, name = next((u, n) for u, n in ((1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP")) if full >= u or n == "kFLOP")
    cost = f"{full / unit:.3g} {name} a token, {causal / unit:.3g} with causal attention"
    peak = peak_of(identity.device, identity.compute, config.tracking.peak_tflops)
    if peak is None:
        return f"{cost}; no MFU: no peak of {identity.device} in {identity.compute} is known, set tracking.peak_tflops"
    return f"{cost}; MFU is of {identity.num_processes} x {peak.name}"


class Bar:
    """Progress of the main process: a bar on a terminal, a plain line per logged step elsewhere."""

    def __init__(self, num_steps: int, step: int, output_dir: Path, *, enabled: bool) -> None:
        self._enabled, self._output_dir = enabled, output_dir
        self._num_steps = num_steps
        self._first: int | None = None
        """Step after which time is counted, because the first step of a process takes longer than the others."""
        self._start = 0.0
        self._plain = enabled and not sys.stderr.isatty()
        # A lock of this process alone: tqdm's own is shared with the processes of a fork, and a killed one keeps it for ever.
        tqdm.set_lock(threading.RLock())
        self._bar = tqdm(
            total=num_steps, initial=step, unit="step", dynamic_ncols=True, disable=not enabled or self._plain
        )

    def advance(self, step: int) -> None:
        if self._first is None:
            self._first, self._start = step, time.monotonic()
        self._bar.update()

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """Show the newest training metrics."""
        if not self._enabled:
            return
        names = ("loss", "learning_rate", "tokens_per_second")
        loss, rate, speed = (metrics.get(f"train/{name}", math.nan) for name in names)
        mfu = f"  MFU {metrics['train/mfu']:.1%}" if "train/mfu" in metrics else ""
        left, done = "", step - (self._first or step)
        if done:
            seconds = (time.monotonic() - self._start) / done * (self._num_steps - step)
            left = f"  {_duration(seconds)} left"
        line = f"step {step}/{self._num_steps}  loss {loss:.4f}  lr {rate:.2e}  {speed:,.0f} tokens/s{mfu}{left}"
        if self._plain:
            self.line(line)
        else:
            append_lines(self._output_dir, [line])
            self._bar.set_postfix_str(f"loss {loss:.4f}, lr {rate:.2e}, {speed:,.0f} tok/s{mfu}", refresh=False)

    def show_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Print a line for the held-out text and for each evaluation set."""
        for name, result in [("eval", evaluation.held_out), *evaluation.sets.items()]:
            self.line(
                f"step {step}/{self._num_steps}  {name} loss {result.loss:.4f}  perplexity {result.perplexity:.2f}  "
                f"accuracy {result.token_accuracy:.4f}  bits per byte {'none' if result.bits_per_byte is None else f'{result.bits_per_byte:.4f}'}"
            )

    def show_epoch(self, metrics: dict[str, float]) -> None:
        """Print a line for one epoch of the training rows."""
        losses = [
            f"{name} loss {metrics[f'epoch/{name}_loss']:.4f}"
            for name in ("train", "eval")
            if f"epoch/{name}_loss" in metrics
        ]
        rate, seconds = f"lr {metrics['epoch/learning_rate']:.2e}", _duration(metrics["epoch/seconds"])
        self.line("  ".join([f"epoch {metrics['epoch/number']:.0f}", *losses, rate, seconds]))

    def line(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if self._enabled:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        self._bar.close()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def closing_block(config: Config, data: Data, bits_per_byte: dict[str, float], final: Path) -> str:
    """Text with a sample, the score compared with gzip and xz, and the paths of the outputs."""
    parts = []
    if config.export.sample_tokens:
        prompt = config.export.sample_prompt
        if prompt is None:
            prompt = data.sample_prompt()
        try:
            text = sample_text(
                final,
                prompt,
                max_new_tokens=config.export.sample_tokens,
                trust_remote_code=config.model.trust_remote_code,
            )
        except Exception as error:  # the run is complete and exported: a sample must not turn it into a failure
            text = f"none ({type(error).__name__}: {first_line(error)})"
        parts.append("sample:\n" + printable(text, keep="\n\t"))
    names = {"model": "this model", "gzip": "gzip -9", "xz": "xz -9"}
    table = [f"  {names[name]:<12} {bits:7.4f}" for name, bits in sorted(bits_per_byte.items(), key=lambda row: row[1])]
    table = table or ["  none: the targets stand for no text"]
    parts.append("\n".join(["held-out text, bits per byte (lower is better):", *table]))
    parts.append(
        f"model   {final}\ncurves  {final.parent / PICTURE}\nsummary {final.parent / SUMMARY}\nlog     {final.parent / LOG}"
    )
    return "\n\n".join(parts)
