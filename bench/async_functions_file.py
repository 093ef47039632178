"""An `async def`, in a file of its own: one in a bundle gives its executors an event loop."""

from callyard import function


@function(idempotent=True)
async def no_op_async(value: int) -> int:
    return value
