"""An agent's loop over the tools of a ferry company: plan, take the steps, plan anew where that helps.

    python examples/agent_loop.py

The planner is a script here, where a model would be; the rest is as in earnest. On its way the loop meets arguments
that do not fit, a service that is down for the moment, and a payment whose answer is lost. The card is charged once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import Field

from callyard import (
    Allowance,
    Dispatcher,
    DispatchError,
    Outcome,
    Registry,
    ToolError,
    TransientError,
    context,
    derive_key,
    loop_event,
)
from callyard.dispatch.events import DispatchEvent
from callyard.dispatch.loop_event import Repeat
from callyard.policy.retry import RetryPolicy

GOAL: Final = "three of us to Texel and back, with bicycles, on the company card"
FAILURES_MAX: Final = 2
"""How often the loop sees one call fail before it plans anew."""

registry = Registry()


# --- the world outside: what the tools change, and this file checks at its end ---------------------------------------


@dataclass
class World:
    charges: list[tuple[str, int]] = field(default_factory=list)
    """The bank's own book: reference and amount."""
    seats: dict[str, int] = field(default_factory=dict)
    harbour_calls: int = 0


world = World()
PRICES: Final = {"texel-0930": 1_250, "texel-1130": 1_400}


# --- the tools -------------------------------------------------------------------------------------------------------


@registry.tool(pure=True)
async def find_ferry(to: str, passengers: Annotated[int, Field(ge=1, le=20)]) -> dict[str, Any]:
    """The first ferry with room for all, and what it costs.

    Args:
        to: The island's name.
        passengers: How many.
    """
    ferry = f"{to.lower()}-0930"
    if ferry not in PRICES:
        raise ToolError(f"no ferry goes to {to}")
    return {"ferry": ferry, "cents": PRICES[ferry] * passengers}


@registry.tool(idempotent=True, retry=RetryPolicy(max_attempts=2, base_ms=20))
async def hold_seats(ferry: str, seats: int) -> str:
    """Holds seats: doing so again holds the same ones."""
    world.harbour_calls += 1
    if world.harbour_calls <= 3:
        raise TransientError("the harbour's computer restarts", retry_after_ms=30)
    world.seats[ferry] = seats
    return f"{ferry}/{seats}"


@registry.tool(timeout_ms=150)  # no promise: it must not be done twice
async def charge(account: str, cents: int) -> str:
    """Charges a card. The bank knows the payment by our key."""
    reference = context().idempotency_key
    world.charges.append((reference, cents))
    await asyncio.sleep(60)  # the money has moved, and the bank's answer is lost on its way
    return reference


@registry.tool(idempotent=True)
async def find_charge(reference: str) -> str | None:
    """Asks the bank's book for a payment: what `charge` would have answered, or null."""
    return next((booked for booked, _ in world.charges if booked == reference), None)


CHECKED_BY: Final = {"charge": "find_charge"}
"""Which tool can say whether another's effect happened."""


# --- the planner -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    id: str
    tool: str
    args: Mapping[str, Any]
    """A value `"$step.field"` is a field of an earlier step's result, `"$step"` the whole."""


class ScriptedPlanner:
    """Where a model would be: it reads the goal, and of a step that failed the same JSON that a model would read."""

    def plan(self, goal: str) -> list[Step]:
        passengers = goal.split()[0]  # "three": it will be told that a number is wanted
        return [
            Step("find", "find_ferry", {"to": "Texel", "passengers": passengers}),
            Step("hold", "hold_seats", {"ferry": "$find.ferry", "seats": 3}),
            Step("pay", "charge", {"account": "company", "cents": "$find.cents"}),
        ]

    def revise(self, rest: Sequence[Step], error: Mapping[str, Any]) -> list[Step]:
        """The steps from the failed one on, `rest[0]`, in place of those of the plan."""
        failed, *later = rest
        words = {"three": 3}
        args = dict(failed.args)
        for problem in error["details"].get("errors", ()):
            name = problem["pointer"].removeprefix("/")
            if problem["expected"] == "an integer":
                args[name] = words[args[name]]
        if args == failed.args:
            return []  # it knows no better
        return [Step(failed.id, failed.tool, args), *later]


# --- the loop --------------------------------------------------------------------------------------------------------


