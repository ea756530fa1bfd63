"""What a call did, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


@dataclass
class RowStats:
    """One row. ``emitted == accepted + rounds - trimmed`` always."""

    rounds: int = 0  # forwards of the target this row took part in
    drafted: int = 0
    accepted: int = 0  # drafted tokens the verifier kept, trimmed ones included
    emitted: int = 0  # tokens in the output
    trimmed: int = 0  # verified, but behind an end of sequence or a stop

    @property
    def acceptance_rate(self) -> float:
        return _ratio(self.accepted, self.drafted)


@dataclass
class Stats:
    """Counts of a call; sums over rows unless said otherwise.

    ``seconds`` holds "draft", "target", "verify", "rest" and "total" of the decoding loop, host
    wall-clock: on a GPU, work is waited for where its result is read, in "verify".
    """

    rows: list[RowStats] = field(default_factory=list)
    target_forwards: int = 0  # of the whole batch, prefill chunks included
    draft_forwards: int = 0
    # tokens per row of each forward, padding included; of a packed forward, tokens of all rows
    target_widths: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)  # index 0: first of a block
    accepted_per_position: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("draft", "target", "verify", "rest", "total"), 0.0)
    )
    method: str = ""  # the rule that verified
    forward_seconds: float = 0.0  # inside the target's and the drafter's forwards

    @property
    def rounds(self) -> int:
        """Row-rounds: how often a row was verified."""
        return sum(row.rounds for row in self.rows)

    @property
    def drafted(self) -> int:
        return sum(row.drafted for row in self.rows)

    @property
    def accepted(self) -> int:
        return sum(row.accepted for row in self.rows)

    @property
    def emitted(self) -> int:
        return sum(row.emitted for row in self.rows)

    @property
    def trimmed(self) -> int:
        return sum(row.trimmed for row in self.rows)

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token."""
        return _ratio(self.accepted, self.drafted)

    @property
    def mean_accepted(self) -> float:
        """Accepted drafts per row-round: the bonus or corrected token not counted."""
        return _ratio(self.accepted, self.rounds)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens emitted per row-round: the bonus or corrected token counted."""
        return _ratio(self.emitted, self.rounds)

    @property
    def outside_share(self) -> float:
        """Share of the time spent outside the models' forwards."""
        return _ratio(self.seconds["total"] - self.forward_seconds, self.seconds["total"])

    def count_round(self, drafted: int, accepted: int) -> None:
        for counts, n in (
            (self.drafted_per_position, drafted),
            (self.accepted_per_position, accepted),
        ):
            counts.extend([0] * (drafted - len(counts)))
            for i in range(n):
                counts[i] += 1

    def to_dict(self) -> dict:
        """Everything, JSON-ready."""
        derived = (
            "rounds",
            "drafted",
            "accepted",
            "emitted",
            "trimmed",
            "acceptance_rate",
            "mean_accepted",
            "tokens_per_forward",
            "outside_share",
        )
        return {**{name: getattr(self, name) for name in derived}, **asdict(self)}
