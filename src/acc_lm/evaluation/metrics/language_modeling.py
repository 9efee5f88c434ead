"""Loss, perplexity, token accuracy and bits per byte from sums, as a module of the `evaluate` library.

    metric = evaluate.load("src/acc_lm/evaluation/metrics/language_modeling.py")
    metric.add(nll=812.4, num_targets=300, num_correct=120, num_bytes=1100)      # once per batch or document
    metric.compute()

Add sums, not means: all sums are added first and divided once, so the result does not depend on the batches.
"""

import math

import datasets
import evaluate

DESCRIPTION = (
    "Loss (nats per target), perplexity, token accuracy and bits per byte of a language model, exact over any batches."
)
INPUTS = """
Args:
    nll: sum of -log p of the targets, in nats.
    num_targets: number of targets.
    num_correct: number of targets with the highest logit.
    num_bytes: UTF-8 bytes of the text that they stand for.
"""


class LanguageModeling(evaluate.Metric):
    """Metrics of acc-lm's own evaluation."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features(
                {
                    "nll": datasets.Value("float64"),
                    "num_targets": datasets.Value("int64"),
                    "num_correct": datasets.Value("int64"),
                    "num_bytes": datasets.Value("int64"),
                }
            ),
        )

    def _compute(
        self, nll: list[float], num_targets: list[int], num_correct: list[int], num_bytes: list[int]
    ) -> dict[str, float]:
        total, targets, num_bytes_in_all = math.fsum(nll), sum(num_targets), sum(num_bytes)
        loss = total / targets
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "token_accuracy": sum(num_correct) / targets,
            "bits_per_byte": total / math.log(2) / num_bytes_in_all if num_bytes_in_all else math.nan,
        }
