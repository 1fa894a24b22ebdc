"""Sets the number of device queues that the streams of a process share (CUDA_DEVICE_MAX_CONNECTIONS).

With one queue, kernels start in the order in which they were launched. Megatron asks for this so that the communication
of a tensor group starts before the computation that overlaps it. But an entry that must wait, such as a receive behind
another receive on the same stream, then blocks everything launched after it, including computation that does not depend
on it. In a pipeline this costs a tenth of a step, so with several stages every stream gets its own queue.
"""

from __future__ import annotations

from collections.abc import MutableMapping

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
# The maximum number of queues of a device.
MANY_QUEUES = "32"


def set_device_queues(environment: MutableMapping[str, str], tensor_size: int, num_stages: int) -> str | None:
    """Set the variable if ``environment`` does not contain it; CUDA reads it at initialization.

    Returns:
        A warning for the user, None if there is nothing to say.
    """
    if num_stages > 1:
        environment.setdefault(QUEUES, MANY_QUEUES)
    elif tensor_size > 1:
        environment.setdefault(QUEUES, "1")
    if num_stages > 1 and environment[QUEUES] == "1":
        return (
            f"{QUEUES} is 1: the computation of a pipeline stage then waits for messages that it does not need yet; "
            f"leave it unset, or set it to {MANY_QUEUES}"
        )
    return None