class AgentLoop:
    """Takes a plan's steps one after another. What it knows of failures is `loop_event`; timers, retries and keys are
    the dispatcher's."""

    def __init__(self, dispatcher: Dispatcher, planner: ScriptedPlanner, run_id: str, allowance: Allowance) -> None:
        self.dispatcher = dispatcher
        self.planner = planner
        self.run_id = run_id
        self.allowance = allowance
        self.results: dict[str, Any] = {}

    async def reach(self, goal: str) -> bool:
        plan = self.planner.plan(goal)
        say("goal", goal)
        say("plan", " -> ".join(step.tool for step in plan))
        while plan:
            error = await self._take(plan[0])
            if error is None:
                plan = plan[1:]
                continue
            event = loop_event(error)
            if event.event != "on_error":
                say(event.event, error.message)
                return False
            plan = self.planner.revise(plan, error.to_json())
            say("replan", " -> ".join(step.tool for step in plan) or "the planner knows no better")
            if not plan:
                return False
        return True

    async def _take(self, step: Step) -> DispatchError | None:
        """One step, until it is done or the planner must decide. Its calls all have one key: they are one effect."""
        args = {name: self._read(value) for name, value in step.args.items()}
        key = derive_key(f"{self.run_id}/{step.id}", step.tool, args)
        failures = 0
        while True:
            say("step", f"{step.id}: {step.tool}({', '.join(f'{name}={value!r}' for name, value in args.items())})")
            done = await self.dispatcher.dispatch(
                step.tool, args, key=key, allowance=self.allowance, owner=self.run_id, deadline_ms=5_000
            )
            if done.ok:
                stored = "  (stored under its key, not run)" if done.deduplicated else ""
                say("done", f"{done.value!r}{stored}")
                self.results[step.id] = done.value
                return None
            failures += 1
            event = loop_event(done)
            again = "  (stored under its key, not run again)" if done.deduplicated else ""
            say(done.kind, f"{done.message}; outcome {done.outcome}, attempts {done.attempts}{again}")
            if event.repeat is not Repeat.NO and not event.wants_replan(failures, FAILURES_MAX):
                await asyncio.sleep((event.retry_after_ms or 0) / 1_000)
                say("repeat", "the same call under the same key")
                continue
            if done.outcome is Outcome.UNKNOWN and await self._find_out(step.tool, key):
                failures = 0
                continue  # its key now answers with what was found, or is free again
            return done

    async def _find_out(self, tool: str, key: str) -> bool:
        """Nobody knows whether the effect happened, so look, and say so under its key. False: nobody can look."""
        checker = CHECKED_BY.get(tool)
        if checker is None:
            return False
        found = await self.dispatcher.dispatch(checker, {"reference": key}, allowance=self.allowance)
        if not found.ok:
            return False
        happened = found.value is not None
        say("look", f"{checker} says that it {'happened' if happened else 'did not happen'}")
        if happened:
            return await self.dispatcher.resolve("default", tool, key, found.value)
        return await self.dispatcher.resolve("default", tool, key, retry=True)

    def _read(self, value: Any) -> Any:
        if not isinstance(value, str) or not value.startswith("$"):
            return value
        step, _, name = value[1:].partition(".")
        return self.results[step][name] if name else self.results[step]


def say(what: str, text: str) -> None:
    print(f"{what:>9}  {text}")


def tell(event: DispatchEvent) -> None:
    """The dispatcher's own retries, which the loop does not see."""
    if event.name == "dispatch.retry":
        say("retry", f"{event.tool}: {event.message}; attempt {event.attempt} follows")


async def main() -> int:
    allowance = Allowance(calls=20, wall_ms=30_000)
    async with Dispatcher(registry) as dispatcher:
        dispatcher.subscribe(tell)
        reached = await AgentLoop(dispatcher, ScriptedPlanner(), "trip-42", allowance).reach(GOAL)
    say("spent", f"{allowance.taken} of {allowance.calls} tool calls")
    wrong = [
        what
        for what, right in {
            "the goal is reached": reached,
            "the card was charged once, with the price that was found": [cents for _, cents in world.charges]
            == [3_750],
            "the seats are held": world.seats == {"texel-0930": 3},
            "the harbour was asked until it answered": world.harbour_calls == 4,
            # find 1, hold 4, charge 1, find_charge 1; refused arguments and stored answers cost nothing
            "the allowance paid for what ran, and for nothing else": allowance.taken == 7,
        }.items()
        if not right
    ]
    say("checked", f"wrong: {'; '.join(wrong)}" if wrong else "all of it is as it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
