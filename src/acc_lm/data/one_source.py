"""Documents -> token rows on disk, made once and found again by the hash of their content.

corpus ──► held-out documents ──► tokenizer ──► <cache>/<key>/{train,eval}.bin ──► Rows ──► micro-batches
"""

from __future__ import annotations

import gzip
import lzma
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from acc_lm import conversations
from acc_lm.cache import cache_folder, flush, make_once, read_facts, write_facts
from acc_lm.chat import DAY, ItemCounts, check, describe
from acc_lm.config import DataConfig, SourceConfig, TokenizerConfig
from acc_lm.conversations import ChatPlan, open_rows, plan_of, template_of, write_items
from acc_lm.documents import encode_documents, split_documents
from acc_lm.errors import ConfigError, DataError, UserError
from acc_lm.losses import IGNORE_INDEX
from acc_lm.mixture import MixedOrder, MixedRows, shares
from acc_lm.order import RowOrder, StreamOrder
from acc_lm.packing import PackedRows
from acc_lm.rows import Rows
from acc_lm.sources import (
    Corpus,
    Document,
    Skipped,
    check_content,
    content_keys,
    find_files,
    hash_text,
    open_corpus,
    read_files,
    text_in,
)
from acc_lm.stream_reader import open_shards
from acc_lm.streaming import StreamRows
from acc_lm.tokenizer import PIECE, count_ids, encodes_pieces, id_dtype, make_tokenizer, text_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "rows-2"  # part of every cache key: raise it when the files or their meaning change
FORMER = "rows-1"  # under which the same rows may be known to a checkpoint
COMPRESS_LIMIT = 16_000_000  # bytes of held-out text up to which gzip and xz are run for comparison


@dataclass(frozen=True)
class DataFacts:
    """What is known about the text of a run; kept beside the rows."""

    vocab_size: int
    train_documents: int
    train_bytes: int
    train_tokens: int
    eval_documents: int
    eval_bytes: int
    eval_tokens: int
    skipped_records: int = 0
    shared_documents: int = 0
    as_in_rows_1: bool = True
    """Whether the documents were held out in this way under the format of that name, too."""
    longest_document: int = 0
    """In bytes."""
    eval_files: tuple[str, ...] = ()
    gzip_bytes: int | None = None
    xz_bytes: int | None = None
    source: dict[str, Any] = field(default_factory=dict)
    format: str = "text"
    conversations: str = ""
    """What became of the training conversations, for people."""
    item_counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """`ItemCounts` of each split, of conversations."""
    has_roles: bool = False
    """Whether a chat template wrote some of it."""

    @property
    def compressed_bits_per_byte(self) -> dict[str, float]:
        """Bits per byte of gzip -9 and xz -9 on the held-out text as one stream."""
        sizes = {"gzip": self.gzip_bytes, "xz": self.xz_bytes}
        return {name: 8 * size / self.eval_bytes for name, size in sizes.items() if size is not None}

    def beside_compressors(self, bits_per_byte: float | None, num_targets: int) -> dict[str, float]:
        """A model's score, beside the compressors' where it covers the same text; empty where it has none."""
        if bits_per_byte is None:
            return {}
        return {
            "model": bits_per_byte,
            **(self.compressed_bits_per_byte if num_targets == self.eval_tokens - 1 else {}),
        }


@dataclass(frozen=True)
class SetFacts:
    """What is known about an evaluation set; kept beside its rows."""

    documents: int
    num_bytes: int
    tokens: int
    conversations: str = ""
    """What became of its conversations, for people."""
    key: str = ""
    """Hash of text and tokenizer."""
    item_counts: dict[str, int] = field(default_factory=dict)
    """`ItemCounts` of conversations."""


@dataclass(frozen=True)
class Mixture:
    """The sources of a mixture, in the order in which its rows are numbered."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Rows of each."""
    counts: tuple[int, ...]
    """Rows of each in every block."""
    rows_per_pass: int
    """Of all of them together, in one pass over the mixture."""


