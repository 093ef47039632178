# pyright: strict
"""Each line that is marked has a fault that a type checker must see, and no other line has any."""

from callyard import SyncYard, Worker, Yard, bind, call, call_many
from tests.typing.functions import Flight, distance, fare, land


def inside() -> None:
    call(distance, 5)  # wrong: the type of an argument
    call(distance, "JFK", to="SFO")  # wrong: no such parameter
    call(distance)  # wrong: one is missing
    x: str = call(distance, "JFK")  # wrong: what it gives
    y: list[str] = call_many(fare, [1])  # wrong: what it gives
    print(x, y)


async def of_a_worker(worker: Worker) -> None:
    await worker.call(distance, 5)  # wrong: the type of an argument
    await worker.call(distance, {"origin": "JFK"})  # wrong: a mapping is for calls by name
    await worker.call(land)  # wrong: one is missing
    await worker.call(land, Flight("JFK", 1.0), True)  # wrong: by name only
    await worker.call(distance, "JFK", deadline_ms=5)  # wrong: an option is no parameter
    await worker.call("distance", "JFK", 5)  # wrong: by name the arguments are one value
    await worker.call("distance", {"origin": "JFK"}, budgte_ms=5)  # wrong: no such option
    await worker.call(bind(distance, "JFK"), key="a")  # wrong: an option of dispatch
    x: str = await worker.call(distance, "JFK")  # wrong: what it gives
    bind(fare, "five")  # wrong: the type of an argument
    async for result in worker.map(fare, [1], key="a"):  # wrong: no such option
        print(result)
    async for fares in worker.map(fare, [1]):
        fares.value.upper()  # wrong: what it gives
    print(x)


async def of_a_yard(yard: Yard) -> None:
    await yard.dispatch(fare, "five")  # wrong: the type of an argument
    await yard.dispatch(distance, "JFK", key="a")  # wrong: an option is no parameter
    await yard.dispatch(bind(fare, 5), key=7)  # wrong: the type of an option
    await yard.dispatch("fare", [5])  # wrong: by name a dispatch takes a mapping
    done = await yard.dispatch(land, Flight("JFK", 1.0))
    done.value.upper()  # wrong: what it gives


def without_await(yard: SyncYard) -> None:
    yard.call(distance, 5)  # wrong: the type of an argument
    x: str = yard.call(fare, 5)  # wrong: what it gives
    print(x)
