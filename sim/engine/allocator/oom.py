"""The outcome of a request for which no memory was found."""

from __future__ import annotations


class OutOfMemory(Exception):
    """No memory for a request. The cache has been flushed before this was raised.

    requested_bytes: what the caller asked; rounded_bytes: as it would lie in a segment; driver_bytes: what the driver
    refused (the "Tried to allocate" of PyTorch's message); device_free_bytes: what the driver then had left.
    """

    def __init__(
        self,
        *,
        requested_bytes: int,
        rounded_bytes: int,
        driver_bytes: int,
        device_free_bytes: int,
        allocated_bytes: int,
        reserved_bytes: int,
        stream: int,
    ) -> None:
        self.requested_bytes = requested_bytes
        self.rounded_bytes = rounded_bytes
        self.driver_bytes = driver_bytes
        self.device_free_bytes = device_free_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.stream = stream
        super().__init__(
            f"CUDA out of memory. Tried to allocate {driver_bytes} bytes for a request of {requested_bytes}; "
            f"{device_free_bytes} are free on the device, {allocated_bytes} are allocated by PyTorch and "
            f"{reserved_bytes - allocated_bytes} are reserved but unallocated."
        )
