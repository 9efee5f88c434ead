"""Synthetic text with a known entropy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from acc_lm.config import DataConfig
from acc_lm.text.documents import Corpus, Document, Documents, hash_text

SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def transition_matrix(seed: int, num_symbols: int = len(SYMBOLS)) -> np.ndarray:
    """Transition probabilities of the synthetic chain, float64 [num_symbols, num_symbols]; rows sum to 1."""
    weights: np.ndarray = np.random.RandomState(seed).gamma(0.3, size=(num_symbols, num_symbols)) + 1e-3
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def entropy_rate(transitions: np.ndarray) -> float:
    """Entropy of a first-order chain in its stationary state, in nats per symbol: no model's loss can be lower."""
    values, vectors = np.linalg.eig(transitions.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    stationary /= stationary.sum()
    return float(-(stationary[:, None] * transitions * np.log(transitions)).sum())


def synthetic_corpus(config: DataConfig, seed: int) -> Corpus:
    """Corpus of two independent walks over one chain: one to train on, one held out."""
    transitions = transition_matrix(seed)
    cumulative = transitions.cumsum(axis=1)

    def walk(salt: int, length: int) -> Iterator[Document]:
        uniform = np.random.RandomState([seed, salt]).random_sample(length)
        state, states = 0, np.empty(length, dtype=np.int64)
        for i in range(length):
            state = min(int(np.searchsorted(cumulative[state], uniform[i])), len(SYMBOLS) - 1)
            states[i] = state
        yield Document("".join(np.array(list(SYMBOLS))[states]), None)

    held_out = max(1000, int(config.synthetic_tokens * config.eval_fraction))
    key = hash_text(f"synthetic-1 {seed} {config.synthetic_tokens} {held_out}")
    return Corpus(
        key=key,
        former_key=key,
        train=Documents(lambda _: walk(0, config.synthetic_tokens)),
        evaluation=Documents(lambda _: walk(1, held_out)),
        facts={"entropy_rate": entropy_rate(transitions)},
    )
