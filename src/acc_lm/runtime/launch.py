"""From the environment that a launcher left to an Accelerator that is what it asked for."""

from __future__ import annotations

import json
import logging
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from acc_lm.config import DistributedConfig, TrainingConfig, nearest_multiples
from acc_lm.errors import ConfigError, MachineError
from acc_lm.runtime.config_file import check_config_file, lost_settings, resolved_deepspeed_config
from acc_lm.runtime.extensions import build_extensions

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig

    from acc_lm.config import Config

NCCL_ONLY_HOOKS = ("bf16",)


def build_accelerator(config: Config, output_dir: Path | None = None) -> Accelerator:
    """The Accelerator of this launch, after everything that can be refused without it was refused.

    Raises:
        MachineError: the launch did not give what it asked for, or this machine cannot execute it.
        ConfigError: the global batch does not divide over the processes.
    """
    training, distributed = config.training, config.distributed
    if asked_strategy().startswith("deepspeed") and config.model.dtype != "float32":
        raise MachineError(
            f"model.dtype must be float32 under DeepSpeed, which updates in float32 whatever the model is in, got "
            f"{config.model.dtype}; for 16-bit compute use training.mixed_precision=bf16, for float64 another Accelerate config"
        )
    has_accelerator = torch.accelerator.is_available() and not _flag("ACCELERATE_USE_CPU")
    _refuse_silent_single_process()
    check_config_file()
    os.environ |= lost_settings()
    strategy = asked_strategy()
    precision = _checked_precision(training, has_accelerator)
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    _refuse_missing_devices(has_accelerator)
    _refuse_what_a_cpu_cannot_do(distributed, strategy, has_accelerator)
    _refuse_a_hook_that_fails(config, strategy)
    _, accumulation = split_global_batch(training, num_processes)
    _choose_port()

    from accelerate import Accelerator
    from accelerate.utils import (
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        InitProcessGroupKwargs,
        ProjectConfiguration,
    )
    from accelerate.utils.dataclasses import DDPCommunicationHookType

    ddp = DistributedDataParallelKwargs(
        find_unused_parameters=distributed.find_unused_parameters,
        gradient_as_bucket_view=distributed.gradient_as_bucket_view,
        bucket_cap_mb=distributed.bucket_cap_mb,
        static_graph=distributed.static_graph,
        broadcast_buffers=distributed.broadcast_buffers,
        comm_hook=DDPCommunicationHookType("no" if distributed.comm_hook == "none" else distributed.comm_hook),
        comm_state_option=distributed.comm_hook_arguments,
    )
    group = InitProcessGroupKwargs(timeout=timedelta(seconds=distributed.timeout_seconds))
    if distributed.backend is not None and has_accelerator:
        group.backend = distributed.backend
    keywords: dict[str, Any] = {"cpu": not has_accelerator}
    if strategy.startswith("deepspeed"):
        keywords = {"deepspeed_plugin": _deepspeed_plugin(config, num_processes, precision, has_accelerator)}
        build_extensions(needs_cpu_adam=_offloads_optimizer(), needs_nvme=_needs_nvme(), on_cpu=not has_accelerator)
        os.environ.pop(
            "ACCELERATE_USE_CPU", None
        )  # Accelerate would switch DeepSpeed off; without a GPU it is on the CPU anyway
        if not has_accelerator:
            group.backend = "gloo"  # else Accelerate counts one process and DeepSpeed all of them
    elif strategy in ("fsdp2", "hsdp"):
        keywords |= {
            "fsdp_plugin": _fsdp_plugin(precision, has_accelerator),
            "parallelism_config": _mesh(num_processes),
        }
    try:
        if strategy in ("fsdp2", "hsdp") and not has_accelerator:
            _shard_on_cpu(precision, keywords, group.to_kwargs())
        accelerator = Accelerator(
            **keywords,
            mixed_precision=precision,
            kwargs_handlers=[ddp, group],
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=accumulation,
                sync_with_dataloader=False,
                # Sharded gradients stay sharded between micro-batches; else each process would hold a whole gradient.
                sync_each_batch=strategy in ("fsdp2", "hsdp"),
            ),
            log_with=list(config.tracking.report_to) or None,
            project_config=ProjectConfiguration(str(output_dir), logging_dir=str(output_dir / "tensorboard"))
            if output_dir
            else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise MachineError(_rendezvous_problem(str(error))) from None
    if accelerator.num_processes != num_processes:
        raise MachineError(
            f"the launcher must give what it started, got {num_processes} processes (WORLD_SIZE) where Accelerate sees "
            f"{accelerator.num_processes}; launch with accelerate_configs/ddp.yaml, or with one process"
        )
    if strategy.startswith("deepspeed"):
        _build_models_whole(accelerator)
    _set_numerics(training, accelerator.device)
    return accelerator


