"""Mixtures: several sources that share a tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from acc_lm.cache import cache_folder, make_once, write_facts
from acc_lm.chat import conversations
from acc_lm.chat.conversations import ChatPlan, plan_of
from acc_lm.config import DataConfig, SourceConfig, TokenizerConfig
from acc_lm.data.dataset import ROWS_FORMAT, Data, DataFacts, Mixture, SetFacts
from acc_lm.data.one_source import build_source, with_sets
from acc_lm.errors import DataError, UserError
from acc_lm.rows.mixture import MixedRows, shares
from acc_lm.rows.packing import PackedRows
from acc_lm.rows.text_rows import Rows
from acc_lm.text.corpus import open_corpus
from acc_lm.text.documents import hash_text
from acc_lm.text.parts import Preparation
from acc_lm.text.splitting import split_documents
from acc_lm.text.tokenizer import make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_mixture(
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    global_batch_size: int,
    is_main_process: bool,
    day: str,
    preparation: Preparation,
) -> Data:
    """Build each source as if it were alone; without a given tokenizer, one is built from the training text of all."""
    names = tuple(source.title for source in config.mixture)
    configs = [config_of_source(source, config) for source in config.mixture]
    plans = []
    for name, part in zip(names, configs, strict=True):
        with naming_source(name):
            plans.append(plan_of(part, day))
    if len({plan is None for plan in plans}) > 1:
        kinds = ", ".join(f"{name}: {plan.format if plan else 'text'}" for name, plan in zip(names, plans, strict=True))
        raise DataError(
            f"data.mixture must consist of text only or of conversations only, got {kinds}; set data.format to text, or train on them in two runs"
        )
    if tokenizer is None:
        tokenizer = _shared_tokenizer(config, configs, plans, names, tokenizer_config, seed, is_main_process)
    parts = []
    for name, part in zip(names, configs, strict=True):
        with naming_source(name):
            # A copy: a source may store its chat template in it, which the next source would take for the model's own.
            own = deepcopy(tokenizer)
            parts.append(build_source(part, tokenizer_config, own, seed, 1, is_main_process, day, preparation))
    tokenizer = next((part.tokenizer for part in parts if part.tokenizer.chat_template), parts[0].tokenizer)
    train = MixedRows([part.train for part in parts if isinstance(part.train, Rows | PackedRows)])
    sizes = tuple(len(part) for part in train.parts)
    tokens = [source.tokens for source in config.mixture]
    if None not in tokens:
        counts = tuple(
            math.ceil(Fraction(wanted or 0) * size / targets)
            for wanted, size, targets in zip(tokens, sizes, train.num_targets, strict=True)
        )
        rows_per_pass = sum(counts)
    else:
        counts, rows_per_pass = shares([source.weight or 0 for source in config.mixture]), len(train)
    if len(train) < global_batch_size:
        raise DataError(
            f"data.mixture must fill training.global_batch_size {global_batch_size} rows, got {len(train)} "
            f"of {config.sequence_length} tokens; lower it or add text"
        )
    facts = _add_facts([part.facts for part in parts], names)
    key, former_keys = hash_text(repr([part.key for part in parts])), [part.former_key for part in parts]
    former_key = None if None in former_keys else hash_text(repr(former_keys))
    data = Data(train, MixedRows([part.evaluation for part in parts]), tokenizer, facts, key, former_key)
    data = replace(
        data,
        evaluation_sets={name: part.evaluation for name, part in zip(names, parts, strict=True)},
        set_facts={name: _facts_of_held_out(part) for name, part in zip(names, parts, strict=True)},
        mixture=Mixture(names, sizes, counts, rows_per_pass),
        shuffle=config.shuffle,
        template_day=next((part.template_day for part in parts if part.template_day), None),
    )
    return with_sets(data, config, plans[0], is_main_process)


def config_of_source(source: SourceConfig, config: DataConfig) -> DataConfig:
    """Recipe for one source alone."""
    kept = {key: getattr(source, key) for key in ("files", "dataset", "dataset_config", "dataset_split")}
    kept |= {key: getattr(source, key) for key in ("eval_files", "eval_split", "max_tokens")}
    kept |= {key: getattr(source, key) or getattr(config, key) for key in ("text_column", "format", "columns", "roles")}
    kept |= {"source": "files" if source.files else "hub", "mixture": (), "evaluation_sets": {}}
    return config.model_copy(update=kept)


@contextmanager
def naming_source(name: str) -> Iterator[None]:
    """Name the source of a mixture in its errors."""
    try:
        yield
    except UserError as error:
        raise type(error)(*(f"data.mixture, source {name}: {problem}" for problem in error.problems)) from None


def _shared_tokenizer(
    config: DataConfig,
    configs: list[DataConfig],
    plans: list[ChatPlan | None],
    names: tuple[str, ...],
    tokenizer_config: TokenizerConfig,
    seed: int,
    is_main_process: bool,
) -> PreTrainedTokenizerBase:
    """Tokenizer built from the training text of every source, each used once, whatever its share."""
    corpora = [open_corpus(part, seed, plan.read if plan else None) for part, plan in zip(configs, plans, strict=True)]
    columns = [
        (
            part.text_column,
            f"{plan.format} {conversations.ITEMS_FORMAT}" if plan else "text",
            *(plan.names if plan else ()),
        )
        for part, plan in zip(configs, plans, strict=True)
    ]
    parts = (ROWS_FORMAT, "tokenizer", [corpus.key for corpus in corpora], columns, config.eval_fraction)
    key = hash_text(repr((parts, tokenizer_config.content(), config.skip_bad_rows)))

    def texts() -> Iterator[str]:
        for name, part, plan, corpus in zip(names, configs, plans, corpora, strict=True):
            with naming_source(name):
                train = split_documents(corpus, part, can_cut=plan is None).train()
                yield from plan.texts(train) if plan else (document.text for document in train)

    def make(work: Path) -> None:
        make_tokenizer(tokenizer_config, texts()).save_pretrained(work / "tokenizer")
        for corpus in corpora:
            corpus.check()
        write_facts(work, asdict(SetFacts(0, 0, 0, key=key)))

    from transformers import AutoTokenizer

    folder = make_once(cache_folder(config.cache_dir), key, make, is_main_process)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)
    return tokenizer


def _add_facts(facts: list[DataFacts], names: tuple[str, ...]) -> DataFacts:
    """Facts of all sources together; without compressed sizes, because each source has its own held-out text."""
    summed = ["train_documents", "train_bytes", "train_tokens", "eval_documents", "eval_bytes", "eval_tokens"]
    summed += ["skipped_records", "shared_documents"]
    summaries = [f"{name}: {part.conversations}" for name, part in zip(names, facts, strict=True) if part.conversations]
    return DataFacts(
        vocab_size=facts[0].vocab_size,
        **{key: sum(getattr(part, key) for part in facts) for key in summed},
        eval_files=tuple(file for part in facts for file in part.eval_files),
        format=", ".join(dict.fromkeys(part.format for part in facts)),
        encoder="; ".join(dict.fromkeys(part.encoder for part in facts if part.encoder)),
        conversations="; ".join(summaries),
        has_roles=any(part.has_roles for part in facts),
    )


def _facts_of_held_out(data: Data) -> SetFacts:
    facts = data.facts
    return SetFacts(facts.eval_documents, facts.eval_bytes, facts.eval_tokens, key=data.key)