@dataclass(frozen=True)
class Data:
    train: Rows | PackedRows | MixedRows | StreamRows
    evaluation: Rows | PackedRows | MixedRows
    tokenizer: PreTrainedTokenizerBase
    facts: DataFacts
    key: str
    """Hash of text, tokenizer and split: what a checkpoint remembers of the data."""
    former_key: str | None = None
    """Key of the same rows in a checkpoint of an earlier version; None when it had others."""
    text_key: str = ""
    """Hash of the documents and of which are held out, whatever tokenizes them; empty for mixtures and streams."""
    evaluation_sets: dict[str, Rows | PackedRows | MixedRows] = field(default_factory=dict)
    """More text to evaluate on, by name; never a part of `key`, so that a run may go on with others."""
    set_facts: dict[str, SetFacts] = field(default_factory=dict)

    mixture: Mixture | None = None
    """Each of its sources has an evaluation set of its own name, which together are `evaluation`."""
    shuffle: bool = True
    template_day: str | None = None
    """Date that a chat template which reads the clock wrote, as YYYY-MM-DD; None: none did."""

    def order(self, seed: int, global_batch_size: int, lag: int = 0) -> RowOrder:
        """The endless sequence of the training rows."""
        if isinstance(self.train, StreamRows):
            return StreamOrder(seed, 0, global_batch_size, lag, num_streams=self.train.num_streams)
        if self.mixture is None:
            return RowOrder(seed, len(self.train), global_batch_size, lag, self.shuffle)
        sizes, counts, num_rows = self.mixture.sizes, self.mixture.counts, self.mixture.rows_per_pass
        return MixedOrder(seed, num_rows, global_batch_size, lag, self.shuffle, sizes, counts)

    def reading(
        self, order: RowOrder, step: int, saved: dict[str, list[int]] | None, process: int, num_processes: int
    ) -> AbstractContextManager[None]:
        """In which the training rows of the steps behind `step` can be had; see `StreamRows.reading`."""
        if not isinstance(self.train, StreamRows):
            return nullcontext()
        assert isinstance(order, StreamOrder)
        return self.train.reading(order, step, saved, process, num_processes)

    def stream_states(self) -> dict[str, list[int]] | None:
        """Where this process's streams stand, for a checkpoint; None for rows that are all there."""
        return self.train.states() if isinstance(self.train, StreamRows) else None

    def news(self) -> list[str]:
        """A line for what happened to the text since the last call."""
        return self.train.news() if isinstance(self.train, StreamRows) else []

    def by_source(self, order: RowOrder, samples_seen: int) -> dict[str, dict[str, float]]:
        """What the first `samples_seen` rows had of each source: its targets, and how often it was passed through."""
        if self.mixture is None:
            return {}
        assert isinstance(order, MixedOrder)
        assert isinstance(self.train, MixedRows)
        tokens, rows = order.count_targets(self.train, samples_seen), order.count_rows(samples_seen)
        return {
            name: {"tokens": tokens[i], "passes": rows[i] / self.mixture.sizes[i]}
            for i, name in enumerate(self.mixture.names)
        }

    @property
    def _parts(self) -> list[Rows | PackedRows | StreamRows]:
        parts = self.train.parts if isinstance(self.train, MixedRows) else [self.train]
        return [part for part in parts if isinstance(part, Rows | PackedRows | StreamRows)]

    @property
    def keys(self) -> dict[str, str]:
        """What must be the same on every process, in words."""
        return {"the text": self.key} | {f"the text of {name}": facts.key for name, facts in self.set_facts.items()}

    @property
    def packs(self) -> bool:
        """Whether rows hold several documents that must not see each other."""
        first = self._parts[0]
        return not first.padded if isinstance(first, PackedRows) else first.end is not None

    @property
    def padded_lengths(self) -> np.ndarray | None:
        """Places taken in each training row, where a batch is only as wide as its longest; None: all are full."""
        padded = [part.lengths for part in self._parts if isinstance(part, PackedRows) and part.padded]
        return np.concatenate(padded) if padded else None

    def sample_prompt(self) -> str:
        return str(self.tokenizer.decode(self.prompt_ids()))

    def prompt_ids(self) -> list[int]:
        """The start of the held-out text, up to the first place where something is to be said."""
        row = self.evaluation[0]
        length = 16
        if isinstance(self._parts[0], PackedRows):
            length = int((row["targets"][0] != IGNORE_INDEX).nonzero()[0, 0]) + 1
        return list(row["input_ids"][0, :length].tolist())


