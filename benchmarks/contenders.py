"""The loops that are compared, each as its own documentation runs it; the scripts in PEERS run unchanged.

All train the same weights on the same tokens in the same order, with AdamW, a constant learning rate and no weight decay (peers
disagree on what decays). Gradients are clipped to a norm that they never reach: the work of clipping is done, and a script that
cannot clip still takes the same steps. A row has `length` tokens and as many targets; scripts that shift labels themselves get one
more token, and a hook on their model cuts it off, so that all compute the same positions.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
LEARNING_RATE, MAX_GRAD_NORM, SEED = 1e-3, 100.0, 0
FIRST_CHARACTER = 0x4E00  # as many characters as ids, each one token


@dataclass(frozen=True)
class Job:
    """Model, text and batches that all contenders train on."""

    name: str
    folder: Path
    model: dict[str, Any]
    """Model, as in `model.config` of a recipe."""
    length: int
    batch_size: int
    vocab_size: int
    num_steps: int
    """Number of steps for which there are rows, more than will be taken."""
    least_rows: int = 0
    """Minimum number of rows in the text."""

    @property
    def rows(self) -> np.ndarray:
        """Start of each row in the tokens, in the order of the steps, int64 [num_steps, batch_size]."""
        return np.load(self.folder / "rows.npy")

    @cached_property
    def tokens(self) -> np.ndarray:
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        return np.memmap(self.folder / "data/train.bin", dtype=dtype, mode="r")

    @property
    def weights(self) -> Path:
        """Folder with model and tokenizer as `save_pretrained` writes them."""
        return self.folder / "model"

    @property
    def default_weights(self) -> Path:
        """The same with GPT-2's own default activation: the same formula in eight operations."""
        return self.folder / "model-default"

    def prepare(self) -> str:
        """Write text, tokens, weights and recipe; return a hash of the tokens. Call it in a separate process."""
        import xxhash

        from acc_lm.config.loading import load_config
        from acc_lm.data import build_data
        from acc_lm.modeling.build import build_model
        from acc_lm.rows.order import RowOrder
        from acc_lm.text.tokenizer import load_tokenizer

        draw = np.random.default_rng(SEED)
        num_rows = 1 + max(64, 2 * self.batch_size, self.least_rows)
        alphabet = [character(i) for i in range(self.vocab_size - 1)]
        # Every character once, so that the tokenizer knows it; the end token is appended to the text.
        ids = np.concatenate(
            [np.arange(len(alphabet)), draw.zipf(1.3, num_rows * self.length + len(alphabet)) % len(alphabet)]
        )
        rest = (len(ids) + 1 - 1) % self.length
        ids = ids[: len(ids) - rest]
        self.folder.mkdir(parents=True, exist_ok=True)
        text = "".join(alphabet[i] for i in ids)
        for file, content in (("text.json", text), ("held-out.json", text[: 4 * self.length])):
            (self.folder / file).write_text(json.dumps([{"text": content}]))
        one_id_a_character(alphabet).save_pretrained(self.weights)
        (self.folder / "recipe.yaml").write_text(json.dumps(self._recipe()))
        config = load_config(self.folder / "recipe.yaml", [])
        tokenizer = load_tokenizer(config.tokenizer, config.model)
        assert tokenizer is not None
        assert len(tokenizer) == self.vocab_size
        scratch = config.model.model_copy(
            update={"name_or_path": None, "config": self.model | {"vocab_size": self.vocab_size}}
        )
        model = build_model(scratch, tokenizer, self.length, SEED)[0]
        del model.forward
        model.save_pretrained(self.weights)
        if "activation_function" in self.model:
            model.config.activation_function = "gelu_new"
            model.save_pretrained(self.default_weights)
            tokenizer.save_pretrained(self.default_weights)
        else:
            self.default_weights.symlink_to(self.weights)
        data = build_data(config.data, config.tokenizer, tokenizer, SEED, self.batch_size)
        assert (len(data.train.tokens) - 1) % self.length == 0  # type: ignore[union-attr]
        (self.folder / "data").mkdir(exist_ok=True)
        for name in ("train", "val"):
            data.train.tokens.tofile(self.folder / f"data/{name}.bin")  # type: ignore[union-attr]
        order = RowOrder(SEED, len(data.train), self.batch_size)
        rows = np.stack([order.rows_at(step) for step in range(1, self.num_steps + 1)]) * self.length
        np.save(self.folder / "rows.npy", rows)
        digest: str = xxhash.xxh3_128(np.ascontiguousarray(data.train.tokens)).hexdigest()  # type: ignore[union-attr]
        return digest

    def _recipe(self) -> dict[str, Any]:
        return {
            "output_dir": "run",
            "seed": SEED,
            "model": {"name_or_path": str(self.weights)},
            "data": {
                "source": "files",
                "files": [str(self.folder / "text.json")],
                "eval_files": [str(self.folder / "held-out.json")],
                "sequence_length": self.length,
                "cache_dir": str(self.folder / "cache"),
            },
            "training": {
                "max_steps": 10 * self.num_steps,
                "global_batch_size": self.batch_size,
                "micro_batch_size": self.batch_size,
                "mixed_precision": "no",
                "eval_every": 10 * self.num_steps,
            },
            "optimizer": {
                "learning_rate": LEARNING_RATE,
                "betas": [0.9, 0.999],
                "weight_decay": 0.0,
                "max_grad_norm": MAX_GRAD_NORM,
            },
            "schedule": {"name": "constant"},
            "checkpoint": {"every": 10 * self.num_steps},
            "tracking": {"report_to": []},
        }

    def row(self, start: int) -> np.ndarray:
        """Ids of the row that begins here, `length` + 1 of them."""
        return self.tokens[start : start + self.length + 1].astype(np.int64)

    def write_text_in_order(self, file: Path) -> None:
        """Write the rows of all steps, one after the other, for a script that cuts a text into rows itself."""
        from transformers import AutoTokenizer

        spelt = np.array(AutoTokenizer.from_pretrained(self.weights).convert_ids_to_tokens(range(self.vocab_size)))
        text = "".join("".join(spelt[self.row(start)]) for start in self.rows.reshape(-1))
        file.write_text(json.dumps([{"text": text}]))


