"""The operations in Triton, for NVIDIA GPUs from Ampere on.

Importing this needs triton, which CPU builds of torch come without: import it when a tensor is on
a GPU, not before. Under TRITON_INTERPRET=1 (set before the import) the same kernels run on CPU
tensors, slowly; that is how they are tested where there is no GPU. `put_channel`, done once a
prompt, is plain torch.
"""

from kernels.reference import put_channel
from kernels.triton.attention import paged_attention
from kernels.triton.quantise import append_high, append_low
from kernels.triton.scores import column_mass, window_mass
from kernels.triton.summaries import append_bounds, choose_slots

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
