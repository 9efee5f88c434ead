"""x"""

FITTED = {
    "products_hopper": 0.58,
    "products_ampere": 0.81,
    "width_hopper": 74.0,
    "width_ampere": 554.0,
    "tokens": 71.0,
    "attention_hopper": 0.27,
    "attention_ampere": 0.34,
    "traffic": 0.83,
    "eager": 5.1,
    "power": 0.6,
    "fp8": 1.65,
    "jitter": 0.006,
    "interference": 0.1,
    "hop": 3e-6,
    "far_hop": 16e-6,
}