def build_data(
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    global_batch_size: int,
    is_main_process: bool = True,
    day: str | None = None,
) -> Data:
    """Tokenised rows of both splits, from the cache or made now, under a file lock and no collective.

    Args:
        tokenizer: an existing one; None: made from the training split as `tokenizer_config` says.
        day: date of the run for a chat template that reads the clock, as YYYY-MM-DD; None: today's.

    Raises:
        DataError: text that cannot be read, or too little of it.
    """
    day = config.chat_template_date or day or date.today().isoformat()
    data = _build_any(config, tokenizer_config, tokenizer, seed, global_batch_size, is_main_process, day)
    for key, used in (("chat_template", data.facts.has_roles), ("chat_template_date", data.template_day is not None)):
        if getattr(config, key) is not None and not used:
            what = "text without roles" if key == "chat_template" else "a chat template that reads no clock"
            raise ConfigError(f"data.{key} must be null for {what}, got {getattr(config, key)}; leave it out")
    return data


def _build_any(
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    global_batch_size: int,
    is_main_process: bool,
    day: str,
) -> Data:
    if config.mixture:
        return _build_mixture(config, tokenizer_config, tokenizer, seed, global_batch_size, is_main_process, day)
    if config.streaming:
        return _build_stream(config, tokenizer_config, tokenizer, seed, is_main_process)
    plan = plan_of(config, day)
    corpus = open_corpus(config, seed, plan.read if plan else None)
    made_by = tokenizer_config.model_dump_json() if tokenizer is None else tokenizer_key(tokenizer)

    def key_of(form: str, text: str) -> str:
        parts = (form, text, made_by, config.text_column, config.eval_fraction, config.skip_bad_rows)
        return hash_text(repr(parts + (plan.key(tokenizer) if plan else ())))

    def build(work: Path) -> None:
        how = _build if plan is None else partial(_build_conversations, plan)
        how(corpus, config, tokenizer_config, tokenizer, work, global_batch_size, is_main_process)
        corpus.check()

    key = key_of(FORMAT, corpus.key)

    data = _load(
        make_once(cache_folder(config.cache_dir), key, build, is_main_process),
        key,
        config,
        tokenizer,
        global_batch_size,
        plan,
    )
    is_known = corpus.former_key is not None and data.facts.as_in_rows_1 and _has_former_ids(data, plan)
    former_key = key_of(FORMER, corpus.former_key or "") if is_known else None
    data = replace(data, shuffle=config.shuffle, text_key=text_key(corpus, config, plan), former_key=former_key)
    return _with_sets(data, config, plan, is_main_process)


def _has_former_ids(data: Data, plan: ChatPlan | None) -> bool:
    """Whether the format rows-1 had the same ids: it cut them to 16 bits by their number, and every long text into pieces."""
    is_long = data.facts.longest_document > PIECE and plan is None
    fits = id_dtype(len(data.tokenizer)) == id_dtype(count_ids(data.tokenizer))
    return fits and not (is_long and not encodes_pieces(text_encoder(data.tokenizer)))


def check_files(config: DataConfig) -> None:
    """Look for every file that a recipe names, before any of them is read.

    Raises:
        DataError: one is not there, or empty.
    """
    for source in config.mixture:
        with _naming(source.title):
            check_files(_config_of(source, config))
    if config.source == "files" and not config.mixture:
        find_files(config.files, "data.files")
        if config.eval_files:
            find_files(config.eval_files, "data.eval_files")
    for name, files in config.evaluation_sets.items():
        find_files(files, f"data.evaluation_sets.{name}")


def text_key(corpus: Corpus, config: DataConfig, plan: ChatPlan | None) -> str:
    """Hash of the documents and of what decides which of them are held out."""
    parts = (FORMAT, corpus.key, config.text_column, config.eval_fraction, config.skip_bad_rows)
    return hash_text(repr((*parts, plan.format if plan else "text")))


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    return hash_text(f"{tokenizer.backend_tokenizer.to_str()} {tokenizer.eos_token_id}")  # type: ignore[attr-defined]


