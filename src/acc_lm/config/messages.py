"""Error lines about a recipe: the place, the expected value, and the key that was meant."""

from __future__ import annotations

import difflib
from typing import Any

from acc_lm.config import Config
from acc_lm.config.reference import describe_keys

# Key names of other tools, and the matching keys here.
FOREIGN_NAMES = {
    "model_name_or_path": "model.name_or_path",
    "base_model": "model.name_or_path",
    "model_revision": "model.revision",
    "torch_dtype": "model.dtype",
    "activation_checkpointing": "model.gradient_checkpointing",
    "dataset_name": "data.dataset",
    "dataset_mixture": "data.mixture",
    "datasets": "data.mixture",
    "dataset_mixer": "data.mixture",
    "train_file": "data.files",
    "validation_file": "data.eval_files",
    "eval_dataset": "data.eval_files (data.evaluation_sets for several by name)",
    "eval_datasets": "data.evaluation_sets",
    "test_datasets": "data.evaluation_sets",
    "dataset_text_field": "data.text_column",
    "max_seq_length": "data.sequence_length",
    "max_length": "data.sequence_length",
    "sequence_len": "data.sequence_length",
    "block_size": "data.sequence_length",
    "dataloader_num_workers": "data.num_workers",
    "per_device_train_batch_size": "training.micro_batch_size",
    "per_device_eval_batch_size": "training.micro_batch_size",
    "batch_size": "training.global_batch_size (rows of all processes) or training.micro_batch_size (of one forward)",
    "train_batch_size": "training.global_batch_size",
    "global_train_batch_size": "training.global_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size (accumulation is derived from it)",
    "accumulate_grad_batches": "training.global_batch_size (accumulation is derived from it)",
    "num_train_epochs": "training.num_epochs",
    "max_epochs": "training.num_epochs",
    "epochs": "training.num_epochs",
    "max_train_steps": "training.max_steps",
    "max_iters": "training.max_steps",
    "logging_steps": "training.log_every",
    "log_every_n_steps": "training.log_every",
    "log_interval": "training.log_every",
    "eval_steps": "training.eval_every",
    "eval_interval": "training.eval_every",
    "val_check_interval": "training.eval_every",
    "eval_strategy": "training.eval_every",
    "evaluation_strategy": "training.eval_every",
    "precision": "training.mixed_precision",
    "tf32": "training.allow_tf32",
    "full_determinism": "training.deterministic",
    "lr": "optimizer.learning_rate",
    "optim": "optimizer.name",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.epsilon",
    "gradient_clip_val": "optimizer.max_grad_norm",
    "grad_clip": "optimizer.max_grad_norm",
    "lr_scheduler_type": "schedule.name",
    "lr_scheduler_kwargs": "schedule.arguments",
    "warmup_ratio": "schedule.warmup_steps (a number below 1 is a share)",
    "warmup_iters": "schedule.warmup_steps",
    "min_lr": "schedule.min_learning_rate",
    "save_steps": "checkpoint.every",
    "save_strategy": "checkpoint.every",
    "checkpointing_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "save_top_k": "checkpoint.keep_best",
    "load_best_model_at_end": "export.weights (best)",
    "metric_for_best_model": "checkpoint.best_metric",
    "greater_is_better": "checkpoint.best_metric (its direction is known)",
    "early_stopping_threshold": "training.early_stopping_min_improvement",
    "early_stop_patience": "training.early_stopping_patience",
    "resume_from_checkpoint": "checkpoint.resume",
    "ckpt_path": "checkpoint.resume",
    "overwrite_output_dir": "checkpoint.resume",
    "default_root_dir": "output_dir",
    "data_seed": "seed",
    "wandb_project": "tracking.project",
    "with_tracking": "tracking.report_to",
    "ddp_timeout": "distributed.timeout_seconds",
    "ddp_find_unused_parameters": "distributed.find_unused_parameters",
    "ddp_bucket_cap_mb": "distributed.bucket_cap_mb",
    "bf16": "training.mixed_precision",
    "fp16": "training.mixed_precision",
    "dataset_config_name": "data.dataset_config",
    "validation_split_percentage": "data.eval_fraction",
    "max_tokens": "training.max_steps (tokens / (global batch x sequence length))",
    "eval_iters": "training.eval_batches",
    "limit_val_batches": "training.eval_batches",
    "num_warmup_steps": "schedule.warmup_steps",
    "lr_warmup_steps": "schedule.warmup_steps",
    "lr_decay_iters": "training.max_steps (the decay ends with the last step)",
    "max_norm": "optimizer.max_grad_norm",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "save_interval": "checkpoint.every",
    "always_save_checkpoint": "checkpoint.every",
    "out_dir": "output_dir",
    "logger_name": "tracking.report_to",
    "wandb_log": "tracking.report_to",
    "wandb_run_name": "tracking.run_name",
    "tokenizer_dir": "tokenizer.name_or_path",
    "tokenizer_name": "tokenizer.name_or_path",
    "ddp_backend": "distributed.backend",
    "ddp_broadcast_buffers": "distributed.broadcast_buffers",
    "ddp_static_graph": "distributed.static_graph",
    "use_peft": "adapter.kind (lora)",
    "use_lora": "adapter.kind (lora)",
    "peft_type": "adapter.kind (lora)",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_target": "adapter.target_modules",
    "lora_target_modules": "adapter.target_modules",
    "lora_target_linear": "adapter.target_modules (all-linear)",
    "peft_use_dora": "adapter.use_dora",
    "peft_use_rslora": "adapter.use_rslora",
    "modules_to_save": "adapter.also_train",
    "lora_modules_to_save": "adapter.also_train",
    "additional_target": "adapter.also_train",
    "trainable_token_indices": "adapter.also_train (complete modules)",
    "tokens": "tokenizer.add_tokens",
    "new_tokens": "tokenizer.add_tokens",
    "new_special_tokens": "tokenizer.add_special_tokens",
    "additional_special_tokens": "tokenizer.add_special_tokens",
    "extra_special_tokens": "tokenizer.add_special_tokens",
    "resize_vocab": "tokenizer.add_tokens (the embeddings follow), or model.resize_embeddings for a larger tokenizer",
    "freeze_parameters": "model.freeze",
}
COMMAND = "command line"
MAY_HAVE_LINES = ("export.sample_prompt", "tracking.sample_prompts")


