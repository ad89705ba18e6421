"""What must become eager, and why? One answer per step and rank; all ranks act on the same merged one."""

from collections.abc import Sequence
from dataclasses import dataclass

from ctj_trainer.compile.causes import Event, EventKind, FaultClass, diagnose
from ctj_trainer.compile.in_place import CompiledRegions
from ctj_trainer.compile.storm import Storm, StormRule


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """`regions` are to run eager from now on; none named: all of them."""

    fault: FaultClass
    reason: str
    regions: tuple[str, ...] = ()


def about_events(
    events: Sequence[Event], regions: CompiledRegions, storms: StormRule, *, step: int, is_warming: bool
) -> Complaint | None:
    """Complain about what the compiler did in one step: failures first, then functions that recompile without end."""
    storm = storms.judge(step, events, is_warming=is_warming, instances=regions.instances)
    return about_failures(events, regions) or (about_storm(storm, regions) if storm else None)


def about_failures(events: Sequence[Event], regions: CompiledRegions) -> Complaint | None:
    """Complain about functions that could not be compiled, or have used up their recompile limit."""
    failed = [event for event in events if event.kind is EventKind.FAILURE]
    limited = [event for event in events if event.kind is EventKind.LIMIT]
    if not failed and not limited:
        return None
    first = (failed or limited)[0]
    diagnosis = diagnose(first)
    reason = f"{'backend_failed' if failed else 'recompile_limit'}: {diagnosis}"
    users = regions.instances(first.place)
    if first.kind is EventKind.LIMIT and diagnosis.fault is FaultClass.INT_ATTRIBUTE and users > 1:
        reason += f"; if it is a constant of each of the {users} regions: spec.compile.recompileLimit {users}"
    return Complaint(
        fault=diagnosis.fault,
        reason=reason,
        regions=regions.owners(event.place for event in (*failed, *limited)),
    )


def about_storm(storm: Storm, regions: CompiledRegions) -> Complaint:
    """Complain about a function that recompiles without end."""
    return Complaint(fault=storm.diagnosis.fault, reason=str(storm), regions=regions.owners([storm.place]))


def merged(complaints: Sequence[Complaint | None]) -> Complaint | None:
    """One complaint for all ranks: the first cause, and every region that any rank names."""
    made = [(rank, complaint) for rank, complaint in enumerate(complaints) if complaint is not None]
    if not made:
        return None
    rank, first = made[0]
    everything = any(not complaint.regions for _, complaint in made)
    named = sorted({name for _, complaint in made for name in complaint.regions})
    where = f" (rank {rank})" if len(made) < len(complaints) else ""
    return Complaint(fault=first.fault, reason=first.reason + where, regions=() if everything else tuple(named))
