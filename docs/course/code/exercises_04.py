"""Exercises of lab 04: interrupted runs, traffic between machines, spikes."""

from __future__ import annotations

from pathlib import Path

from answers import BadAnswer, NotYet, curve, environment, needed, run, summary, whole_number

WHOLE, NETWORKS, SPIKE = (Path("runs/course", name) for name in ("whole", "machines", "spike"))
SENTENCE = "the quick brown fox jumps over the lazy dog. "


def exercise_1(answer: str) -> str:
    """Kill a run at least twice and let it finish: at least three starts, and the curve of runs/course/whole, bit for bit. Answer: its folder."""
    folder, whole = run(answer), needed(WHOLE, 1)
    starts = environment(folder)["starts"]
    if len(starts) < 3:
        raise NotYet(f"{answer} has {len(starts)} starts: kill it after a checkpoint, and run the same command again")
    for metric in ("train/loss", "train/grad_norm", "eval/loss"):
        if curve(folder, metric) != curve(whole, metric):
            raise NotYet(f"{metric} differs from that of {WHOLE}: use the same recipe, config and number of processes")
    if summary(folder)["ledger"] != summary(whole)["ledger"]:
        raise NotYet(f"the ledger differs from that of {WHOLE}: the run was trained on other rows")
    steps = ", ".join(str(start["step"]) for start in starts)
    return f"starts at steps {steps}, and not one bit of the curve shows them"


def exercise_2(answer: str) -> str:
    """Bytes of gradient that machine 0 sends to machine 1 in all steps of a run on two machines with a process each, in a ring."""
    folder = needed(NETWORKS, 6)
    found, num_steps = environment(folder), summary(folder)["num_steps"]
    processes, gradient = found["num_processes"], 4 * found["num_parameters"]
    sent = 2 * (processes - 1) * gradient * num_steps // processes
    match whole_number(answer):
        case value if value == sent:
            return (
                f"2 (N - 1) / N x {gradient:,} bytes x {num_steps} steps; the cable counts the frames around them too"
            )
        case value if value * num_steps == sent:
            raise NotYet("that is one step; how many has the run?")
    raise NotYet("per step a ring sends 2 (N - 1) / N times the gradient, which has 4 bytes for each parameter")


def exercise_3(answer: str) -> str:
    """Two neighbouring rows hold the random letters of the text of section 5. Answer: the smaller of their numbers."""
    spoilt = spoilt_rows()
    value = whole_number(answer)
    if value in spoilt and value != min(spoilt):
        raise NotYet("that row holds letters of the noise; so does a neighbour with a smaller number")
    if value != min(spoilt):
        raise NotYet("compare the rows of all spike_step files: which number, or its neighbour, is in each of them?")
    return f"rows {', '.join(map(str, spoilt))} of {SPIKE} hold the noise"


def spoilt_rows() -> list[int]:
    """Numbers of the training rows with text that is not the sentence."""
    from acc_lm.config.loading import load_config
    from acc_lm.data import build_data

    config = load_config(needed(SPIKE, 5) / "config.yaml")
    if not all(Path(file).is_file() for file in config.data.files):
        raise BadAnswer(f"the text of {SPIKE} must be there, got nothing at its place; run section 5 again")
    data = build_data(config.data, config.tokenizer, None, config.seed, config.training.global_batch_size)
    clean = SENTENCE * (2 + config.data.sequence_length // len(SENTENCE))
    texts = (
        data.tokenizer.decode(data.train[row]["input_ids"][0].tolist(), skip_special_tokens=True)
        for row in range(len(data.train))
    )
    return [row for row, text in enumerate(texts) if text not in clean]
