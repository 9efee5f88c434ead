"""Documents -> token rows on disk, built once and found again by the hash of their content.

corpus ──► held-out documents ──► tokenizer ──► <cache>/<key>/{train,eval}.bin ──► Rows ──► micro-batches
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from acc_lm.cache import cache_folder, make_once, write_facts
from acc_lm.config import DataConfig, TokenizerConfig
from acc_lm.data.dataset import FORMER, ROWS_FORMAT, Data, DataFacts, tokenizer_key
from acc_lm.data.mixtures import build_mixture, config_of_source, naming_source
from acc_lm.data.one_source import build_source, facts_in, has_former_ids, open_text, with_sets
from acc_lm.errors import ConfigError, DataError
from acc_lm.rows.stream_reader import open_shards
from acc_lm.rows.streams import StreamRows
from acc_lm.text.corpus import open_corpus
from acc_lm.text.documents import Document, Skipped, hash_text
from acc_lm.text.locations import find_files
from acc_lm.text.parts import NO_PREPARATION, Preparation
from acc_lm.text.tokenizer import (
    build_encoder,
    count_ids,
    id_dtype,
    make_tokenizer,
)
from acc_lm.text.writing import TextWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

A_LOT = 1 << 40
"""Characters of a stream, whose length is unknown."""


def build_data(
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    global_batch_size: int,
    is_main_process: bool = True,
    day: str | None = None,
    preparation: Preparation = NO_PREPARATION,
) -> Data:
    """Tokenised rows of both splits, from the cache or built now; a file lock coordinates the processes, no collective.

    Args:
        tokenizer: an existing tokenizer; None: one is built from the training split as `tokenizer_config` says.
        day: date of the run for a chat template that reads the clock, as YYYY-MM-DD; None: today's.
        preparation: processes that tokenise the text, and a folder for the parts that they have finished.

    Raises:
        DataError: the text cannot be read, or there is too little of it.
    """
    day = config.chat_template_date or day or date.today().isoformat()
    if config.streaming:
        data = _build_stream(config, tokenizer_config, tokenizer, seed, is_main_process)
    else:
        build = build_mixture if config.mixture else build_source
        data = build(config, tokenizer_config, tokenizer, seed, global_batch_size, is_main_process, day, preparation)
    for key, used in (("chat_template", data.facts.has_roles), ("chat_template_date", data.template_day is not None)):
        if getattr(config, key) is not None and not used:
            what = "text without roles" if key == "chat_template" else "a chat template that reads no clock"
            raise ConfigError(f"data.{key} must be null for {what}, got {getattr(config, key)}; leave it out")
    return data


def check_files(config: DataConfig) -> None:
    """Check that every file of a recipe exists, before any of them is read.

    Raises:
        DataError: a file is missing or empty.
    """
    for source in config.mixture:
        with naming_source(source.title):
            check_files(config_of_source(source, config))
    if config.source == "files" and not config.mixture:
        find_files(config.files, "data.files", config.cache_dir)
        if config.eval_files:
            find_files(config.eval_files, "data.eval_files", config.cache_dir)
    for name, files in config.evaluation_sets.items():
        find_files(files, f"data.evaluation_sets.{name}", config.cache_dir)


# --- streams -------------------------------------------------------------------------------------------------------


def _build_stream(
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    is_main_process: bool,
) -> Data:
    """Data of a streaming run: training rows are built on the fly, held-out rows stay on disk."""
    shards = open_shards(config)
    if len(shards.names) < config.num_streams:
        raise DataError(
            f"data.num_streams must be at most the number of shards {len(shards.names)}, got {config.num_streams}; "
            "lower it, or split the text into more files"
        )
    if tokenizer is None:
        tokenizer = make_tokenizer(tokenizer_config, ())
    made_by = tokenizer_key(tokenizer)
    corpus = open_corpus(_held_out_of(config), seed)
    held_out_key = hash_text(
        repr((ROWS_FORMAT, "held out", corpus.key, made_by, config.text_column, config.skip_bad_rows))
    )

    def build(work: Path) -> None:
        sizes: list[int] = []
        files: list[str] = []

        def documents() -> Iterator[Document]:
            for document in corpus.train(Skipped(config.skip_bad_rows)):
                sizes.append(len(document.text.encode()))
                files.extend([document.file] if document.file else [])
                yield document

        encoder, dtype = build_encoder(tokenizer), id_dtype(count_ids(tokenizer))
        num_tokens = TextWriter(encoder, work, "eval", dtype, with_bytes=True).write(documents())
        if num_tokens < 2:
            raise DataError("data: the held-out text must have at least one target, got none; add text")
        num_ids = count_ids(tokenizer)
        encoder.expect(A_LOT)  # of training text, which the readers encode
        facts = DataFacts(
            num_ids, 0, 0, 0, len(sizes), sum(sizes), num_tokens, eval_files=tuple(files), encoder=encoder.engine
        )
        corpus.check()
        write_facts(work, asdict(facts))

    folder = make_once(cache_folder(config.cache_dir), held_out_key, build, is_main_process)
    facts = facts_in(folder)
    about = f"{len(shards.names):,} shards in {config.num_streams} streams"
    end = None if config.attend_across_documents else tokenizer.eos_token_id

    def key_of(form: str, text: str) -> str:
        return hash_text(repr((form, "stream", text, made_by, config.text_column, config.skip_bad_rows)))

    held_out = open_text(folder, id_dtype(facts.vocab_size), config.sequence_length, end)
    facts, key = replace(facts, source={"streams": about}), key_of(ROWS_FORMAT, shards.key + corpus.key)
    data = Data(StreamRows(config, tokenizer, seed), held_out, tokenizer, facts, key)
    if shards.former_key is not None and has_former_ids(data, None):
        data = replace(data, former_key=key_of(FORMER, shards.former_key))
    return with_sets(data, config, None, is_main_process)


def _held_out_of(config: DataConfig) -> DataConfig:
    """Recipe for the held-out text of a streaming run alone."""
    if config.source == "files":
        find_files(config.eval_files, "data.eval_files", config.cache_dir)
        return config.model_copy(update={"files": config.eval_files, "eval_files": ()})
    return config.model_copy(update={"dataset_split": config.eval_split, "eval_split": None})
