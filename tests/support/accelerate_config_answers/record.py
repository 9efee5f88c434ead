"""Answer `accelerate config` once per backend and keep what it writes, in this folder: `python record.py`."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from unittest.mock import patch

from accelerate.commands.config.config import config_command, config_command_parser
from accelerate.commands.menu import BulletMenu

SEVERAL_GPUS = {"Which type of machine": "multi-GPU", "GPU(s) should be used": "2"}
TWO_MACHINES = {
    "How many different machines": "2",
    "rank of this machine": 0,
    "IP address": "10.0.0.1",
    "What is the port": "29500",
}
FSDP = SEVERAL_GPUS | {"FullyShardedDataParallel": "yes", "_no_split_modules": "yes"}
DEEPSPEED = SEVERAL_GPUS | {"use DeepSpeed": "yes"}

# The start of a question, or a piece of it -> what is typed, or the line that is chosen. All others get Enter.
ANSWERS: dict[str, dict[str, str | int]] = {
    "cpu": {"CPU only": "yes"},
    "single_gpu": {"mixed precision?": "bf16"},
    "multi_cpu": {"Which type of machine": "multi-CPU", "processes should be used": "2"},
    "ddp": SEVERAL_GPUS,
    "ddp_compile": SEVERAL_GPUS | {"torch dynamo": "yes", "Which dynamo backend": "inductor", "customize": "yes"},
    "ddp_fullgraph": SEVERAL_GPUS
    | {"torch dynamo": "yes", "Which dynamo backend": "eager", "customize": "yes", "fullgraph mode": "yes"},
    "ddp_affinity": SEVERAL_GPUS | {"numa efficiency": "yes"},
    "multi_node_ddp": SEVERAL_GPUS | TWO_MACHINES,
    "multi_node_ddp_c10d": SEVERAL_GPUS | TWO_MACHINES | {"same local network": "no", "rendezvous backend": "c10d"},
    "fsdp1": FSDP | {"FSDP version": 1},
    "fsdp2": FSDP | {"mixed precision?": "bf16"},
    "fsdp2_by_size": SEVERAL_GPUS | {"FullyShardedDataParallel": "yes", "auto wrap policy?": "SIZE_BASED_WRAP"},
    "fsdp2_named_block": SEVERAL_GPUS
    | {"FullyShardedDataParallel": "yes", "layer class names": "LlamaDecoderLayer", "CPU RAM efficient": "no"},
    "hsdp": FSDP
    | {
        "use the parallelism config": "yes",
        "replicate size": "2",
        "FSDP shard size": "2",
        "GPU(s) should be used": "4",
    },
    "deepspeed_zero2": DEEPSPEED,
    "deepspeed_zero3_offload": DEEPSPEED
    | {
        "ZeRO optimization stage": 3,
        "Where to offload optimizer": "cpu",
        "Where to offload parameters": "cpu",
        "accumulation steps": "4",
        "use gradient clipping": "yes",
        "save 16-bit": "yes",
        "deepspeed.zero.Init": "yes",
    },
    "deepspeed_zero3_nvme": DEEPSPEED
    | {"ZeRO optimization stage": 3, "Where to offload optimizer": "nvme", "Where to offload parameters": "nvme"},
    "deepspeed_file": DEEPSPEED
    | {"specify a json file": "yes", "path to the json": "accelerate_configs/deepspeed_zero3_full.json"},
    "multi_node_deepspeed_zero3": DEEPSPEED
    | TWO_MACHINES
    | {"ZeRO optimization stage": 3, "location of hostfile": "hostfile"},
}


class Keyboard:
    """Answers for one run of the questionnaire; one that no question asked for, or a question asked twice, is an error."""

    def __init__(self, answers: dict[str, str | int]) -> None:
        self.answers = answers
        self.used: set[str] = set()
        self.asked: set[str] = set()

    def answer(self, question: str) -> str | int | None:
        assert question not in self.asked, f"the answer was not accepted: {question}"
        self.asked.add(question)
        pieces = [piece for piece in self.answers if piece in question]
        assert len(pieces) <= 1, f"{pieces} all answer: {question}"
        self.used |= set(pieces)
        return self.answers[pieces[0]] if pieces else None

    def type(self, question: str = "") -> str:
        answer = self.answer(question)
        return "" if answer is None else str(answer)

    def choose(self, menu: BulletMenu, default_choice: int = 0) -> int:
        answer = self.answer(menu.prompt)
        return default_choice if answer is None else menu.choices.index(answer)


def record(folder: Path) -> None:
    """Write one file per entry of ANSWERS."""
    for name, answers in ANSWERS.items():
        keyboard = Keyboard(answers)
        arguments = config_command_parser().parse_args(["--config_file", str(folder / f"{name}.yaml")])
        with (
            patch.object(builtins, "input", keyboard.type),
            patch.object(BulletMenu, "run", lambda menu, default_choice=0: keyboard.choose(menu, default_choice)),  # noqa: B023
        ):
            config_command(arguments)
        unused = set(answers) - keyboard.used
        assert not unused, f"{name}: no question asked for {unused}"


if __name__ == "__main__":
    record(Path(__file__).parent)
    sys.exit()
