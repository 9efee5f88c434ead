"""`acc-lm data`: show the rows that a recipe trains on, or tokenise its text in advance."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from acc_lm.errors import ConfigError

if TYPE_CHECKING:
    from acc_lm.config import Config
    from acc_lm.data import Data, ShownRow
    from acc_lm.text.parts import Preparation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="print training rows as text: documents, targets, cuts, padding, lengths")
    show.add_argument("--rows", type=int, default=2, metavar="N", help="number of rows, in training order (default 2)")
    show.add_argument("--ids", action="store_true", help="show each id with its text")
    show.add_argument("--html", type=Path, metavar="FILE", help="write the rows to a page of HTML instead")
    prepare = actions.add_parser("prepare", help="tokenise the text into the cache, where train.py finds it")
    prepare.add_argument(
        "--processes", type=int, metavar="N", help="processes that tokenise (default: one per CPU of this machine)"
    )
    for action in (show, prepare):
        action.add_argument("--config", metavar="RECIPE", help="recipe: a file or a name (default: quickstart)")
        action.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys of the recipe to override")


def run(known: argparse.Namespace) -> int:
    from acc_lm.config.loading import load_config
    from acc_lm.config.project import find_recipe

    for name in ("rows", "processes"):
        if (value := getattr(known, name, None)) is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}; raise it")
    config = load_config(known.config or find_recipe("quickstart"), known.overrides)
    return show(config, known) if known.action == "show" else fill_cache(config, known.processes)


def show(config: Config, known: argparse.Namespace) -> int:
    from acc_lm.redaction import printable
    from acc_lm.reporting.rows import as_html, as_text

    data = _build(config)
    facts, rows = _facts(config, data), _first_rows(config, data, known.rows)
    if known.html is None:
        in_color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        texts = [as_text(row, data.tokenizer, with_ids=known.ids, in_color=in_color) for row in rows]
        print("\n\n".join([printable("\n".join(facts), keep="\n"), *texts]))
        return 0
    page = as_html(f"Rows of {Path(config.output_dir).name}", facts, rows, data.tokenizer, with_ids=known.ids)
    try:
        known.html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--html must be a file that can be written, got {known.html} ({error.strerror}); choose another"
        ) from None
    print(known.html)
    return 0


def fill_cache(config: Config, num_processes: int | None) -> int:
    """Tokenise a recipe's text into the cache; a second start continues after the parts that are finished."""
    from acc_lm.cache import cache_folder
    from acc_lm.text.parts import Preparation

    cache = cache_folder(config.data.cache_dir)
    here = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    data = _build(config, Preparation(num_processes or here, cache / "unfinished"))
    for line in _facts(config, data, with_lengths=False):
        print(line)
    print(f"cache     {cache}, where train.py with the same data finds it")
    if data.template_day is not None and config.data.chat_template_date is None:
        print(
            f"note      the chat template prints the date; set data.chat_template_date={data.template_day} "
            "so that a start on another day finds these rows"
        )
    return 0


def _build(config: Config, preparation: Preparation | None = None) -> Data:
    """The rows that train.py would build at a first start today."""
    from acc_lm.data import build_data
    from acc_lm.runtime import check_run, quiet_libraries
    from acc_lm.text.parts import NO_PREPARATION

    quiet_libraries()
    tokenizer = check_run(config)
    size, day = config.training.global_batch_size, date.today().isoformat()
    preparation = preparation or NO_PREPARATION
    return build_data(config.data, config.tokenizer, tokenizer, config.seed, size, day=day, preparation=preparation)


def _first_rows(config: Config, data: Data, wanted: int) -> list[ShownRow]:
    """The first rows of the run, in training order."""
    from acc_lm.data import shown_rows

    order = data.order(config.seed, config.training.global_batch_size)
    ends, step = _ends(config, data), 1
    rows: list[ShownRow] = []
    with data.reading(order, 0, None, 0, 1):
        while len(rows) < wanted:
            numbers = order.rows_at(step)
            rows += shown_rows(data, numbers.tolist(), data.train.__getitems__(numbers.tolist()), ends)
            step += 1
    return rows[:wanted]


def _ends(config: Config, data: Data) -> set[int]:
    """Ids that end a conversation; none for text, and none where everything is a target."""
    from acc_lm.chat.template import load_template

    if data.facts.format == "text" or config.data.train_on == "all":
        return set()
    ends = {int(data.tokenizer.eos_token_id)}
    if data.facts.has_roles:
        template = load_template(data.tokenizer, config.data.chat_template, data.template_day)
        ends.add(int(data.tokenizer.convert_tokens_to_ids(template.end_token)))
    return ends


def _facts(config: Config, data: Data, *, with_lengths: bool = True) -> list[str]:
    """Lines about text, rows, template and lengths."""
    from acc_lm.chat.template import PLAIN_TEMPLATE, load_template
    from acc_lm.data import lengths_of
    from acc_lm.reporting.console import lines_of_text, notes_of_text
    from acc_lm.reporting.rows import histogram

    order = data.order(config.seed, config.training.global_batch_size)
    pairs = [*lines_of_text(config, data, order), *notes_of_text(data)]
    if data.facts.conversations:
        pairs.append(("learned", data.facts.conversations))
    if data.facts.has_roles:
        template = load_template(data.tokenizer, config.data.chat_template, data.template_day)
        own = "acc-lm's plain one" if template.text == PLAIN_TEMPLATE else template.origin
        pairs += [("template", f"{own}; {template.end_token!r} ends a turn")]
    width = max(len(name) for name, _ in pairs)
    lines = [f"{name:<{width}}  {text}" for name, text in pairs]
    if with_lengths and len(lengths := lengths_of(data, config.data, config.seed)):
        is_text = data.facts.format == "text"
        unit = "documents" if is_text else "conversations (the first 1,000 of each source)"
        lines += ["", *histogram(lengths, None if is_text else config.data.sequence_length + 1, unit)]
    return lines
