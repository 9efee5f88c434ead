"""Position of a run: steps, rows and tokens so far, and the running hash of the rows."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace

import numpy as np

EMPTY_LEDGER = ""


@dataclass(frozen=True)
class Progress:
    """Everything about the position of a run that a checkpoint has to store."""

    step: int = 0
    """Optimizer steps done."""
    samples_seen: int = 0
    """Rows consumed."""
    tokens: int = 0
    """Targets trained on."""
    ledger: str = EMPTY_LEDGER
    """Running hash of all rows consumed, in order."""

    def lag(self, global_batch_size: int) -> int:
        """Rows by which this run lags one with this global batch size from the start; 0 unless the size was changed."""
        return self.step * global_batch_size - self.samples_seen

    @property
    def facts(self) -> dict[str, int | str]:
        return asdict(self)

    def advance(self, rows: np.ndarray, num_targets: int) -> Progress:
        """Position after one more step over these rows."""
        return replace(
            self,
            step=self.step + 1,
            samples_seen=self.samples_seen + len(rows),
            tokens=self.tokens + num_targets,
            ledger=extend_ledger(self.ledger, rows),
        )


def is_due(step: int, every: int | None, last_step: int) -> bool:
    """True at every `every`-th step (None: never) and at the last one."""
    return step == last_step or (every is not None and step % every == 0)


def extend_ledger(ledger: str, rows: np.ndarray) -> str:
    """Running hash of all rows consumed so far, in order; 32 hex digits."""
    return hashlib.blake2b(bytes.fromhex(ledger) + rows.astype("<i8").tobytes(), digest_size=16).hexdigest()
