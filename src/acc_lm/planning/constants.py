"""Efficiencies of the speed model, fitted on published figures; written by `python -m benchmarks.planning`."""

from __future__ import annotations

FITTED_ON = "2026-11-24"
"""Date of the fit."""
FITTED = {
    "jitter": 0.006,
    "interference": 0.1,
    "hop": 3e-06,
    "far_hop": 1.6e-05,
    "products_hopper": 0.64,
    "products_ampere": 0.8643,
    "width_hopper": 154.6,
    "width_ampere": 502.9,
    "tokens": 174.5,
    "attention_hopper": 0.2909,
    "attention_ampere": 0.3394,
    "traffic": 0.7141,
    "eager": 4.509,
    "power": 0.7304,
    "fp8": 1.42,
}
"""Constants by name; `acc_lm.planning.speed` says what each is."""
