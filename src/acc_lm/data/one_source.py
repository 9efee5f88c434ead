"""One source, of text or of conversations: documents -> rows on disk -> Data."""

from __future__ import annotations

import gzip
import lzma
import math
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from acc_lm.cache import cache_folder, make_once, read_facts, write_facts
from acc_lm.chat.conversations import ChatPlan, ItemWriter, count_conversations, plan_of, template_of
from acc_lm.chat.items import ItemCounts, check, describe
from acc_lm.chat.template import DAY
from acc_lm.config import DataConfig, TokenizerConfig
from acc_lm.data.dataset import FORMER, ROWS_FORMAT, Data, DataFacts, SetFacts, limit_key, text_key, tokenizer_key
from acc_lm.errors import ConfigError, DataError
from acc_lm.rows.packing import PackedRows, open_rows
from acc_lm.rows.text_rows import Rows
from acc_lm.text.contents import check_content, content_keys
from acc_lm.text.corpus import open_corpus
from acc_lm.text.documents import Corpus, Document, Documents, Skipped, hash_text, text_in
from acc_lm.text.files import read_files
from acc_lm.text.locations import find_files
from acc_lm.text.parts import NO_PREPARATION, PART_OF_CONVERSATIONS, PART_OF_TEXT, Encoded, Encoder, Preparation
from acc_lm.text.splitting import Split, split_documents
from acc_lm.text.tokenizer import (
    PIECE,
    build_encoder,
    count_ids,
    encode_part,
    encodes_pieces,
    id_dtype,
    make_tokenizer,
    text_encoder,
)
from acc_lm.text.writing import TextWriter, Writer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


COMPRESS_LIMIT = 16_000_000  # maximum bytes of held-out text for the comparison with gzip and xz


def build_source(
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    global_batch_size: int,
    is_main_process: bool,
    day: str,
    preparation: Preparation = NO_PREPARATION,
) -> Data:
    """Build the rows of one source on disk; arguments as for `build_data`."""
    plan = plan_of(config, day)
    if config.max_tokens is not None and tokenizer is None and tokenizer_config.kind != "byte":
        raise ConfigError(
            f"data.max_tokens must be null for a tokenizer that is built from the text, got {config.max_tokens}; "
            "set tokenizer.name_or_path, or name fewer data.files"
        )
    corpus = open_corpus(config, seed, plan.read if plan else None)
    made_by = tokenizer_config.content() if tokenizer is None else tokenizer_key(tokenizer)

    def key_of(form: str, text: str) -> str:
        parts = (form, text, made_by, config.text_column, config.eval_fraction, config.skip_bad_rows)
        return hash_text(repr(parts + limit_key(config) + (plan.key(tokenizer) if plan else ())))

    def build(work: Path) -> None:
        how = _build if plan is None else partial(_build_conversations, plan)
        own = preparation.inside(key)
        used = corpus
        if config.max_tokens is not None:
            counted = tokenizer or make_tokenizer(tokenizer_config, ())
            used = until_limit(corpus, config, counted, plan, is_main_process, own)
        how(
            used,
            config,
            tokenizer_config,
            tokenizer,
            work,
            global_batch_size,
            is_main_process,
            own,
        )
        corpus.check()
        if own.folder is not None:
            shutil.rmtree(own.folder, ignore_errors=True)

    key = key_of(ROWS_FORMAT, corpus.key)

    data = _load(
        make_once(cache_folder(config.cache_dir), key, build, is_main_process),
        key,
        config,
        tokenizer,
        global_batch_size,
        plan,
    )
    is_known = corpus.former_key is not None and data.facts.as_in_rows_1 and has_former_ids(data, plan)
    former_key = key_of(FORMER, corpus.former_key or "") if is_known else None
    data = replace(data, shuffle=config.shuffle, text_key=text_key(corpus, config, plan), former_key=former_key)
    return with_sets(data, config, plan, is_main_process)