def asked_strategy() -> str:
    """What the launch asks for, by the name that `environment.json` uses.

    Raises:
        MachineError: an engine that this project does not run.
    """
    if _flag("ACCELERATE_USE_MEGATRON_LM"):
        raise MachineError(
            "the Accelerate config must ask for one process, DDP, FSDP2 or DeepSpeed, got Megatron-LM; "
            "use accelerate_configs/fsdp2.yaml"
        )
    if _flag("ACCELERATE_USE_DEEPSPEED"):
        stage = _deepspeed_config().get("zero_optimization", {}).get("stage", 0)
        if stage not in (1, 2, 3):
            raise MachineError(
                f"the ZeRO stage of the Accelerate config must be 1, 2 or 3, got {stage}, which shards nothing; "
                "use accelerate_configs/ddp.yaml"
            )
        return f"deepspeed_zero{stage}"
    sizes = {
        name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1"))
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    if _flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        for name in ("tp", "cp", "sp"):
            if sizes[name] > 1:
                raise MachineError(
                    f"parallelism_config_{name}_size must be 1, got {sizes[name]}: this version splits data and parameters, "
                    "not layers or rows; use accelerate_configs/hsdp.yaml"
                )
    if _flag("ACCELERATE_USE_FSDP"):
        if os.environ.get("FSDP_VERSION", "1") != "2":
            raise MachineError(
                "fsdp_version must be 2, got 1, which torch no longer develops; run accelerate to-fsdp2 on the config, "
                "or use accelerate_configs/fsdp2.yaml"
            )
        return "hsdp" if sizes["dp_replicate"] > 1 else "fsdp2"
    if _flag("ACCELERATE_USE_PARALLELISM_CONFIG") and max(sizes.values()) > 1:
        raise MachineError(
            f"a parallelism_config must come with use_fsdp, got sizes {sizes} without; use accelerate_configs/hsdp.yaml"
        )
    return "ddp" if "WORLD_SIZE" in os.environ else "single"  # torchrun's one process is wrapped too


def split_global_batch(training: TrainingConfig, num_processes: int) -> tuple[int, int]:
    """(micro-batch size, micro-batches per optimizer step) of each process.

    A process whose share of the global batch is smaller than the recipe's micro-batch takes its share at once.

    Raises:
        ConfigError: the global batch does not divide.
    """
    share, rest = divmod(training.global_batch_size, num_processes)
    micro = min(training.micro_batch_size, share)
    if rest or share % micro:
        per_round = training.micro_batch_size * num_processes
        raise ConfigError(
            f"training.global_batch_size must be a multiple of micro_batch_size {training.micro_batch_size} x {num_processes} "
            f"processes = {per_round}, got {training.global_batch_size}; nearest: "
            f"{nearest_multiples(training.global_batch_size, per_round)}; or change training.micro_batch_size"
        )
    return micro, share // micro


def quiet_libraries() -> None:
    """Keep the libraries' own progress bars and notices out of ours; their errors still show."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    # DeepSpeed is imported even where it is not used (transformers does, when it saves a model), and talks.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno > logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes", "y", "on")


# --- refusals ------------------------------------------------------------------------------------------------------


def _refuse_silent_single_process() -> None:
    """Three launches ask for several processes and silently get one; this trace is all that they leave."""
    if "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ:
        raise MachineError(
            "the launch must start the processes it was asked for, got one process (accelerate starts only one for "
            "MULTI_CPU, for --cpu with --num_processes, and for distributed_type NO); use --config_file "
            "accelerate_configs/ddp.yaml --num_processes N, which works without a GPU too, or --num_processes 1"
        )


def _checked_precision(training: TrainingConfig, has_accelerator: bool) -> str:
    from_launch = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    precision = training.mixed_precision or from_launch
    key = "training.mixed_precision" if training.mixed_precision else "mixed_precision of the Accelerate config"
    if precision in ("fp16", "fp8") and not has_accelerator:
        raise MachineError(
            f"{key} must be bf16 or no on a CPU, got {precision}, which only accelerators execute; change it"
        )
    on_cuda = has_accelerator and torch.cuda.is_available()
    if precision == "bf16" and on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise MachineError(
            f"{key} must be fp16 or no on {torch.cuda.get_device_name()}, got bf16, which it does not have; change it"
        )
    return precision


def _refuse_missing_devices(has_accelerator: bool) -> None:
    asked = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    present = torch.accelerator.device_count() if has_accelerator else 0
    if 0 < present < asked and torch.cuda.is_available():
        raise MachineError(
            f"the launch must not start more processes than this machine has GPUs, got {asked} for {present}; "
            f"use --num_processes {present}"
        )


def _refuse_what_a_cpu_cannot_do(distributed: DistributedConfig, strategy: str, has_accelerator: bool) -> None:
    if has_accelerator:
        return
    if distributed.backend == "nccl":
        raise MachineError(
            "distributed.backend must be gloo or null on CPU processes, got nccl, which moves data between GPUs only; change it"
        )
    if strategy == "ddp" and distributed.comm_hook in NCCL_ONLY_HOOKS:
        raise MachineError(
            f"distributed.comm_hook must be none, fp16, power_sgd or batched_power_sgd on CPU processes, got "
            f"{distributed.comm_hook}, which only NCCL executes; change it for the rehearsal"
        )


def _refuse_a_hook_that_fails(config: Config, strategy: str) -> None:
    """torch's batched PowerSGD (2.11 to 2.13) hands its own helper a tensor of the wrong shape once it compresses."""
    starts_at = int(config.distributed.comm_hook_arguments.get("start_powerSGD_iter", 1000))
    steps = config.training.max_steps
    if (
        strategy == "ddp"
        and config.distributed.comm_hook == "batched_power_sgd"
        and (steps is None or steps >= starts_at)
    ):
        raise MachineError(
            f"distributed.comm_hook must be another than batched_power_sgd, which fails inside torch from step {starts_at} on, where it "
            "begins to compress; use power_sgd"
        )


def _choose_port() -> None:
    """One process of its own needs no port that a second run on this machine would also want."""
    if os.environ.get("WORLD_SIZE", "1") == "1" and "TORCHELASTIC_RUN_ID" not in os.environ:
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


def _rendezvous_problem(error: str) -> str:
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" not in error and "in use" not in error:
        return (
            f"the rendezvous at {address} must be reachable, got no answer; check main_process_ip, main_process_port and "
            "the firewall, and that machine 0 was started"
        )
    owner = _owner_of_port(os.environ.get("MASTER_PORT", ""))
    return f"the rendezvous at {address} must be free, got: it is in use{owner}; choose another --main_process_port (0 picks one)"


def _owner_of_port(port: str) -> str:
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and str(connection.laddr.port) == port and connection.status == psutil.CONN_LISTEN:
                return f" by process {connection.pid}" if connection.pid else ""
    except psutil.Error:
        pass  # not ours to see
    return ""


def _set_numerics(training: TrainingConfig, device: torch.device) -> None:
    torch.backends.cuda.matmul.allow_tf32 = training.allow_tf32
    torch.backends.cudnn.allow_tf32 = training.allow_tf32
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


# --- FSDP2 ---------------------------------------------------------------------------------------------------------


def _fsdp_plugin(precision: str, has_accelerator: bool) -> FullyShardedDataParallelPlugin:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    if not os.environ.get("FSDP_AUTO_WRAP_POLICY") or os.environ["FSDP_AUTO_WRAP_POLICY"].upper() == "NO_WRAP":
        os.environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"  # else everything is one unit, gathered at once
    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True)
    if plugin.activation_checkpointing:
        raise MachineError(
            "fsdp_activation_checkpointing must be false in the Accelerate config, got true; the recipe has one switch for "
            "every backend: model.gradient_checkpointing=true"
        )
    if precision != "no":
        # Accelerate's own policy also rounds the loss and the reduced gradients to 16 bits.
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}[precision]
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=None
        )
    if not has_accelerator:
        plugin.cpu_offload = OffloadPolicy()  # the parameters are on the CPU as it is; torch would look for a GPU
    return plugin


