"""The code that torch.compile would generate for a GPU, on tensors of a GPU that is not there (see fake_cuda.py). Needs Triton, which compiles nothing here.

    python tests/support/fake_inductor.py          prints, for the forward of the fused loss (which makes its gradients) and of one block: Triton kernels, and calls of others

Finds operators that Inductor cannot lower. Nothing is compiled to machine code or run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch  # after fake_cuda, which comes before it
from fake_cuda import changed, pretended_gpu


def main() -> int:
    import torch._dynamo.device_interface as devices
    import torch._inductor.compile_fx
    import torch.utils._triton
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding

    from acc_lm.modeling import losses

    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, warp_size=32, L2_cache_size=50 << 20,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, is_integrated=0,
        max_threads_per_block=1024, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, gcnArchName="", uuid="none",
    )  # fmt: skip

    def always(answer: Any) -> Any:
        return staticmethod(lambda *_: answer)

    of_interface = {
        "get_device_properties": always(properties), "get_compute_capability": always(90), "is_available": always(True),
        "get_raw_stream": always(0), "exchange_device": always(0), "maybe_exchange_device": always(0),
    }  # fmt: skip
    changes = pretended_gpu()
    changes[torch.cuda]["get_device_properties"] = lambda *_: properties
    changes |= {
        devices.CudaInterface: of_interface,
        devices.CudaInterface.Worker: {"get_device_properties": always(properties)},
        torch.utils._triton: {"triton_hash_with_backend": lambda *_: "none"},
    }
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def loss(hidden: Any, weight: Any, targets: Any) -> Any:
        context = SimpleNamespace(
            needs_input_grad=(True, True, False, False), save_for_backward=lambda *kept: setattr(context, "kept", kept)
        )
        return losses._SummedLoss.forward(context, hidden, weight, None, targets), *context.kept[:2]

    with changed(changes):
        with mode, torch.device("cuda"):
            config = LlamaConfig(
                hidden_size=256,
                intermediate_size=512,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_hidden_layers=1,
            )
            config._attn_implementation = "sdpa"
            torch.set_default_dtype(torch.bfloat16)
            layer = LlamaDecoderLayer(config, 0)
            torch.set_default_dtype(torch.float32)
            rotary = LlamaRotaryEmbedding(config)
            hidden = torch.randn(4, 512, 256, dtype=torch.bfloat16)
            positions = rotary(hidden, torch.arange(512)[None])
            block = [hidden, *positions]
            head = [
                torch.randn(6000, 64, dtype=torch.bfloat16),
                torch.randn(50257, 64),
                torch.zeros(6000, dtype=torch.int64),
            ]
        report("fused loss", lower(loss, head, mode))
        report("one block", lower(lambda h, cos, sin: layer(h, position_embeddings=(cos, sin)), block, mode))
    return 0


def lower(function: Callable[..., Any], inputs: list[Any], mode: Any) -> str:
    """The source that Inductor writes for a function of these inputs."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode, torch.no_grad():
        graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    with mode, V.set_fake_mode(mode), DebugContext():
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=None)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            code = lowering.codegen()
    code = code[0] if isinstance(code, tuple) else code
    return str(getattr(code, "value", code))


def report(name: str, source: str) -> None:
    flash = source.count("= torch.ops.aten._scaled_dot_product_flash_attention")
    others = source.count("extern_kernels.")
    print(f"{name}: {source.count('@triton.jit')} Triton kernels, {others} others, {flash} of flash attention")


if __name__ == "__main__":
    sys.exit(main())
