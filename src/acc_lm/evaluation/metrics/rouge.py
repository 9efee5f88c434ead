"""ROUGE-1, ROUGE-2 and ROUGE-L by the rouge_score library, as a module of the `evaluate` library.

metric = evaluate.load("src/acc_lm/evaluation/metrics/rouge.py")
metric.compute(predictions=["a cat sat"], references=[["the cat sat", "a cat was sitting"]])
"""

import datasets
import evaluate
from rouge_score.rouge_scorer import RougeScorer

DESCRIPTION = "Mean F-measures of ROUGE-1, ROUGE-2 and ROUGE-L, 0 to 1, of each prediction with its best reference."
CITATION = "Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004, W04-1013"
INPUTS = """
Args:
    predictions: one text each.
    references: a list of texts each.
"""
KINDS = ["rouge1", "rouge2", "rougeL"]


class Rouge(evaluate.Metric):
    """Mean ROUGE F-measures, 0 to 1; 1 is best."""

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
        scorer = RougeScorer(KINDS)
        pairs = zip(predictions, references, strict=True)
        scores = [scorer.score_multi(accepted, answer) for answer, accepted in pairs]
        return {kind: sum(score[kind].fmeasure for score in scores) / len(scores) for kind in KINDS}