def _mesh(num_processes: int) -> ParallelismConfig | None:
    if not _flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return None
    from accelerate.utils import ParallelismConfig

    mesh = ParallelismConfig()
    replicas, shards = mesh.dp_replicate_size, mesh.dp_shard_size
    if replicas * shards != num_processes:
        raise MachineError(
            f"parallelism_config must multiply to the number of processes, got dp_replicate_size {replicas} x dp_shard_size "
            f"{shards} for {num_processes} processes; change num_processes or the sizes"
        )
    return mesh


def _shard_on_cpu(precision: str, keywords: dict[str, Any], group: dict[str, Any]) -> None:
    """Make Accelerate keep the request for FSDP on CPU processes.

    It switches to FSDP for accelerators only and would train with DDP without a word. FSDP2 itself runs on gloo, so the
    shared state is switched right after it exists, as Accelerate does for a GPU.
    """
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, TorchDynamoPlugin

    state = AcceleratorState(
        mixed_precision=precision, dynamo_plugin=TorchDynamoPlugin(), _from_accelerator=True, **keywords, **group
    )
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = keywords["fsdp_plugin"]
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


# --- DeepSpeed -----------------------------------------------------------------------------------------------------


def _deepspeed_config() -> dict[str, Any]:
    """The DeepSpeed config that the launch asks for, from its file or from the variables of the launcher."""
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file == "none":
        return {"zero_optimization": {"stage": int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))}}
    file = resolved_deepspeed_config(file)
    try:
        config: dict[str, Any] = json.loads(Path(file).read_text())
    except OSError:
        raise MachineError(
            f"deepspeed_config_file must exist, got {file!r}; give its path from where you launch, or from beside the yaml"
        ) from None
    except ValueError as error:
        raise MachineError(f"{file} must be JSON, got: {error}; mend it") from None
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        raise MachineError(f"{file} must be a mapping with a zero_optimization section, got none; add it")
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = file
    return config


