"""Megatron's own parallelism."""

from __future__ import annotations

from typing import Literal

from sim.scenario.kinds import Ranks
from sim.scenario.section import Section


class TensorSection(Section):
    """Tensor parallelism: every layer's matrices are split over ranks that lie side by side; as Megatron's, or as torchtitan's
    with DTensor (under fsdp, with loss_parallel)."""

    degree: Ranks
    """Ranks that share each layer; it divides heads, ffn_hidden and vocab. tensor x fsdp (or data) is the number of
    GPUs."""
    sequence_parallel: bool = False
    """The ranks also share the tokens of norms, dropouts and residuals. Default: false."""
    async_all_reduce: bool = True
    """Without sequence parallelism: in backward the gradient of a column-parallel layer's input is summed beside the product
    for its weight. false: after it, as Megatron until autumn 2021 and Megatron-DeepSpeed. Default: true."""
    asynchronous: bool = False
    """torchtitan, compiled: asynchronous tensor parallelism (enable_async_tensor_parallel). Tokens are gathered piece by
    piece, each multiplied while the next is on its way, and products that are summed are sent piece by piece (Inductor's
    micro-pipelines over symmetric memory). Default: false."""


class DataSection(Section):
    """Data parallelism as Megatron's, with 16-bit parameters and fp32 main parameters."""

    degree: Ranks
    """Replicas of the model."""
    distributed_optimizer: bool = False
    """Main parameters and moments are split over the replicas (use-distributed-optimizer). Default: false."""
    optimizer_instances: Ranks = 1
    """With distributed_optimizer: the replicas form so many groups of neighbours, each of which splits main parameters and
    moments among its ranks alone; gradients are scattered inside them and summed across
    (num-distributed-optimizer-instances). Default: 1, one group of all."""
    overlap: bool = False
    """Gradients are reduced beside backward, in buckets (overlap-grad-reduce). Default: false, after it."""
    gradient_accumulation_fusion: bool = True
    """Products for weights' gradients add to the main gradients themselves. Default: true."""
    keep_gradients: bool = False
    """Parameters keep their 16-bit gradients until the next backward; after a backward these are cast, one by one, and the
    copies added to the main gradients, which are summed whole (DeepSpeed's BF16_Optimizer). Default: false: added as soon as
    they are there, and dropped."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Dtype of Adam's two moments (use-precision-aware-optimizer with exp-avg-dtype and exp-avg-sq-dtype); main parameters
    stay fp32. Needs distributed_optimizer for bf16. Default: fp32."""
    fp8_parameters: bool = False
    """Weights of 8-bit products (precision.fp8) are stored and gathered in 8 bit, beside their fp32 main parameters
    (fp8-param-gather). Default: false: 16-bit weights, and 8-bit copies of them."""
