"""A recipe's text on its way to rows on disk: sources, mixtures, streams, evaluation sets, the cache.

build        recipe -> Data
one_source   one source of text or of conversations -> rows on disk
mixtures     several sources that share a tokenizer
dataset      `Data`: rows, facts and order that a run uses
lengths      lengths of documents before rows are cut or packed
shown        rows taken apart into the documents in them
"""

from acc_lm.data.build import build_data, check_files
from acc_lm.data.dataset import Data, DataFacts, text_key, tokenizer_key
from acc_lm.data.lengths import lengths_of
from acc_lm.data.one_source import until_limit
from acc_lm.data.shown import ShownRow, shown_rows

__all__ = [
    "Data",
    "DataFacts",
    "ShownRow",
    "build_data",
    "check_files",
    "lengths_of",
    "shown_rows",
    "text_key",
    "tokenizer_key",
    "until_limit",
]
