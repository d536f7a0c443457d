"""The operations of `kernels.reference` in C++ for x86 CPUs with AVX2, called through ctypes.

They take what the reference takes. Pages must be contiguous and head_dim a multiple of 8; what is
not goes to the plain torch body, call by call, and `put_channel`, done once a prompt, is that
body's. Work is shared between torch.get_num_threads()
threads; no result depends on their number, but for the two masses, whose matrix product is torch's.
"""

from kernels.cpu.append import append_bounds, append_high, append_low
from kernels.cpu.attention import choose_slots, paged_attention
from kernels.cpu.scores import column_mass, window_mass
from kernels.reference import put_channel

__all__ = [
    "append_bounds",
    "append_high",
    "append_low",
    "choose_slots",
    "column_mass",
    "paged_attention",
    "put_channel",
    "window_mass",
]