def _offload_devices() -> set[str]:
    zero = _deepspeed_config()["zero_optimization"]
    devices = {(zero.get(key) or {}).get("device", "none") for key in ("offload_optimizer", "offload_param")}
    if os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") == "none":
        devices |= {os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{k}_DEVICE", "none") for k in ("OPTIMIZER", "PARAM")}
    return devices - {"none", None}


def _offloads_optimizer() -> bool:
    zero = _deepspeed_config()["zero_optimization"]
    return (zero.get("offload_optimizer") or {}).get("device", "none") != "none" or os.environ.get(
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none"
    ) != "none"


def _needs_nvme() -> bool:
    return "nvme" in _offload_devices()


def _deepspeed_plugin(config: Config, num_processes: int, precision: str, has_accelerator: bool) -> DeepSpeedPlugin:
    """Accelerate's plugin, with everything that the recipe owns handed over from the recipe.

    Raises:
        MachineError: a hand-written DeepSpeed config says something else than the recipe.
    """
    from accelerate.utils import DeepSpeedPlugin

    by_hand = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") != "none"
    micro, accumulation = split_global_batch(config.training, num_processes)
    clip = config.optimizer.max_grad_norm or 0.0
    owned: dict[str, Any] = {
        "train_batch_size": config.training.global_batch_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
    }
    if by_hand:
        _refuse_contradictions(_deepspeed_config(), owned, precision)
    os.environ["ACCELERATE_DEEPSPEED_ZERO3_INIT"] = "false"  # weights are drawn once and spread from there
    try:
        plugin = DeepSpeedPlugin(zero3_init_flag=False)
    except ValueError as error:  # Accelerate's own reasons
        raise MachineError(
            f"the DeepSpeed settings must be ones that Accelerate takes, got: {' '.join(str(error).split())}"
        ) from None
    settings = plugin.deepspeed_config
    settings |= owned
    plugin.gradient_accumulation_steps = accumulation
    zero = settings["zero_optimization"]
    bytes_per_gradient = 4
    zero.setdefault("reduce_bucket_size", int(config.distributed.bucket_cap_mb * 2**20) // bytes_per_gradient)
    if not has_accelerator:
        # Small tensors would stay whole, which in a small rehearsal is all of them.
        zero.setdefault("stage3_param_persistence_threshold", 0)
    if precision != "no":
        # As under the other engines: 16 bits compute, 32 bits sum and are summed over the processes.
        settings.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
        settings.setdefault("communication_data_type", "fp32")
    return plugin


def _build_models_whole(accelerator: Accelerator) -> None:
    """Let go of the global state by which transformers would draw each weight in shards, from another random sequence."""
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    accelerator.deepspeed_plugin.dschf = None


def _refuse_contradictions(settings: dict[str, Any], owned: dict[str, Any], precision: str) -> None:
    file = os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
    keys = {
        "train_batch_size": "training.global_batch_size",
        "train_micro_batch_size_per_gpu": "training.micro_batch_size",
        "gradient_accumulation_steps": "training.global_batch_size / (micro_batch_size x processes)",
        "gradient_clipping": "optimizer.max_grad_norm",
    }
    problems = [
        f"{file}: {key} must be auto or what the recipe says ({keys[key]}: {value}), got {settings[key]}; set it to auto"
        for key, value in owned.items()
        if settings.get(key, "auto") not in ("auto", value)
    ]
    problems += [
        f"{file}: {key} must be left out, got one; the recipe's {key} section is handed over"
        for key in ("optimizer", "scheduler")
        if key in settings
    ]
    for name in ("fp16", "bf16"):
        enabled = settings.get(name, {}).get("enabled", "auto")
        if enabled not in ("auto", precision == name):
            problems.append(
                f"{file}: {name}.enabled must be auto or {str(precision == name).lower()}, got {str(enabled).lower()}; "
                "precision is the recipe's (training.mixed_precision); set it to auto"
            )
    if settings.get("torch_autocast", {}).get("enabled"):
        problems.append(
            f"{file}: torch_autocast must be left out; precision is the recipe's (training.mixed_precision)"
        )
    if problems:
        raise MachineError(*problems)


def launch_notes(config: Config) -> list[str]:
    """What the launch says and the recipe overrules, one line each."""
    if not _flag("ACCELERATE_USE_DEEPSPEED") or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") != "none":
        return []
    _, accumulation = split_global_batch(config.training, int(os.environ.get("WORLD_SIZE", "1")))
    asked = {
        "gradient_accumulation_steps": (os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto"), accumulation),
        "gradient_clipping": (
            os.environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto"),
            config.optimizer.max_grad_norm or 0,
        ),
    }
    written = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")  # the launcher fills in the others by itself
    return [
        f"{key} {value} of the Accelerate config is overruled: the recipe makes it {ours}"
        for key, (value, ours) in asked.items()
        if key in written and value not in ("auto", "none") and float(value) != float(ours)
    ]