def character(index: int) -> str:
    """Character of an id; surrogates, which are no characters, are left out."""
    code = FIRST_CHARACTER + index
    return chr(code if code < 0xD800 else code + 0x800)


def one_id_a_character(alphabet: list[str]) -> Any:
    """A tokenizer with these characters and an end token, so that any ids can be written as text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from acc_lm.text.tokenizer import END_TOKEN

    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate([END_TOKEN, *alphabet])}, merges=[]))
    backend.add_special_tokens([END_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END_TOKEN, bos_token=END_TOKEN, pad_token=END_TOKEN
    )


def peer_folder(name: str) -> Path | None:
    folder = os.environ.get("PEERS")
    return Path(folder).resolve() / name if folder and (Path(folder) / name).is_dir() else None


class InOrder:
    """A torch dataset of the rows in the order of the steps.

    Args:
        named: return tensors by the names that transformers' losses use; `shift_labels` are labels already aligned with their inputs.
    """

    def __init__(self, job: Job, named: bool) -> None:
        self.job, self.starts, self.named = job, job.rows.reshape(-1), named

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Any:
        import torch

        ids = torch.from_numpy(self.job.row(self.starts[index]))
        inputs, targets = ids[:-1], ids[1:]
        return {"input_ids": inputs, "labels": targets, "shift_labels": targets} if self.named else (inputs, targets)


def take_rows_in_order() -> None:
    """Make torch's RandomSampler keep the given order, for scripts that shuffle."""
    import torch

    torch.utils.data.RandomSampler.__iter__ = lambda self: iter(range(len(self.data_source)))  # type: ignore[method-assign]


def cut_last_token(model: Any) -> Any:
    """Pass labels already shifted to the model, and drop the last id, which has no label."""

    def cut(module: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        labels = keywords["labels"][:, 1:].contiguous()
        given = {name: value[:, :-1] for name, value in keywords.items() if name in ("input_ids", "attention_mask")}
        return arguments, keywords | given | {"labels": labels, "shift_labels": labels}

    model.register_forward_pre_hook(cut, with_kwargs=True)
    return model


def load(job: Job, default: bool) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job.default_weights if default else job.weights).train()


# --- ours ----------------------------------------------------------------------------------------------------------


def ours(job: Job, *overrides: str) -> None:
    """Run `python train.py`, complete and unchanged."""
    sys.path.insert(0, str(ROOT))
    import train

    code = train.main(["--config", str(job.folder / "recipe.yaml"), "output_dir=run", *overrides])
    raise RuntimeError(f"train.py ended with exit code {code}")


