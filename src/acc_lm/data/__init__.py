"""A recipe's text on its way to rows on disk: sources, mixtures, streams, evaluation sets, the cache.

build        recipe -> Data
one_source   one source of text or of conversations -> rows on disk
mixtures     several sources that share a tokenizer
dataset      `Data`: rows, facts and order that a run uses
"""

from acc_lm.data.build import build_data, check_files
from acc_lm.data.dataset import Data, DataFacts, text_key, tokenizer_key

__all__ = ["Data", "DataFacts", "build_data", "check_files", "text_key", "tokenizer_key"]