def place_in_recipe(sources: dict[str, str], key: str) -> str:
    """Prefix `file:line: ` or `command line: ` for a key, or for the nearest section around it.

    A key that was not given counts as the command line's if the command line sets another key of its section.
    """
    section = key.rpartition(".")[0]
    if key not in sources and COMMAND in (place for name, place in sources.items() if name.startswith(f"{section}.")):
        return f"{COMMAND}: "
    while key and key not in sources:
        key = key.rpartition(".")[0]
    return f"{sources[key]}: " if key else ""


EXPECTATIONS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "dict_type": "a mapping",
    "model_type": "a section of keys",
    "tuple_type": "a list",
    "too_long": "a shorter list",
    "missing": "given",
}


def explain_problem(detail: Any, sources: dict[str, str]) -> str:
    """Error line for one pydantic error."""
    location = [str(part) for part in detail["loc"]]
    key, kind, context = ".".join(location), detail["type"], detail.get("ctx", {})
    where = place_in_recipe(sources, key)
    if kind == "extra_forbidden":
        return f"{where}{key} must be a known key, got {location[-1]!r}; {_right_spelling(location)}"
    if kind == "value_error":
        message = str(context["error"])
        if not location:
            named = message.split(" ", 1)[0]
            return f"{place_in_recipe(sources, named)}{message}"
        first = message.split(" ", 1)[0]
        inner = f"{key}.{first}"
        return f"{place_in_recipe(sources, inner)}{key}.{message}" if first != "must" else f"{where}{key} {message}"
    if kind == "missing":
        return f"{where}{key} must be given, got nothing; add it to the recipe"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        sign = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}[kind]
        limit = next(iter(context.values()))
        expectation = f"a number {sign} {limit:g}"
    elif kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        choices = [{"True": "true", "False": "false"}.get(choice, choice) for choice in choices]
        expectation = f"one of {', '.join(choices)}"
    elif kind == "missing" or kind not in EXPECTATIONS:
        expectation = detail["msg"].removeprefix("Input should be ")
    else:
        expectation = EXPECTATIONS[kind]
    given = detail["input"]
    if kind in ("greater_than", "greater_than_equal"):
        hint = "raise it"
    elif kind in ("less_than", "less_than_equal"):
        hint = "lower it"
    elif kind == "literal_error":
        hint = "choose one of them"
    else:
        hint = f"write {expectation}" if kind in EXPECTATIONS else "correct the value"
    if kind == "literal_error" and isinstance(given, str):
        near = difflib.get_close_matches(given, choices, n=1)
        hint = f"did you mean {near[0]}?" if near else hint
    return f"{where}{key} must be {expectation}, got {given!r} ({_type_name(given)}); {hint}"


def _type_name(value: Any) -> str:
    names = {"str": "a string", "int": "a whole number", "float": "a number", "bool": "a boolean", "NoneType": "null"}
    return names.get(
        type(value).__name__, {"dict": "a mapping", "list": "a list", "tuple": "a list"}.get(type(value).__name__, "?")
    )


def _right_spelling(location: list[str]) -> str:
    """Hint at the key that was meant: our name for another tool's key, the right section, or the nearest spelling."""
    name = location[-1].replace("-", "_")
    if name in FOREIGN_NAMES:
        return f"{name} is another tool's name, here it is {FOREIGN_NAMES[name]}"
    in_list = any(part.isdigit() for part in location)
    location = [*".".join("[]" if part.isdigit() else part for part in location).replace(".[]", "[]").split(".")]
    keys = [key for key, *_ in describe_keys() if ("[]" in key) == in_list]
    same = [key for key in keys if key.split(".")[-1] == name]
    if same:
        return f"did you mean {' or '.join(same)}?"
    section = ".".join(location[:-1])
    siblings = [key.split(".")[-1] for key in keys if key.rpartition(".")[0] == section]
    siblings += list(Config.model_fields) if not section else []
    near = difflib.get_close_matches(name, siblings, n=1)
    if near:
        return f"did you mean {near[0]}?"
    anywhere = difflib.get_close_matches(name, [key.split(".")[-1] for key in keys], n=1)
    full = [key for key in keys if anywhere and key.split(".")[-1] == anywhere[0]]
    return f"did you mean {full[0]}?" if full else "see train.py --help"
