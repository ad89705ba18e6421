"""Did this exception come out of compiled code, and out of which region?"""

import traceback

from ctj_trainer.compile.causes import Event, EventKind, Place, diagnose
from ctj_trainer.compile.complaint import Complaint
from ctj_trainer.compile.in_place import CompiledRegions

_COMPILER_FOLDERS = ("/torch/_dynamo/", "/torch/_inductor/", "/torch/_functorch/")


def blamed(error: Exception, regions: CompiledRegions) -> Complaint | None:
    """Return the complaint about the compiled code that raised `error`; None if none did."""
    frames = traceback.extract_tb(error.__traceback__)
    if not any(part in frame.filename for frame in frames for part in _COMPILER_FOLDERS):
        return None
    places = [Place(file=frame.filename, line=frame.lineno or 0, function=frame.name) for frame in frames]
    own = [place for place in places if "/torch/" not in place.file]
    event = Event(kind=EventKind.RAISED, text=str(error), error=type(error).__name__, place=own[-1] if own else None)
    diagnosis = diagnose(event)
    return Complaint(
        fault=diagnosis.fault, reason=f"compiled code raised {diagnosis}", regions=_innermost(own, regions)
    )


def _innermost(places: list[Place], regions: CompiledRegions) -> tuple[str, ...]:
    """The regions of the innermost function that some but not all of them have; nothing if there is none."""
    for place in reversed(places):
        owners = regions.owners([place])
        if owners != regions.compiled:
            return owners
    return ()
