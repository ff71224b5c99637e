"""What a user can get wrong. Each error says what and where, the sizes, and what to do."""


class AutoparError(ValueError):
    """Anything that autopar refuses to do because of what it was given."""


class TraceError(AutoparError):
    """The model cannot be captured as one graph."""


class PlanError(AutoparError):
    """No plan meets the request: a layout, a mesh or a memory limit does not fit the model."""


class LayoutError(AutoparError):
    """A layout or a mesh is malformed, or two of its parts contradict each other."""


class WorldError(AutoparError):
    """The description of the hardware is malformed, or does not match what is running."""


class InputError(AutoparError):
    """A batch does not match the one that the model was planned for."""


class VerificationError(AutoparError):
    """The distributed program does not compute what the original model computes."""


class RankError(AutoparError):
    """The ranks disagree about something on which all must agree."""
