"""A plan as one page: memory and speed of each config, the recommended one, and a slider for the number of GPUs.

Every position of the slider is planned and written beforehand; the page's script shows one and hides the others. Without
it the page shows the number of GPUs that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np

from acc_lm.errors import UserError
from acc_lm.planning.advice import reason_for, shares_of, ways_out, why_not
from acc_lm.planning.hardware import GIB
from acc_lm.planning.memory import ALLOCATOR_HIGH, ALLOCATOR_LOW, CUDA, NCCL
from acc_lm.planning.plan import Candidate, Machine, RunPlan, command_line, make_plan
from acc_lm.planning.speed import EXTRAPOLATED_PROCESSES, EXTRAPOLATED_RATIO, Range
from acc_lm.reporting.chart_svg import short
from acc_lm.reporting.html_page import as_document, safe
from acc_lm.reporting.report_html import as_element, chart_script
from acc_lm.reporting.report_parts import Bars, Figures, Folded, Grid, Pairs, Paragraph, Part, Verbatim
from acc_lm.reporting.report_sections import made_line
from acc_lm.run_files.charts import BLUE, BROWN, GRAY, GREEN, ORANGE, PURPLE, TEAL, Chart, Line, Star
from acc_lm.run_files.curves import PALETTE

if TYPE_CHECKING:
    from acc_lm.config import Config
    from acc_lm.planning.probe import Probe

MAX_GPUS = 4096
BAR_LENGTH = 4 / 3
"""Length of a bar of memory, over the memory of the GPU; longer ones are cut."""
MEMORY_PARTS = {
    "weights": BLUE,
    "optimizer state, buckets": TEAL,
    "gradients": PURPLE,
    "gathered weights, buffers": BROWN,
    "activations": ORANGE,
    "loss head or block at work": GREEN,
}
"""Parts of the tensors, in the order of a bar, with the colour of each."""
FIT_WORDS = {"yes": "✓ fits", "tight": "≈ tight", "no": "✗ does not fit", "host": "✗ machine's memory is too small"}
PLAN_STYLE = f"""
[hidden] {{ display: none !important; }}
.slider {{ position: sticky; top: 0; z-index: 1; background: Canvas; border-bottom: 1px solid var(--line); padding: .5rem 0; }}
.slider input {{ width: 100%; max-width: 44rem; height: 2rem; margin: 0; display: block; }} .slider p {{ margin: 0; font-weight: 600; }} .slider small {{ font-weight: 400; }}
.option {{ max-width: 60rem; margin: .7rem 0; break-inside: avoid; font-size: 14px; }} .option p {{ display: flex; gap: 0 .9rem; align-items: baseline; margin: 0 0 .2rem; }}
.option p :last-child {{ margin-left: auto; text-align: right; font-variant-numeric: tabular-nums; }} .option small {{ font-size: 12px; opacity: .8; }}
@media (max-width: 640px) {{ .option p {{ overflow-wrap: normal; display: grid; grid-template-columns: 1fr auto; }} .option p :last-child {{ grid-area: 1 / 2; }} .option p small {{ grid-area: 2 / 1; }} }}
.stack, .span {{ position: relative; height: 1.15em; background: var(--soft); border-radius: 3px; overflow: hidden; display: flex; print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
.stack i {{ flex: none; height: 100%; border-right: 1px solid Canvas; }} .stack .least, .swatch .least {{ background: GrayText; }}
.stack .most, .swatch .most {{ background: repeating-linear-gradient(135deg, GrayText 0 2px, transparent 2px 6px); }}
.stack u {{ position: absolute; left: {100 / BAR_LENGTH:.2f}%; top: 0; bottom: 0; border-left: 3px double currentColor; }}
.over::after {{ content: "▸"; position: absolute; right: 0; top: 0; line-height: 1.15em; background: Canvas; padding: 0 2px; }}
.span {{ height: .8em; overflow: visible; }} .span i {{ position: absolute; top: 0; bottom: 0; background: {PALETTE[BLUE]}; border-radius: 3px; opacity: .75; }}
.span .far {{ background: none; border: 2px dashed {PALETTE[BLUE]}; opacity: 1; }} .span b {{ position: absolute; top: -2px; bottom: -2px; border-left: 2px solid currentColor; }}
.swatch i {{ height: .8em; width: .9em; print-color-adjust: exact; -webkit-print-color-adjust: exact; }} .swatch span {{ display: inline-block; white-space: normal; }}
.charts {{ grid-template-columns: 1fr; max-width: 40rem; }} td:last-child {{ min-width: 15rem; }} ul {{ margin: .3rem 0; padding-left: 1.2rem; }} li {{ margin: .2rem 0; overflow-wrap: anywhere; }}
@media print {{ .charts {{ max-width: 24rem; }} .slider {{ position: static; border: 0; }} .slider input {{ display: none; }} .option {{ font-size: 11px; margin: .35rem 0; }}
  table {{ font-size: 10px; }} .wide {{ overflow: visible; }} td, td:last-child {{ min-width: 0; }} th {{ font-size: 10px; white-space: normal; }} }}
"""
SLIDER_SCRIPT = """
const slider = document.querySelector('.slider input'), views = [...document.querySelectorAll('[data-at]')];
const counts = slider.dataset.counts.split(' ');
function move(at) {
  slider.value = at;
  for (const view of views) view.hidden = view.dataset.at !== String(at);
  slider.setAttribute('aria-valuetext', document.querySelector('.slider p:not([hidden])').textContent);
}
function follow() {
  const at = counts.indexOf((/^#gpus-([0-9]+)$/.exec(location.hash) || [])[1]);
  if (at >= 0) move(at);
}
slider.addEventListener('input', () => { move(slider.value); history.replaceState(null, '', '#gpus-' + counts[slider.value]); });
addEventListener('hashchange', follow);
slider.hidden = counts.length < 2;
follow();
"""
"""The only thing it does: show the views of one position. An address that ends in #gpus-64 opens the page there."""


@dataclass(frozen=True)
class Planned:
    """Recipe and hardware of a page."""

    recipe: str
    overrides: Sequence[str]
    config: Config
    probe: Probe
    machine: Machine
    micro_batch_size: int | None
    """The only one to consider; None: all."""
    only: str | None
    """The only Accelerate config to consider; None: all."""
    price: float | None
    """Price of a GPU hour."""

    @property
    def tokens(self) -> int | None:
        """Tokens of the run; None if the recipe counts passes over its text."""
        training = self.config.training
        if not training.max_steps:
            return None
        return training.max_steps * training.global_batch_size * self.config.data.sequence_length


@dataclass(frozen=True)
class PlannedNumber:
    """One number of GPUs."""

    machine: Machine
    global_batch_size: int
    plan: RunPlan | None
    problem: str = ""
    """Reason why there is no plan."""
    ways_out: Sequence[str] = ()
    """Changes with which something would fit, if nothing does."""

    @property
    def best(self) -> Candidate | None:
        return self.plan.recommended if self.plan else None

    @property
    def label(self) -> str:
        n, machines = self.machine.num_gpus, self.machine.num_machines
        return f"{n:,} x {self.machine.gpu.name}" + (f", {machines:,} machines" if machines > 1 else "")


def page_of_plan(planned: Planned, found: RunPlan) -> str:
    """Complete page.

    Args:
        found: the plan for the hardware that was asked for.
    """
    positions = plan_positions(planned, found)
    shown = next(i for i, each in enumerate(positions) if each.plan is found)

    def views(content: Callable[[PlannedNumber], str], tag: str = "div") -> str:
        return "".join(
            f"<{tag} data-at={number}{' hidden' * (number != shown)}>{content(each)}</{tag}>"
            for number, each in enumerate(positions)
        )

    counts = " ".join(str(each.machine.num_gpus) for each in positions)
    slider = (
        f"<div class=slider>{views(lambda each: _heading(each, planned), 'p')}<input type=range hidden min=0 max={len(positions) - 1} "
        f'value={shown} data-counts="{counts}" aria-label="number of GPUs"></div>'
    )
    sections = [
        ("", as_element(Pairs(_facts(planned, found))) + slider),
        ("Recommended", views(lambda each: _elements(_recommendation(each, planned)))),
        ("Memory of a GPU, by config", _legend() + views(lambda each: _memory(each, planned.probe.parameters.total))),
        ("Speed, by config", views(lambda each: _speeds(each, planned))),
        ("By number of GPUs", _elements(_by_number(positions, shown, planned))),
        ("What this plan does not know", _list(_unknown(planned, found))),
    ]
    title = f"Plan of {PurePath(planned.recipe).stem}"
    return as_document(title, sections, made_line(), chart_script() + SLIDER_SCRIPT, style=PLAN_STYLE)


def plan_positions(planned: Planned, found: RunPlan) -> list[PlannedNumber]:
    """Plans for doublings up to 4,096 GPUs that fill their machines, and for the number that was asked for."""
    machine, rows = planned.machine, planned.config.training.global_batch_size
    doublings = [2**power for power in range(MAX_GPUS.bit_length()) if 2**power <= MAX_GPUS]
    counts = {n for n in doublings if n <= machine.gpu.per_machine or n % machine.gpu.per_machine == 0}
    positions = []
    for count in sorted(counts | {machine.num_gpus}):
        larger = replace(machine, num_gpus=count)
        batch = -(-rows // count) * count
        training = planned.config.training.model_copy(update={"global_batch_size": batch})
        config = planned.config.model_copy(update={"training": training})
        try:
            own = found
            if count != machine.num_gpus:
                own = make_plan(config, planned.probe, larger, planned.micro_batch_size, planned.only)
            lines = [] if own.recommended else ways_out(config, planned.probe, larger, own, planned.only)
            positions.append(PlannedNumber(larger, batch, own, ways_out=lines))
        except UserError as error:
            positions.append(PlannedNumber(larger, batch, None, str(error)))
    return positions


def _elements(parts: Sequence[Part]) -> str:
    return "".join(map(as_element, parts))


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{safe(line)}</li>' for line in lines)}</ul>"


# --- the top ---------------------------------------------------------------------------------------------------------


def _facts(planned: Planned, found: RunPlan) -> list[tuple[str, str]]:
    counts, config, machine = planned.probe.parameters, planned.config, planned.machine
    length, rows = config.data.sequence_length, config.training.global_batch_size
    pairs = [("weights", f"{short(_rounded(counts.total))} in {counts.num_blocks} blocks")]
    if counts.trained < counts.total:
        pairs.append(("trained", f"{short(_rounded(counts.trained))} of them"))
    if found.shape:
        pairs.append(("computation", f"{found.shape.flops_per_token(length) / 1e9:,.2f} GFLOP a token"))
    pairs.append(("step", f"{rows:,} rows of {length:,} = {short(_rounded(rows * length))} tokens"))
    if planned.tokens:
        pairs.append(("run", f"{config.training.max_steps:,} steps, {short(_rounded(planned.tokens))} tokens"))
    gpu = machine.gpu
    pairs += [
        ("GPU", f"{gpu.name}, {gpu.memory_gib:g} GiB, {gpu.per_machine} in a machine"),
        ("network between machines", f"{machine.network * 8 / 1e9:,.0f} Gbit/s of each GPU"),
        ("memory of a machine", f"{machine.host_memory / 1e9:,.0f} GB"),
    ]
    if planned.price is not None:
        pairs.append(("price of a GPU hour", f"{planned.price:g}"))
    return pairs


def _heading(each: PlannedNumber, planned: Planned) -> str:
    best = each.best
    text = each.label + (": nothing fits" if each.plan and not best else f": {best.placement.config}" if best else "")
    rows = planned.config.training.global_batch_size
    other = f"with {each.global_batch_size:,} rows a step instead of {rows:,}, which trains differently; time is that of as many tokens"
    return safe(text) + (f" <small>{safe(other)}</small>" if each.global_batch_size != rows else "")


def _recommendation(each: PlannedNumber, planned: Planned) -> list[Part]:
    if each.plan is None:
        return [Paragraph(f"no plan: {each.problem}", is_bad=True)]
    best = each.best
    if best is None:
        first, *more = each.ways_out
        return [Paragraph(first, is_bad=True), *(Paragraph(line.strip()) for line in more)]
    pairs = [
        ("config", best.placement.config),
        ("micro-batch x accumulation", f"{best.micro_batch_size} x {best.accumulation}"),
        ("checkpointing", best.checkpointing),
        ("compile", "yes" if best.compiled else "no"),
        (
            "memory of a GPU",
            f"{_gib(best)} of {each.machine.gpu.memory_gib:g} GiB",
        ),
    ]
    if best.time:
        pairs.append(("speed", f"{_span(_speed_of(best), _rate)} tokens/s"))
        pairs.append(("MFU", f"{100 * best.time.utilization:.0f} %"))
        pairs += [(name, text) for name, text in _costs(best, each.machine, planned)]
    parts: list[Part] = [Pairs(pairs), Paragraph(f"{best.placement.config} is {reason_for(best)}.")]
    if best.time and best.time.extrapolated:
        parts.append(Paragraph(f"extrapolated: {best.time.extrapolated}", is_bad=True))
    others = sorted(
        (other for other in each.plan.best_of_each_config() if other is not best),
        key=lambda other: -other.tokens_per_second,
    )
    parts += [Paragraph(f"not {other.placement.config}: {why_not(other, best, each.machine)}") for other in others[:2]]
    changed = [f"training.global_batch_size={each.global_batch_size}"]
    given = [word for word in planned.overrides if not word.startswith("training.global_batch_size=")]
    is_same = each.global_batch_size == planned.config.training.global_batch_size
    overrides = planned.overrides if is_same else [*given, *changed]
    where = "command, on each machine with its RANK" if each.machine.num_machines > 1 else "command"
    parts.append(Verbatim(command_line(best, planned.recipe, overrides), where))
    if best.time:
        shares = [(name, share, f"{100 * share:.0f} %") for name, share in shares_of(best.time).items()]
        seconds = best.time.seconds
        parts.append(Folded(f"parts of a step of {seconds.low:.2g} to {seconds.high:.2g} s", [Bars(shares)]))
    return parts


# --- memory ----------------------------------------------------------------------------------------------------------


def _parts_of(each: Candidate, total: int) -> dict[str, float]:
    """Bytes of the tensors by the names of MEMORY_PARTS, for a model of `total` weights."""
    parts = dict(each.memory.parts)
    state = parts.pop("weights, moments and buckets")
    weights = each.placement.weights * total
    sizes = [weights, state - weights, *(parts[name] for name in ("gradients", "gathered weights and buffers"))]
    return dict(zip(MEMORY_PARTS, [*sizes, parts["activations"], parts["at work"]], strict=True))


def _gib(each: Candidate) -> str:
    low, high = each.memory.low / GIB, each.memory.high / GIB
    digits = 1 if high < 10 else 0
    return f"{low:,.{digits}f} to {high:,.{digits}f}"


def _legend() -> str:
    swatches = [
        f'<span><i style="background:{PALETTE[color]}"></i>{safe(name)}</span>' for name, color in MEMORY_PARTS.items()
    ]
    least, most = (f"{100 * (share - 1):.0f} %" for share in (ALLOCATOR_LOW, ALLOCATOR_HIGH))
    swatches += [
        f"<span><i class=least></i>allocator {least}, CUDA {CUDA / GIB:g} GiB, NCCL {NCCL / GIB:g} GiB: at least</span>",
        f"<span><i class=most></i>allocator {most}: at most</span>",
        "<span>║ memory of the GPU</span><span>▸ longer than shown</span>",
    ]
    return f'<p class="legend swatch">{"".join(swatches)}</p>'


def _memory(position: PlannedNumber, total: int) -> str:
    if position.plan is None:
        return as_element(Paragraph(f"left out: {position.problem}"))
    shown = position.plan.best_of_each_config()
    rows = "".join(_stack(each, position, total) for each in shown)
    head = ("GiB of a GPU", *MEMORY_PARTS, "tensors", "with allocator, CUDA, NCCL")
    numbers = [
        (
            each.placement.config,
            *(f"{size / GIB:.1f}" for size in _parts_of(each, total).values()),
            f"{each.memory.tensors / GIB:.1f}",
            _gib(each),
        )
        for each in shown
    ]
    return rows + as_element(Folded("in numbers", [Grid(head, numbers)]))


def _stack(each: Candidate, position: PlannedNumber, total: int) -> str:
    """Bar of one config: its tensors, what is on top as a range, and the memory of the GPU as a line."""
    memory, length = each.memory, BAR_LENGTH * position.machine.memory
    drawn = ""
    for name, size in _parts_of(each, total).items():
        look = f'style="width:{100 * size / length:.1f}%;background:{PALETTE[MEMORY_PARTS[name]]}"'
        drawn += f'<i {look} title="{name} {size / GIB:.1f} GiB"></i>' * (size > length / 1000)
    for kind, size in (("least", memory.low - memory.tensors), ("most", memory.high - memory.low)):
        drawn += f'<i class={kind} style="width:{100 * size / length:.1f}%"></i>'
    is_over = " over" * (memory.high > length)
    of = f"{_gib(each)} of {position.machine.gpu.memory_gib:g} GiB"
    host = f", {memory.host / 1e9:,.0f} GB needed" if each.fits == "host" else ""
    return (
        f"<div class=option>{_title(each, position)}<span>{FIT_WORDS[each.fits]}{host}</span><span>{of}</span></p>"
        f'<div class="stack{is_over}">{drawn}<u></u></div></div>'
    )


def _title(each: Candidate, position: PlannedNumber) -> str:
    """Beginning of the line of a config."""
    star = "★ " if each is position.best else ""
    compiled = ", compiled" if each.compiled else ""
    how = f"{each.micro_batch_size} x {each.accumulation} rows, checkpointing {each.checkpointing}{compiled}"
    return f"<p><b>{star}{safe(each.placement.config)}</b><small>{how}</small>"


# --- speed -----------------------------------------------------------------------------------------------------------


def _speed_of(each: Candidate) -> Range:
    """Tokens per second of all GPUs together."""
    n, speed = each.placement.num_processes, each.time.tokens_per_second if each.time else Range(0, 0, 0)
    return Range(n * speed.low, n * speed.middle, n * speed.high)


def _speeds(position: PlannedNumber, planned: Planned) -> str:
    if position.plan is None:
        return as_element(Paragraph(f"left out: {position.problem}"))
    if position.plan.shape is None:
        return as_element(
            Paragraph(
                "left out: not modelled for mixtures of experts, adapters and unusual blocks; measure it with --dry-run"
            )
        )
    shown = [each for each in position.plan.best_of_each_config() if each.runs and each.time]
    if not shown:
        return as_element(Paragraph("left out: nothing fits"))
    most = max(_speed_of(each).high for each in shown)
    note = "Bars are ranges, with a line at the likeliest speed; a dashed frame is extrapolated."
    return as_element(Paragraph(note)) + "".join(_bar_of_speed(each, position, planned, most) for each in shown)


def _bar_of_speed(each: Candidate, position: PlannedNumber, planned: Planned, most: float) -> str:
    speed, time = _speed_of(each), each.time
    if time is None:
        return ""
    facts = [f"MFU {100 * time.utilization:.0f} %"]
    facts += [text if name == "time" else f"{name} {text}" for name, text in _costs(each, position.machine, planned)]
    if position.machine.num_machines > 1:
        facts.append(f"{time.network_bytes / 1e9:,.1f} GB of a machine over the network a step")
    left, width, middle = (100 * v / most for v in (speed.low, speed.high - speed.low, speed.middle))
    is_far = " class=far" * bool(time.extrapolated)
    far = f"<small>extrapolated: {safe(time.extrapolated)}</small>" if time.extrapolated else ""
    return (
        f"<div class=option>{_title(each, position)}<span>{safe(_span(speed, _rate))} tokens/s</span></p>"
        f'<div class=span><i{is_far} style="left:{left:.1f}%;width:{width:.1f}%"></i><b style="left:{middle:.1f}%"></b></div>'
        f"<small>{safe(', '.join(facts))}</small> {far}</div>"
    )


def _costs(each: Candidate, machine: Machine, planned: Planned) -> Iterator[tuple[str, str]]:
    """Duration, price and energy of the run, as ranges."""
    hours, n = each.hours_for(planned.tokens), machine.num_gpus
    if hours is None:
        return
    yield "time", _duration(hours)
    if planned.price is not None:
        price = planned.price
        yield "cost", _span(hours, lambda value: f"{value * n * price:,.0f}")
    yield "energy at most", f"{_rounded(each.most_energy(planned.tokens, machine.gpu) or 0.0):,g} kWh"


def _span(values: Range, form: Callable[[float], str]) -> str:
    return f"{form(values.low)} to {form(values.high)}"


def _rounded(value: float) -> float:
    """Value to three digits."""
    return float(f"{value:.3g}")


def _rate(value: float) -> str:
    return short(_rounded(value))


def _duration(hours: Range) -> str:
    factor, unit = (60, "minutes") if hours.high < 2 else (1, "hours") if hours.high < 72 else (1 / 24, "days")
    digits = 0 if hours.low * factor >= 10 else 1
    return f"{_span(hours, lambda value: f'{factor * value:,.{digits}f}')} {unit}"


# --- number of GPUs --------------------------------------------------------------------------------------------------


def _by_number(positions: Sequence[PlannedNumber], shown: int, planned: Planned) -> list[Part]:
    """Speed over the number of GPUs, as a chart and as a table."""
    timed = [(each, each.best) for each in positions if each.best and each.best.time]
    first = timed[0][1].tokens_per_second / timed[0][0].machine.num_gpus if timed else None
    rows = [_row(each, planned, first) for each in positions]
    table = Grid(("GPUs", "config", "tokens/s", "efficiency", "GiB of a GPU", "time", ""), rows)
    if len(timed) < 2:
        return [table]
    about = "number of GPUs, the recommended config of each; efficiency is its speed per GPU over the first one's"
    return [Figures([_chart(timed, positions[shown])], [], about), table]


def _row(each: PlannedNumber, planned: Planned, first: float | None) -> tuple[str, ...]:
    """Line of the table of positions.

    Args:
        first: tokens per second and GPU of the smallest number that runs; None: speed is not modelled.
    """
    best, n, rows = each.best, each.machine.num_gpus, planned.config.training.global_batch_size
    if best is None:
        return (f"{n:,}", f"none: {each.problem}" if each.problem else "none fits", "", "", "", "", "")
    notes = [f"{each.global_batch_size:,} rows a step"] * (each.global_batch_size != rows)
    notes += ["tight"] * (best.fits == "tight")
    speed, efficiency = "", ""
    if best.time and first:
        speed, efficiency = _span(_speed_of(best), _rate), f"{best.tokens_per_second / n / first:.0%}"
        notes += [f"extrapolated: {best.time.extrapolated}"] * bool(best.time.extrapolated)
    time = dict(_costs(best, each.machine, planned)).get("time", "")
    return (f"{n:,}", best.placement.config, speed, efficiency, _gib(best), time, "; ".join(notes))


def _chart(timed: Sequence[tuple[PlannedNumber, Candidate]], asked: PlannedNumber) -> Chart:
    xs = np.array([float(each.machine.num_gpus) for each, _ in timed])
    speeds = [_speed_of(best) for _, best in timed]
    likeliest, low, high = (np.array([getattr(s, name) for s in speeds]) for name in ("middle", "low", "high"))
    far = [number for number, (_, best) in enumerate(timed) if best.time and best.time.extrapolated]
    until = far[0] if far else len(timed)
    lines = [
        Line("ideal", xs, likeliest[0] * xs / xs[0], GRAY, is_faint=True),
        Line("at least", xs, low, BLUE, is_faint=True),
        Line("at most", xs, high, BLUE, is_faint=True),
    ]
    if until:
        lines.append(Line("likeliest", xs[:until], likeliest[:until], BLUE, has_points=True))
    if far:
        begin = max(0, until - 1)
        lines.append(Line("extrapolated", xs[begin:], likeliest[begin:], ORANGE, is_dashed=True))
    at = [number for number, (each, _) in enumerate(timed) if each is asked]
    star = Star(f"{asked.label}, as asked for", xs[at[0]], likeliest[at[0]]) if at else None
    return Chart("Tokens per second of all GPUs", "", tuple(lines), star=star, is_log=True, doubles_x=True)


# --- what is not known -----------------------------------------------------------------------------------------------


def _unknown(planned: Planned, found: RunPlan) -> list[str]:
    gpu, best = planned.machine.gpu, found.recommended
    is_measured = bool(best and best.time and best.time.calibrated)
    lines = [
        "Nothing here was measured on these GPUs: speeds come from formulas fitted on published runs of others, and a range "
        "holds four of five of those."
        if not is_measured
        else "Speeds are scaled by one measured step on this GPU.",
        "Memory: tensors within a few percent of real steps of small models on CPU processes, for every config; not compared with a GPU. "
        "How much the allocator adds is a range of published runs.",
        "Time and cost are those of training steps: no start, evaluation, checkpoint, failure, or waiting for data.",
        f"Extrapolated means: more than {EXTRAPOLATED_PROCESSES} GPUs, more communication than {EXTRAPOLATED_RATIO} of the time of "
        "computation, or a GPU without a published run.",
        "Speed with an offload rests on one published run: an order of magnitude.",
        "Another number of rows a step, where the recipe's cannot be divided, needs another learning rate and may need more tokens.",
    ]
    if not gpu.has_published_rows:
        lines.append(f"No published run on a {gpu.name} was found: its data sheet with the constants of other GPUs.")
    if found.shape is None:
        lines.append("Speed of mixtures of experts, adapters and unusual blocks is not modelled.")
    if planned.price is None:
        lines.append("Cost: no price is built in; --price gives the price of a GPU hour.")
    return [*lines, "The command with --dry-run runs every stage once on the real GPUs."]
