"""Every operation of the engine's inner loop in plain torch: the definition the fast bodies meet.

They run on any device and in any shape. All of them take and give fp32 unless said otherwise,
keys come after RoPE, and query head h reads kv head h // group, so queries are handed over as
[kv_heads, group, ...] and no key is repeated. `kernels.paged` says what pages and regions are.
"""

from kernels.reference.append import append_high, append_low, put_channel
from kernels.reference.attention import paged_attention
from kernels.reference.codes import dequantise, pack, quantise, unpack
from kernels.reference.scores import column_mass, window_mass
from kernels.reference.summaries import append_bounds, choose_slots

__all__ = [
    "append_bounds",
    "append_high",
    "append_low",
    "choose_slots",
    "column_mass",
    "dequantise",
    "pack",
    "paged_attention",
    "put_channel",
    "quantise",
    "unpack",
    "window_mass",
]
