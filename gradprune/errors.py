"""What gradprune raises and warns. Every message says what is wrong, where, and what to do next."""


class PruneError(ValueError):
    """Any refusal of an input by gradprune; a ``ValueError`` for the caller."""


class PlanError(PruneError):
    """A plan, or the metadata that it is made from, is malformed or does not fit the data at hand."""


class StalePlanError(PlanError):
    """A microbatch was planned dead, but the tensors that the loss received are not zero."""


class TraceError(PruneError):
    """A callable could not be traced to a joint graph; `where` is the source line that stopped it, if known.

    kind: ``branch`` where the program takes too many paths that depend on data, else ``untraceable``.
    """

    def __init__(self, message: str, where: object | None = None, kind: str = "untraceable") -> None:
        super().__init__(message)
        self.where, self.kind = where, kind


class ViolationError(PruneError):
    """The dead path saw a gradient where zero was proved: a side condition failed, or a proof or an audit is wrong."""


class NoEffectWarning(UserWarning):
    """A compiled step can never prune; the message carries the first reason."""
