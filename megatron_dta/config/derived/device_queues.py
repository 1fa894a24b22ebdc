"""How many queues of a device the streams of a process share: the environment variable CUDA_DEVICE_MAX_CONNECTIONS.

With one queue kernels start in the order of their launches. Megatron asks for that so that communication of a tensor
group starts before the computation beside it. But an entry that must wait, a receive behind another one on the same
stream for example, then holds up all that is launched after it, also computation that needs neither. In a pipeline that
costs a tenth of a step, so with several stages every stream gets a queue of its own.
"""

from __future__ import annotations

from collections.abc import MutableMapping

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
# As many as a device can have.
MANY_QUEUES = "32"


def set_device_queues(environment: MutableMapping[str, str], tensor_size: int, num_stages: int) -> str | None:
    """Set the variable where ``environment`` does not have it; it is read when CUDA starts.

    Returns:
        A warning for the user, None if there is nothing to say.
    """
    if num_stages > 1:
        environment.setdefault(QUEUES, MANY_QUEUES)
    elif tensor_size > 1:
        environment.setdefault(QUEUES, "1")
    if num_stages > 1 and environment[QUEUES] == "1":
        return (
            f"{QUEUES} is 1: computation of a pipeline stage then waits for messages that it does not need yet; leave "
            f"it unset, or set it to {MANY_QUEUES}"
        )
    return None
