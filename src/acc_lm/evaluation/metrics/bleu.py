"""BLEU of a corpus by the sacrebleu library, as a module of the `evaluate` library.

metric = evaluate.load("src/acc_lm/evaluation/metrics/bleu.py")
metric.compute(predictions=["a cat sat"], references=[["the cat sat", "a cat was sitting"]])
"""

import datasets
import evaluate
import sacrebleu

DESCRIPTION = "Corpus BLEU, 0 to 100, as sacrebleu computes it with its own tokenisation."
CITATION = "Post, A Call for Clarity in Reporting BLEU Scores, 2018, arXiv:1804.08771"
INPUTS = """
Args:
    predictions: one text each.
    references: a list of texts each.
"""


class Bleu(evaluate.Metric):
    """Corpus BLEU, 0 to 100; 100 is best."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
            ),
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        # sacrebleu expects the first reference of every prediction, then the second ones; None where there is none.
        count = max(map(len, references))
        streams = [[texts[n] if n < len(texts) else None for texts in references] for n in range(count)]
        return {"bleu": float(sacrebleu.corpus_bleu(predictions, streams).score)}