def _load(
    folder: Path, key: str, config: DataConfig, tokenizer: Any, global_batch_size: int, plan: ChatPlan | None
) -> Data:
    facts = _facts_in(folder)
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
    evaluation = _open_text(folder, dtype, config.sequence_length, end)
    _check_amount(len(train.tokens), config.sequence_length, global_batch_size, exact=True)
    return Data(train, evaluation, tokenizer, facts, key)


def _keep_template(plan: ChatPlan, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Leave in the tokenizer, which goes into final/, what wrote the conversations; returns the date if that counts."""
    template = template_of(plan, tokenizer)
    if plan.template_file is not None or not tokenizer.chat_template:
        tokenizer.chat_template = template.text
    tokenizer.init_kwargs.pop(DAY, None)
    if not template.reads_clock:
        return None
    tokenizer.init_kwargs[DAY] = template.day
    return template.day


def _facts_in(folder: Path) -> DataFacts:
    facts = read_facts(folder)
    return DataFacts(**facts | {"eval_files": tuple(facts["eval_files"])})


def _with_sets(data: Data, config: DataConfig, plan: ChatPlan | None, is_main_process: bool) -> Data:
    """The same with the recipe's evaluation sets beside those that it has."""
    sets = {name: _open_set(name, config, plan, data, is_main_process) for name in config.evaluation_sets}
    return replace(
        data,
        evaluation_sets=data.evaluation_sets | {name: rows for name, (rows, _) in sets.items()},
        set_facts=data.set_facts | {name: facts for name, (_, facts) in sets.items()},
    )


def _open_set(
    name: str, config: DataConfig, plan: ChatPlan | None, data: Data, is_main_process: bool
) -> tuple[Rows | PackedRows, SetFacts]:
    """The rows of one of `data.evaluation_sets`, from the cache or made now, with the tokenizer and the format of the run.

    Raises:
        DataError: a file is missing, empty or not of this format.
    """
    tokenizer, dtype = data.tokenizer, id_dtype(data.facts.vocab_size)
    files = find_files(config.evaluation_sets[name], f"data.evaluation_sets.{name}")
    read = plan.read if plan else text_in(config.text_column)
    files_key, _ = content_keys(files, config.text_column)
    parts = (FORMAT, "set", files_key, tokenizer_key(tokenizer), config.skip_bad_rows)
    key = hash_text(repr(parts + (plan.key(tokenizer) if plan else ())))

    def build(work: Path) -> None:
        sizes: list[int] = []

        def documents() -> Iterator[Document]:
            for document in read_files(files, read, Skipped(config.skip_bad_rows), only_records=plan is not None):
                sizes.append(len(document.text.encode()))
                yield document

        about, item_counts = "", {}
        if plan is None:
            tokens = _write_text(documents(), tokenizer, dtype, work, "eval", with_bytes=True)
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
    return _open_text(folder, dtype, config.sequence_length, end), facts


def _open_text(folder: Path, dtype: type[np.unsignedinteger], sequence_length: int, end: int | None) -> Rows:
    """Rows of text to evaluate on, which know their bytes."""
    return Rows(
        np.memmap(folder / "eval.bin", dtype=dtype, mode="r"),
        sequence_length,
        np.asarray(np.memmap(folder / "eval_bytes.bin", dtype=np.uint32, mode="r")),
        end,
    )


def _check_amount(num_tokens: int, sequence_length: int, global_batch_size: int, *, exact: bool) -> None:
    """Refuse text that cannot fill one row or one global batch; `exact` says whether the tokens were counted."""
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


# --- building ------------------------------------------------------------------------------------------------------


def _build(
    corpus: Corpus,
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    work: Path,
    global_batch_size: int,
    show_progress: bool,
) -> None:
    train, evaluation, sizes = split_documents(corpus, config)
    # A token stands for at least one byte, so bytes bound the tokens before any tokenizer is trained.
    _check_amount(
        sizes["train_bytes"] + sizes["train_documents"], config.sequence_length, global_batch_size, exact=False
    )
    if tokenizer is None:
        tokenizer = make_tokenizer(tokenizer_config, (document.text for document in train()))
        tokenizer.save_pretrained(work / "tokenizer")
    vocab_size = count_ids(tokenizer)
    dtype = id_dtype(vocab_size)
    total = sizes["train_bytes"] + sizes["eval_bytes"]
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenise", disable=None if show_progress else True) as bar:
        train_tokens = _write_text(train(), tokenizer, dtype, work, "train", with_bytes=False, progress=bar.update)
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

        eval_tokens = _write_text(noted(), tokenizer, dtype, work, "eval", with_bytes=True, progress=bar.update)
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
        **sizes,
    )
    write_facts(work, asdict(facts))


