"""From the device to host memory without waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostCopy:
    """What a tensor holds once the device has done what it was asked for so far.

    Made by the thread that asks the device, which goes on at once; `array` may be called by another
    one, which waits.

    Args:
        tensor: float32; nothing else writes to it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def arrived(self) -> bool:
        """Whether `array` would return at once."""
        return self._event is None or self._event.query()

    def array(self) -> NDArray[np.float32]:
        """The same numbers in host memory; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        array: NDArray[np.float32] = self._host.numpy()
        return array