def until_limit(
    corpus: Corpus,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    plan: ChatPlan | None,
    show_progress: bool = False,
    preparation: Preparation = NO_PREPARATION,
) -> Corpus:
    """The corpus up to the document that brings its training text to `data.max_tokens` ids; all of it without a limit."""
    max_tokens = config.max_tokens
    if max_tokens is None:
        return corpus
    count = count_text(tokenizer) if plan is None else count_conversations(plan, tokenizer)
    parts = preparation.encode("count", corpus.train, config.skip_bad_rows, count, PART_OF_TEXT)
    num_documents = num_ids = 0
    disable = None if show_progress else True
    with closing(parts), tqdm(total=max_tokens, unit="tok", unit_scale=True, desc="count", disable=disable) as bar:
        for part in parts:
            totals = num_ids + np.cumsum(part["lengths"])
            taken = min(int(np.searchsorted(totals, max_tokens)) + 1, len(totals))
            num_documents, num_ids = num_documents + taken, int(totals[taken - 1])
            bar.update(min(num_ids, max_tokens) - bar.n)
            if num_ids >= max_tokens:
                break
    about = f"{num_documents:,} documents of {num_ids:,} tokens, because data.max_tokens is {max_tokens:,}"
    facts = corpus.facts | ({"ended": about} if num_ids >= max_tokens else {})
    train = Documents(lambda skipped: islice(corpus.train(skipped), num_documents))
    return replace(corpus, train=train, facts=facts)