def _write_text(
    documents: Iterator[Document],
    tokenizer: PreTrainedTokenizerBase,
    dtype: type[np.unsignedinteger],
    work: Path,
    split: str,
    *,
    with_bytes: bool,
    progress: Callable[[int], object] = lambda _: None,
) -> int:
    """Tokenise the text of one split into `work`, each document followed by the end token; returns the number of ids."""
    end, num_tokens = tokenizer.eos_token_id, 0
    assert isinstance(end, int)
    with ExitStack() as stack:
        ids_file = stack.enter_context((work / f"{split}.bin").open("wb"))
        bytes_file = stack.enter_context((work / f"{split}_bytes.bin").open("wb")) if with_bytes else None
        for ids, byte_counts, num_bytes in encode_documents(
            documents, text_encoder(tokenizer), end, with_bytes=with_bytes
        ):
            ids_file.write(ids.astype(dtype).tobytes())
            if bytes_file:
                bytes_file.write(byte_counts.tobytes())
            num_tokens += len(ids)
            progress(num_bytes)
        for file in (ids_file, bytes_file):
            if file:
                flush(file)
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
                documents(), plan, tokenizer, work, split, dtype, with_bytes=split == "eval", progress=bar.update
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
        **sizes,
    )
    write_facts(work, asdict(facts))


# --- mixtures ------------------------------------------------------------------------------------------------------


def _build_mixture(
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    global_batch_size: int,
    is_main_process: bool,
    day: str,
) -> Data:
    """Each source as if it were alone, with one tokenizer for all, which is made from the training text of all."""
    names = tuple(source.title for source in config.mixture)
    configs = [_config_of(source, config) for source in config.mixture]
    plans = []
    for name, part in zip(names, configs, strict=True):
        with _naming(name):
            plans.append(plan_of(part, day))
    if len({plan is None for plan in plans}) > 1:
        kinds = ", ".join(f"{name}: {plan.format if plan else 'text'}" for name, plan in zip(names, plans, strict=True))
        raise DataError(
            f"data.mixture must be all of text or all of conversations, got {kinds}; set data.format to text, or train on them in two runs"
        )
    if tokenizer is None:
        tokenizer = _shared_tokenizer(config, configs, plans, names, tokenizer_config, seed, is_main_process)
    parts = []
    for name, part in zip(names, configs, strict=True):
        with _naming(name):
            # A copy, for a source may leave its chat template in it, where the next would take it for the model's own.
            parts.append(_build_any(part, tokenizer_config, deepcopy(tokenizer), seed, 1, is_main_process, day))
    tokenizer = next((part.tokenizer for part in parts if part.tokenizer.chat_template), parts[0].tokenizer)
    train = MixedRows([part.train for part in parts if not isinstance(part.train, StreamRows)])
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
    return _with_sets(data, config, plans[0], is_main_process)


