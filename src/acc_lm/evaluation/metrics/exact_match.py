"""Share of answers that are one of their references, as a module of the `evaluate` library.

    metric = evaluate.load("src/acc_lm/evaluation/metrics/exact_match.py")
    metric.compute(predictions=["Paris"], references=[["Paris", "paris"]])

White space at the ends does not count; everything else does.
"""

import datasets
import evaluate

DESCRIPTION = "Share of the predictions that equal one of their references, except for white space at the ends."
INPUTS = """
Args:
    predictions: one text each.
    references: a list of texts each.
"""


class ExactMatch(evaluate.Metric):
    """Share of exact matches, 0 to 1; 1 is best."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
            ),
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        pairs = zip(predictions, references, strict=True)
        right = sum(answer.strip() in {text.strip() for text in accepted} for answer, accepted in pairs)
        return {"exact_match": right / len(predictions)}
