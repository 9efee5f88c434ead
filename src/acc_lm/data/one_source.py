"""One source, of text or of conversations: documents -> rows on disk -> Data."""

from __future__ import annotations

import gzip
import lzma
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from acc_lm.cache import cache_folder, flush_file, make_once, read_facts, write_facts
from acc_lm.chat.conversations import ChatPlan, count_conversations, plan_of, template_of, write_items
from acc_lm.chat.items import ItemCounts, check, describe
from acc_lm.chat.template import DAY
from acc_lm.config import DataConfig, TokenizerConfig
from acc_lm.data.dataset import FORMER, ROWS_FORMAT, Data, DataFacts, SetFacts, limit_key, text_key, tokenizer_key
from acc_lm.errors import ConfigError, DataError
from acc_lm.rows.packing import PackedRows, open_rows
from acc_lm.rows.text_rows import Rows
from acc_lm.text.contents import check_content, content_keys
from acc_lm.text.corpus import open_corpus
from acc_lm.text.documents import Corpus, Document, Skipped, hash_text, text_in
from acc_lm.text.encoder import TextEncoder
from acc_lm.text.files import read_files
from acc_lm.text.locations import find_files
from acc_lm.text.parts import NO_PREPARATION, PART_OF_TEXT, Encoded, Encoder, Preparation
from acc_lm.text.splitting import split_documents
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
    made_by = tokenizer_config.model_dump_json() if tokenizer is None else tokenizer_key(tokenizer)

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
    parts = preparation.encode("count", corpus.train(Skipped(config.skip_bad_rows)), count, PART_OF_TEXT)
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
    return replace(corpus, train=lambda skipped: islice(corpus.train(skipped), num_documents), facts=facts)


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
            tokens = write_text(documents(), build_encoder(tokenizer), dtype, work, "eval", with_bytes=True)
        else:
            counts = write_items(
                documents(), plan, tokenizer, work, "eval", dtype, with_bytes=True, progress=lambda _: None
            )
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
    train, evaluation, sizes = split_documents(corpus, config)
    # A token stands for at least one byte, so bytes bound the tokens before any tokenizer is trained.
    _check_amount(
        sizes["train_bytes"] + sizes["train_documents"], config.sequence_length, global_batch_size, exact=False
    )
    if tokenizer is None:
        tokenizer = make_tokenizer(tokenizer_config, (document.text for document in train()))
        tokenizer.save_pretrained(work / "tokenizer")
    vocab_size, encoder = count_ids(tokenizer), build_encoder(tokenizer)
    if preparation.num_processes:  # the processes inherit the decision
        encoder.expect(sizes["train_bytes"])
    dtype = id_dtype(vocab_size)
    total = sizes["train_bytes"] + sizes["eval_bytes"]
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenise", disable=None if show_progress else True) as bar:
        train_tokens = write_text(
            train(), encoder, dtype, work, "train", with_bytes=False, progress=bar.update, preparation=preparation
        )
        eval_files: list[str] = []
        eval_text: list[bytes] = []
        keep_text = sizes["eval_bytes"] <= COMPRESS_LIMIT

        def noted() -> Iterator[Document]:
            for document in evaluation():
                if document.file:
                    eval_files.append(document.file)
                if keep_text:
                    eval_text.append(document.text.encode())
                yield document

        eval_tokens = write_text(
            noted(), encoder, dtype, work, "eval", with_bytes=True, progress=bar.update, preparation=preparation
        )
    if eval_tokens < 2:
        raise DataError(
            "data: the held-out text must have at least one target, got none; raise data.eval_fraction or add text"
        )
    stream = b"".join(eval_text)
    facts = DataFacts(
        vocab_size=vocab_size,
        train_tokens=train_tokens,
        eval_tokens=eval_tokens,
        eval_files=tuple(eval_files),
        gzip_bytes=len(gzip.compress(stream, 9)) if keep_text else None,
        xz_bytes=len(lzma.compress(stream, preset=9)) if keep_text else None,
        source=corpus.facts,
        encoder=encoder.engine,
        **sizes,
    )
    write_facts(work, asdict(facts))


def write_text(
    documents: Iterator[Document],
    encoder: TextEncoder,
    dtype: type[np.unsignedinteger],
    work: Path,
    split: str,
    *,
    with_bytes: bool,
    progress: Callable[[int], object] = lambda _: None,
    preparation: Preparation = NO_PREPARATION,
) -> int:
    """Tokenise the text of one split into `work`, each document followed by the end token; return the number of ids."""
    num_tokens = 0

    def encode(part: list[Document]) -> Encoded:
        ids, byte_counts, _ = encode_part(part, encoder, with_bytes=with_bytes)
        num_bytes = sum(len(document.text.encode()) for document in part)
        sizes = {"bytes": byte_counts} if with_bytes else {}
        return {"ids": ids.astype(dtype), "num_bytes": np.array(num_bytes)} | sizes

    with ExitStack() as stack:
        ids_file = stack.enter_context((work / f"{split}.bin").open("wb"))
        bytes_file = stack.enter_context((work / f"{split}_bytes.bin").open("wb")) if with_bytes else None
        for part in preparation.encode(split, documents, encode, PART_OF_TEXT):
            ids_file.write(part["ids"].tobytes())
            if bytes_file:
                bytes_file.write(part["bytes"].tobytes())
            num_tokens += len(part["ids"])
            progress(int(part["num_bytes"]))
        for file in (ids_file, bytes_file):
            if file:
                flush_file(file)
    return num_tokens


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
    train, evaluation, sizes = split_documents(corpus, config, can_cut=False)
    if tokenizer is None:
        tokenizer = make_tokenizer(tokenizer_config, plan.texts(train()))
        tokenizer.save_pretrained(work / "tokenizer")
    dtype = id_dtype(count_ids(tokenizer))
    total = sizes["train_bytes"] + sizes["eval_bytes"]
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenise", disable=None if show_progress else True) as bar:
        counts = {
            split: write_items(
                documents(),
                plan,
                tokenizer,
                work,
                split,
                dtype,
                with_bytes=split == "eval",
                progress=bar.update,
                preparation=preparation,
            )
            for split, documents in (("train", train), ("eval", evaluation))
        }
    facts = DataFacts(
        vocab_size=count_ids(tokenizer),
        train_tokens=counts["train"].ids,
        eval_tokens=counts["eval"].ids,
        format=plan.format,
        conversations=f"{plan.format}, trained on {plan.train_on}: {describe(counts['train'])}",
        item_counts={split: asdict(count) for split, count in counts.items()},
        has_roles=any(count.plain < count.conversations for count in counts.values()),
        source=corpus.facts,
        **sizes,
    )
    write_facts(work, asdict(facts))