def _config_of(source: SourceConfig, config: DataConfig) -> DataConfig:
    """The recipe of one source alone."""
    kept = {key: getattr(source, key) for key in ("files", "dataset", "dataset_config", "dataset_split")}
    kept |= {key: getattr(source, key) for key in ("eval_files", "eval_split")}
    kept |= {key: getattr(source, key) or getattr(config, key) for key in ("text_column", "format")}
    kept |= {"source": "files" if source.files else "hub", "mixture": (), "evaluation_sets": {}}
    return config.model_copy(update=kept)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Say in an error which source of a mixture it is about."""
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
    """Made from the training text of every source, once each, whatever their shares."""
    corpora = [open_corpus(part, seed, plan.read if plan else None) for part, plan in zip(configs, plans, strict=True)]
    columns = [
        (part.text_column, f"{plan.format} {conversations.FORMAT}" if plan else "text")
        for part, plan in zip(configs, plans, strict=True)
    ]
    parts = (FORMAT, "tokenizer", [corpus.key for corpus in corpora], columns, config.eval_fraction)
    key = hash_text(repr((parts, tokenizer_config.model_dump_json(), config.skip_bad_rows)))

    def texts() -> Iterator[str]:
        for name, part, plan, corpus in zip(names, configs, plans, corpora, strict=True):
            with _naming(name):
                train, _, _ = split_documents(corpus, part, can_cut=plan is None)
                yield from plan.texts(train()) if plan else (document.text for document in train())

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
    """Of all sources together; compressors are not compared with, for each has its own held-out text."""
    summed = ["train_documents", "train_bytes", "train_tokens", "eval_documents", "eval_bytes", "eval_tokens"]
    summed += ["skipped_records", "shared_documents"]
    told = [f"{name}: {part.conversations}" for name, part in zip(names, facts, strict=True) if part.conversations]
    return DataFacts(
        vocab_size=facts[0].vocab_size,
        **{key: sum(getattr(part, key) for part in facts) for key in summed},
        eval_files=tuple(file for part in facts for file in part.eval_files),
        format=", ".join(dict.fromkeys(part.format for part in facts)),
        conversations="; ".join(told),
        has_roles=any(part.has_roles for part in facts),
    )


def _facts_of_held_out(data: Data) -> SetFacts:
    facts = data.facts
    return SetFacts(facts.eval_documents, facts.eval_bytes, facts.eval_tokens, key=data.key)


# --- streams -------------------------------------------------------------------------------------------------------


def _build_stream(
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    seed: int,
    is_main_process: bool,
) -> Data:
    """Training rows that are made while they are learned, held-out ones on disk as ever."""
    shards = open_shards(config)
    if len(shards.names) < config.num_streams:
        raise DataError(
            f"data.num_streams must be at most the number of shards {len(shards.names)}, got {config.num_streams}; "
            "lower it, or split the text into more files"
        )
    if tokenizer is None:
        tokenizer = make_tokenizer(tokenizer_config, ())
    made_by = tokenizer_key(tokenizer)
    if config.source == "files":
        find_files(config.eval_files, "data.eval_files")
        held_out = config.model_copy(update={"files": config.eval_files, "eval_files": ()})
    else:
        held_out = config.model_copy(update={"dataset_split": config.eval_split, "eval_split": None})
    corpus = open_corpus(held_out, seed)
    held_out_key = hash_text(repr((FORMAT, "held out", corpus.key, made_by, config.text_column, config.skip_bad_rows)))

    def build(work: Path) -> None:
        sizes: list[int] = []
        files: list[str] = []

        def documents() -> Iterator[Document]:
            for document in corpus.train(Skipped(config.skip_bad_rows)):
                sizes.append(len(document.text.encode()))
                files.extend([document.file] if document.file else [])
                yield document

        num_tokens = _write_text(documents(), tokenizer, id_dtype(count_ids(tokenizer)), work, "eval", with_bytes=True)
        if num_tokens < 2:
            raise DataError("data: the held-out text must have at least one target, got none; add text")
        num_ids = count_ids(tokenizer)
        facts = DataFacts(num_ids, 0, 0, 0, len(sizes), sum(sizes), num_tokens, eval_files=tuple(files))
        corpus.check()
        write_facts(work, asdict(facts))

    folder = make_once(cache_folder(config.cache_dir), held_out_key, build, is_main_process)
    facts = _facts_in(folder)
    about = f"{len(shards.names):,} shards in {config.num_streams} streams"
    end = None if config.attend_across_documents else tokenizer.eos_token_id

    def key_of(form: str, text: str) -> str:
        return hash_text(repr((form, "stream", text, made_by, config.text_column, config.skip_bad_rows)))

    data = Data(
        StreamRows(config, tokenizer, seed),
        _open_text(folder, id_dtype(facts.vocab_size), config.sequence_length, end),
        tokenizer,
        replace(facts, source={"streams": about}),
        key_of(FORMAT, shards.key + corpus.key),
    )
    if shards.former_key is not None and _has_former_ids(data, None):
        data = replace(data, former_key=key_of(FORMER, shards.former_key))
    return _with_sets(data, config, None, is_main_process)