def without(*techniques: str) -> None:
    """Disable techniques of ours in this process: attention, loss, update, vocabulary, transfer."""
    import gc

    import torch

    from acc_lm.modeling import build as ours_model
    from acc_lm.modeling import loss_head, losses
    from acc_lm.training import run as ours_run
    from acc_lm.training import step

    if "attention" in techniques:
        ours_model.choose_attention = lambda model, length: f"transformers' {model.config._attn_implementation}"
    if "loss" in techniques:
        loss_head._head_is_plain = lambda model: False
    if "update" in techniques:
        original = torch.optim.AdamW.__init__

        def plain(self: Any, *arguments: Any, **keywords: Any) -> None:
            original(self, *arguments, **keywords | {"fused": None})

        torch.optim.AdamW.__init__ = plain  # type: ignore[method-assign]
    if "vocabulary" in techniques:
        losses.padded_vocabulary = lambda size, device: size
    if "transfer" in techniques:
        build = ours_run.build_loader
        ours_run.build_loader = lambda *arguments, pin_memory, **keywords: build(
            *arguments, pin_memory=False, **keywords
        )
        step.to_device = lambda batch, device: {name: tensor.to(device) for name, tensor in batch.items()}
        gc.freeze = lambda: None


# --- the hand-written loop -----------------------------------------------------------------------------------------


def batches(job: Job) -> Iterator[tuple[Any, Any]]:
    import torch

    for starts in job.rows:
        ids = torch.from_numpy(np.stack([job.row(start) for start in starts]))
        yield ids[:, :-1], ids[:, 1:]


def device_here() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def bare(
    job: Job, default: bool = False, precision: str = "no", distributed: bool = False, compiled: str | None = None
) -> None:
    """Hand-written loop around a model of transformers; tuned: fused AdamW, no cache, the activation in one operation."""
    import torch
    from torch.nn import functional as F

    torch.manual_seed(SEED)
    device = device_here()
    model = load(job, default).to(device)
    inner = model
    if compiled:
        model = torch.compile(model, backend=compiled)
    if distributed:
        torch.distributed.init_process_group("gloo" if device == "cpu" else "nccl")
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=not default)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=None if default else True
    )
    keywords = {} if default else {"use_cache": False}
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    share = slice(rank * job.batch_size // world, (rank + 1) * job.batch_size // world)
    for inputs, targets in batches(job):
        inputs, targets = inputs[share].to(device), targets[share].to(device)
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            logits = model(input_ids=inputs, **keywords).logits
        loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(inner.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# --- from pip ------------------------------------------------------------------------------------------------------


def trainer(
    job: Job,
    default: bool = False,
    precision: str = "no",
    compiled: str | None = None,
    micro_batch_size: int | None = None,
) -> None:
    """Hugging Face Trainer; tuned: no progress bar, no reduction of the loss over processes, and the common tuning."""
    import torch
    from transformers import Trainer, TrainingArguments, default_data_collator

    tuned = (
        {}
        if default
        else {
            "disable_tqdm": True,
            "average_tokens_across_devices": False,
            "optim": "adamw_torch_fused",
            "dataloader_pin_memory": False,
        }
    )
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=micro_batch_size or job.batch_size,
        gradient_accumulation_steps=job.batch_size // (micro_batch_size or job.batch_size),
        max_steps=job.num_steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        save_strategy="no",
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        use_cpu=not torch.cuda.is_available(),
        bf16=precision == "bf16",
        torch_compile=bool(compiled),
        torch_compile_backend=compiled,
        **tuned,
    )
    model = load(job, default)
    if not default:
        model.config.use_cache = False
    Trainer(model, arguments, train_dataset=InOrder(job, True), data_collator=default_data_collator).train()


def lightning(job: Job, default: bool = False, precision: str = "no", compiled: str | None = None) -> None:
    """Lightning's Trainer; tuned: no logger, bar, checkpoints or summary."""
    import lightning as L
    import torch

    # Lightning refuses to clip with a fused optimizer when it casts itself.
    fused = None if default or precision == "bf16" else True

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            model = load(job, default)
            self.model = torch.compile(model, backend=compiled) if compiled else model

        def training_step(self, batch: Any, index: int) -> Any:
            inputs, targets = batch
            keywords = {} if default else {"use_cache": False}
            loss = self.model(input_ids=inputs, labels=targets, shift_labels=targets, **keywords).loss
            if default:
                self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=fused)

    tuned = (
        {}
        if default
        else {
            "logger": False,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "enable_model_summary": False,
        }
    )
    loader = torch.utils.data.DataLoader(InOrder(job, False), batch_size=job.batch_size)  # type: ignore[arg-type, var-annotated]
    L.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        max_steps=job.num_steps,
        gradient_clip_val=MAX_GRAD_NORM,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        **tuned,
    ).fit(Module(), loader)