def count_text(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Function that counts the ids of each document of plain text."""
    encoder = build_encoder(tokenizer)
    return lambda part: {"lengths": encode_part(part, encoder, with_bytes=False)[2]}


def has_former_ids(data: Data, plan: ChatPlan | None) -> bool:
    """True if the format rows-1 had the same ids.

    It cut ids to 16 bits by the number of tokens, not by the highest id, and it cut every long text into pieces.
    """
    is_long = data.facts.longest_document > PIECE and plan is None
    fits = id_dtype(len(data.tokenizer)) == id_dtype(count_ids(data.tokenizer))
    return fits and not (is_long and not encodes_pieces(text_encoder(data.tokenizer)))


def _load(
    folder: Path, key: str, config: DataConfig, tokenizer: Any, global_batch_size: int, plan: ChatPlan | None
) -> Data:
    facts = facts_in(folder)
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)
    dtype = id_dtype(facts.vocab_size)
    if plan is not None:
        for counts in facts.item_counts.values():
            check(ItemCounts(**counts), config.max_lossy_share)
        day = _keep_template(plan, tokenizer) if facts.has_roles else None
        rows = open_rows(folder, "train", dtype, config)
        if len(rows) < global_batch_size:
            raise DataError(
                f"data: the conversations must fill training.global_batch_size {global_batch_size} rows, got {len(rows)} "
                f"of {config.sequence_length} tokens; lower it or add conversations"
            )
        return Data(rows, open_rows(folder, "eval", dtype, config), tokenizer, facts, key, template_day=day)
    end = None if config.attend_across_documents else tokenizer.eos_token_id
    train = Rows(np.memmap(folder / "train.bin", dtype=dtype, mode="r"), config.sequence_length, end=end)
    evaluation = open_text(folder, dtype, config.sequence_length, end)
    _check_amount(len(train.tokens), config.sequence_length, global_batch_size, exact=True)
    return Data(train, evaluation, tokenizer, facts, key)


def _keep_template(plan: ChatPlan, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Store the chat template in the tokenizer, which is exported to final/; return the date if the template reads it."""
    template = template_of(plan, tokenizer)
    if plan.template_file is not None or not tokenizer.chat_template:
        tokenizer.chat_template = template.text
    tokenizer.init_kwargs.pop(DAY, None)
    if not template.reads_clock:
        return None
    tokenizer.init_kwargs[DAY] = template.day
    return template.day


def facts_in(folder: Path) -> DataFacts:
    facts = read_facts(folder)
    return DataFacts(**facts | {"eval_files": tuple(facts["eval_files"])})


def with_sets(data: Data, config: DataConfig, plan: ChatPlan | None, is_main_process: bool) -> Data:
    """The same data with the recipe's evaluation sets added to its own."""
    sets = {name: _open_set(name, config, plan, data, is_main_process) for name in config.evaluation_sets}
    return replace(
        data,
        evaluation_sets=data.evaluation_sets | {name: rows for name, (rows, _) in sets.items()},
        set_facts=data.set_facts | {name: facts for name, (_, facts) in sets.items()},
    )


def _open_set(
    name: str, config: DataConfig, plan: ChatPlan | None, data: Data, is_main_process: bool
) -> tuple[Rows | PackedRows, SetFacts]:
    """Rows of one of `data.evaluation_sets`, from the cache or built now, with the tokenizer and the format of the run.

    Raises:
        DataError: a file is missing, empty or in another format.
    """
    tokenizer, dtype = data.tokenizer, id_dtype(data.facts.vocab_size)
    files = find_files(config.evaluation_sets[name], f"data.evaluation_sets.{name}", config.cache_dir)
    read = plan.read if plan else text_in(config.text_column)
    files_key, _ = content_keys(files, config.text_column, config.cache_dir)
    parts = (ROWS_FORMAT, "set", files_key, tokenizer_key(tokenizer), config.skip_bad_rows)
    key = hash_text(repr(parts + (plan.key(tokenizer) if plan else ())))

    def build(work: Path) -> None:
        sizes: list[int] = []

        def documents() -> Iterator[Document]:
            for document in read_files(files, read, Skipped(config.skip_bad_rows), only_records=plan is not None):
                sizes.append(len(document.text.encode()))
                yield document

        about, item_counts = "", {}
        if plan is None:
            tokens = TextWriter(build_encoder(tokenizer), work, "eval", dtype, with_bytes=True).write(documents())
        else:
            counts = ItemWriter(plan, tokenizer, work, "eval", dtype, with_bytes=True).write(documents())
            tokens, about, item_counts = counts.ids, describe(counts), asdict(counts)
        check_content(files, config.text_column, files_key)
        write_facts(work, asdict(SetFacts(len(sizes), sum(sizes), tokens, about, key, item_counts)))

    folder = make_once(cache_folder(config.cache_dir), key, build, is_main_process)
    facts = SetFacts(**read_facts(folder))
    if plan is not None:
        check(ItemCounts(**facts.item_counts), config.max_lossy_share)
    if facts.tokens < 2:
        raise DataError(f"data.evaluation_sets.{name} must have at least one target, got none; add text")
    if plan is not None:
        return open_rows(folder, "eval", dtype, config), facts
    end = None if config.attend_across_documents else tokenizer.eos_token_id
    return open_text(folder, dtype, config.sequence_length, end), facts


def open_text(folder: Path, dtype: type[np.unsignedinteger], sequence_length: int, end: int | None) -> Rows:
    """Open rows of evaluation text, with the bytes of each token."""
    return Rows(
        np.memmap(folder / "eval.bin", dtype=dtype, mode="r"),
        sequence_length,
        np.asarray(np.memmap(folder / "eval_bytes.bin", dtype=np.uint32, mode="r")),
        end,
    )


def _check_amount(num_tokens: int, sequence_length: int, global_batch_size: int, *, exact: bool) -> None:
    """Refuse text that cannot fill one row or one global batch; `exact`: the tokens were counted, not bounded by bytes."""
    about = "" if exact else "at most "
    if num_tokens < sequence_length + 1:
        raise DataError(
            f"data: the training text must fill a row of data.sequence_length {sequence_length} + 1 tokens, "
            f"got {about}{num_tokens}; lower it or add text"
        )
    num_rows = math.ceil((num_tokens - 1) / sequence_length)
    if num_rows < global_batch_size:
        rows = "row" if num_rows == 1 else "rows"
        raise DataError(
            f"data: the training text must fill training.global_batch_size {global_batch_size} rows, "
            f"got {about}{num_rows} {rows} of {sequence_length} tokens; lower it or add text"
        )


def _build(
    corpus: Corpus,
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    work: Path,
    global_batch_size: int,
    show_progress: bool,
    preparation: Preparation,
) -> None:
    split = split_documents(corpus, config, preparation=preparation)
    sizes = split.counts
    # A token stands for at least one byte, so bytes bound the tokens before any tokenizer is trained.
    _check_amount(
        sizes["train_bytes"] + sizes["train_documents"], config.sequence_length, global_batch_size, exact=False
    )
    if tokenizer is None:
        tokenizer = make_tokenizer(tokenizer_config, (document.text for document in split.train()))
        tokenizer.save_pretrained(work / "tokenizer")
    vocab_size, encoder = count_ids(tokenizer), build_encoder(tokenizer)
    if preparation.num_processes:  # the processes inherit the decision
        encoder.expect(sizes["train_bytes"])
    dtype = id_dtype(vocab_size)
    keep_text = sizes["eval_bytes"] <= COMPRESS_LIMIT
    train = TextWriter(encoder, work, "train", dtype)
    evaluation = TextWriter(encoder, work, "eval", dtype, with_bytes=True, keep_text=keep_text)
    _write_split(split, train, evaluation, PART_OF_TEXT, show_progress, preparation)
    train_tokens, eval_tokens = train.finish(), evaluation.finish()
    if eval_tokens < 2:
        raise DataError(
            "data: the held-out text must have at least one target, got none; raise data.eval_fraction or add text"
        )
    facts = DataFacts(
        vocab_size=vocab_size,
        train_tokens=train_tokens,
        eval_tokens=eval_tokens,
        eval_files=tuple(evaluation.files),
        gzip_bytes=len(gzip.compress(evaluation.text, 9)) if keep_text else None,
        xz_bytes=len(lzma.compress(evaluation.text, preset=9)) if keep_text else None,
        source=corpus.facts,
        encoder=encoder.engine,
        **sizes,
    )
    write_facts(work, asdict(facts))


def _write_split(
    split: Split, train: Writer, evaluation: Writer, size: int, show_progress: bool, preparation: Preparation
) -> None:
    """Encode all documents of a split in one pass over each of its texts.

    Args:
        size: characters of a part, at least.
    """
    writers = {"train": train, "eval": evaluation}
    total = split.counts["train_bytes"] + split.counts["eval_bytes"]
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenise", disable=None if show_progress else True) as bar:
        for name, text in split.texts.items():

            def encode(part: list[Document], text: Documents = text) -> Encoded:
                encoded: Encoded = {}
                for (side, writer), documents in zip(writers.items(), split.divide(part, text), strict=True):
                    if documents:
                        encoded |= {f"{side}.{key}": array for key, array in writer.encode(documents).items()}
                return encoded

            for encoded in preparation.encode(name, text, split.num_skipped, encode, size):
                for side, writer in writers.items():
                    own = {key.removeprefix(f"{side}."): encoded[key] for key in encoded if key.startswith(side)}
                    if own:
                        writer.add(own)
                        bar.update(int(own["num_bytes"]))


def _build_conversations(
    plan: ChatPlan,
    corpus: Corpus,
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    work: Path,
    global_batch_size: int,
    show_progress: bool,
    preparation: Preparation,
) -> None:
    split = split_documents(corpus, config, False, preparation)
    if tokenizer is None:
        tokenizer = make_tokenizer(tokenizer_config, plan.texts(split.train()))
        tokenizer.save_pretrained(work / "tokenizer")
    dtype = id_dtype(count_ids(tokenizer))
    train = ItemWriter(plan, tokenizer, work, "train", dtype)
    evaluation = ItemWriter(plan, tokenizer, work, "eval", dtype, with_bytes=True)
    _write_split(split, train, evaluation, PART_OF_CONVERSATIONS, show_progress, preparation)
    counts = {"train": train.finish(), "eval": evaluation.finish()}
    facts = DataFacts(
        vocab_size=count_ids(tokenizer),
        train_tokens=counts["train"].ids,
        eval_tokens=counts["eval"].ids,
        format=plan.format,
        conversations=f"{plan.format}, trained on {plan.train_on}: {describe(counts['train'])}",
        item_counts={side: asdict(count) for side, count in counts.items()},
        has_roles=any(count.plain < count.conversations for count in counts.values()),
        source=corpus.facts,
        **split.counts,
    )
    write_facts(work, asdict(facts))
