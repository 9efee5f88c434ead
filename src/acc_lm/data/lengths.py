"""Lengths of documents and conversations before rows are cut or packed, for `acc-lm data show`."""

from __future__ import annotations

from itertools import islice

import numpy as np

from acc_lm.chat.conversations import plan_of, template_of
from acc_lm.chat.items import build_items
from acc_lm.config import DataConfig
from acc_lm.data.dataset import Data
from acc_lm.data.mixtures import config_of_source
from acc_lm.rows.mixture import MixedRows
from acc_lm.rows.text_rows import Rows
from acc_lm.text.corpus import open_corpus
from acc_lm.text.documents import Skipped

SAMPLE = 1000
"""Conversations of each source that are encoded again without a limit."""
NO_LIMIT = 1 << 62


def lengths_of(data: Data, config: DataConfig, seed: int) -> np.ndarray:
    """Number of ids of each training document, int64 [num_documents]; empty for streams.

    Of conversations it is that of each item of the first `SAMPLE` of every source, as if no item had been cut.
    """
    if config.streaming:
        return np.zeros(0, dtype=np.int64)
    parts = data.train.parts if isinstance(data.train, MixedRows) else [data.train]
    if isinstance(parts[0], Rows):
        ends = [np.flatnonzero(part.tokens == data.tokenizer.eos_token_id) for part in parts if isinstance(part, Rows)]
        return np.concatenate([np.diff(places, prepend=-1) for places in ends])
    lengths: list[int] = []
    for source in [config_of_source(source, config) for source in config.mixture] or [config]:
        plan = plan_of(source, data.template_day)
        assert plan is not None
        template = template_of(plan, data.tokenizer)
        corpus = open_corpus(source, seed, plan.read)
        for document in islice(corpus.train(Skipped(source.skip_bad_rows)), SAMPLE):
            items, _ = build_items(plan.open(document), data.tokenizer, template, plan.train_on, NO_LIMIT)
            lengths += [len(item.ids) for item in items]
    return np.array(lengths, dtype=np.int64)