# --- from a folder of peers ----------------------------------------------------------------------------------------


def nanogpt(job: Job) -> None:
    """nanoGPT's train.py, unchanged: its model, loop and loader; only the positions of the rows are passed to it."""
    import torch

    folder = peer_folder("nanoGPT")
    assert folder is not None
    sys.path.insert(0, str(folder))
    import model as peer  # type: ignore[import-not-found]

    source = {name: value.detach().clone() for name, value in load(job, False).state_dict().items()}

    def with_our_weights(self: Any, *arguments: Any) -> Any:
        own = self.state_dict()
        with torch.no_grad():
            for name, tensor in own.items():
                given = source[name]
                tensor.copy_(given if given.shape == tensor.shape and not _is_conv1d(name) else given.t())
        return configure(self, *arguments)

    configure = peer.GPT.configure_optimizers
    peer.GPT.configure_optimizers = with_our_weights
    places, randint = iter(job.rows), torch.randint

    def given_places(*arguments: Any, **keywords: Any) -> torch.Tensor:
        caller = sys._getframe(2).f_code.co_name
        if sys._getframe(1).f_code.co_name != "get_batch" or caller == "estimate_loss":
            return randint(*arguments, **keywords)
        return torch.from_numpy(next(places))

    torch.randint = given_places
    import pickle

    (job.folder / "data/meta.pkl").write_bytes(pickle.dumps({"vocab_size": job.vocab_size}))
    os.chdir(folder)  # it reads its configurator from there
    sys.argv = ["train.py", *(f"--{key}={value}" for key, value in _nanogpt_settings(job).items())]
    _run_script(folder / "train.py")


def _nanogpt_settings(job: Job) -> dict[str, Any]:
    shape, device = job.model, device_here()
    return {
        "out_dir": str(Path("out").resolve()),
        "dataset": str(job.folder / "data"),
        "eval_interval": 10**9,
        "eval_iters": 1,
        "log_interval": 10,
        "gradient_accumulation_steps": 1,
        "batch_size": job.batch_size,
        "block_size": job.length,
        "n_layer": shape["n_layer"],
        "n_head": shape["n_head"],
        "n_embd": shape["n_embd"],
        "dropout": 0.0,
        "bias": True,
        "learning_rate": LEARNING_RATE,
        "max_iters": 10**9,
        "weight_decay": 0.0,
        "beta2": 0.999,
        "grad_clip": MAX_GRAD_NORM,
        "decay_lr": False,
        "device": device,
        "compile": device == "cuda",
        "dtype": "bfloat16" if device == "cuda" else "float32",
    }


def _is_conv1d(name: str) -> bool:
    return name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def run_clm(job: Job, **more: Any) -> None:
    """transformers' run_clm_no_trainer.py, unchanged, on a text that it tokenises and cuts into rows itself."""
    folder = peer_folder("transformers")
    assert folder is not None
    job.write_text_in_order(Path("train.json"))
    take_rows_in_order()
    from accelerate import DistributedType
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained
    AutoModelForCausalLM.from_pretrained = lambda *a, **k: cut_last_token(original(*a, **k))
    if not hasattr(DistributedType, "TPU"):  # its name until Accelerate 1.0, which the script still uses
        DistributedType.TPU = DistributedType.XLA
    given: dict[str, Any] = {
        "train_file": "train.json",
        "validation_file": str(job.folder / "held-out.json"),
        "model_name_or_path": str(job.default_weights),
        "block_size": job.length + 1,
        "per_device_train_batch_size": job.batch_size,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_train_steps": job.num_steps,
        "num_train_epochs": 1,
        "seed": SEED,
    }
    os.environ["HF_DATASETS_CACHE"] = str(Path("datasets").resolve())
    sys.argv = [
        "run_clm_no_trainer.py",
        *(word for key, value in (given | more).items() for word in (f"--{key}", str(value))),
    ]
    _run_script(run_clm_file(folder))


def run_clm_file(folder: Path) -> Path:
    return folder / "examples/pytorch/language-modeling/run_clm_no_trainer.py"


def litgpt(job: Job, precision: str = "no") -> None:
    """litgpt's pretraining, called as its command calls it; on a CPU without compilation, like all contenders here."""
    import torch

    folder = peer_folder("litgpt")
    if folder is not None:
        sys.path.insert(0, str(folder))
    if not torch.cuda.is_available():
        torch.compile = lambda model, *_, **__: model
    from litgpt import pretrain  # type: ignore[import-not-found]
    from litgpt.args import EvalArgs, TrainArgs  # type: ignore[import-not-found]
    from litgpt.config import Config  # type: ignore[import-not-found]
    from litgpt.data import DataModule  # type: ignore[import-not-found]
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama  # type: ignore[import-not-found]

    class Tokens(DataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            rows = [torch.from_numpy(job.row(start)) for start in job.rows.reshape(-1)]
            return torch.utils.data.DataLoader(rows, batch_size=job.batch_size)  # type: ignore[arg-type]

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([torch.from_numpy(job.row(0))], batch_size=1)  # type: ignore[arg-type]

    config = Config(**_litgpt_shape(job))
    own: dict[str, Any] = {}
    copy_weights_hf_llama(config, {}, own, dict(load(job, False).state_dict()))
    initialise = pretrain.initialize_weights

    def with_our_weights(fabric: Any, model: Any, **sizes: Any) -> None:
        initialise(fabric, model, **sizes)
        model.load_state_dict(own)

    pretrain.initialize_weights = with_our_weights
    pretrain.setup(
        model_name="bench",
        model_config=config,
        out_dir=Path("out"),
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        data=Tokens(),
        devices=1,
        logger_name="csv",
        seed=SEED,
        eval=EvalArgs(interval=10**9, max_iters=1),
        train=TrainArgs(
            save_interval=None,
            log_interval=10,
            global_batch_size=job.batch_size,
            micro_batch_size=job.batch_size,
            max_tokens=job.num_steps * job.batch_size * job.length,
            max_norm=MAX_GRAD_NORM,
            min_lr=LEARNING_RATE,
            lr_warmup_steps=0,
        ),
        optimizer={
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": LEARNING_RATE, "weight_decay": 0.0, "betas": (0.9, 0.999)},
        },
    )


def _litgpt_shape(job: Job) -> dict[str, Any]:
    shape = job.model
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    return {
        "name": "bench",
        "block_size": job.length,
        "vocab_size": job.vocab_size,
        "padded_vocab_size": job.vocab_size,
        "n_layer": shape["num_hidden_layers"],
        "n_head": heads,
        "n_query_groups": shape["num_key_value_heads"],
        "n_embd": hidden,
        "head_size": hidden // heads,
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
        "norm_class_name": "RMSNorm",
        "norm_eps": 1e-6,
        "mlp_class_name": "LLaMAMLP",
        "intermediate_size": shape["intermediate_size"],
        "rope_base": 10000,
    }


def _run_script(file: Path) -> None:
    """Run a file as Python does."""
    namespace = {"__name__": "__main__", "__file__": str(file)}
    exec(compile(file.read_text(), str(file), "exec"), namespace)


def _has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def field(job: Job) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """Return the contenders that can train this job here, and the reason why each of the others cannot."""
    absent: dict[str, str] = {}
    found: dict[str, Callable[[], None]] = {
        "ours": lambda: ours(job),
        "bare loop": lambda: bare(job, default=True),
        "bare loop, tuned": lambda: bare(job),
        "Trainer": lambda: trainer(job, default=True),
        "Trainer, tuned": lambda: trainer(job),
    }
    if _has("lightning"):
        found["Lightning"] = lambda: lightning(job, default=True)
        found["Lightning, tuned"] = lambda: lightning(job)
    else:
        absent |= dict.fromkeys(("Lightning", "Lightning, tuned"), "not installed: pip install 'acc-lm[bench]'")
    is_gpt2 = job.model["model_type"] == "gpt2"
    for name, folder, run, fits, why in (
        ("nanoGPT", "nanoGPT", nanogpt, is_gpt2, "its only architecture is GPT-2's"),
        ("run_clm_no_trainer", "transformers", run_clm, True, ""),
        ("litgpt", "litgpt", litgpt, not is_gpt2, "it has no learned positions, so no GPT-2"),
    ):
        if not fits:
            absent[name] = why
        elif peer_folder(folder) is None and not (name == "litgpt" and _has("litgpt")):
            absent[name] = f"no folder {folder} in PEERS"
        elif name == "litgpt" and not (_has("lightning") and _has("jsonargparse")):
            absent[name] = "its own requirements are not installed: pip install 'acc-lm[bench]'"
        else:
            found[name] = lambda run=run: run(job)  # type: ignore[misc]
    found["ours again"] = lambda: ours(job)
    return found, absent
