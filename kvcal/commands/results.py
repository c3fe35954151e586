"""What commands return, as `--json` prints it: the fields of which tables are built."""

from __future__ import annotations

from typing import TYPE_CHECKING, NotRequired, TypedDict

if TYPE_CHECKING:
    from ..evaluate.attention_error import ErrorRow
    from ..evaluate.divergence import Bucket
    from ..evaluate.key_outliers import HeadOutlier


class TaskScores(TypedDict):
    """Scores of a task's n questions, compressed and in full precision; low, high: the interval of their difference,
    None where there is none (`evaluate.paired.interval_of`). mcnemar: a p-value, None where scores are not right or
    wrong or a context has several questions. differing: questions of which the scores differ. packed: the share of
    tokens in packed blocks when answers were there; files of before have none.
    """

    score: float
    full: float
    difference: float
    low: float | None
    high: float | None
    n: int
    mcnemar: float | None
    differing: int
    packed: NotRequired[float | None]


class EvaluationRow(TypedDict, total=False):
    """A cache of `kvcal eval` or `kvcal compare`. kl: nats per token, likewise its standard error over windows and the
    list by window. tasks: by name. sink, recent: exact tokens; block: tokens packed at a time.
    """

    name: str
    perplexity: float
    kl: float
    kl_se: float | None
    kl_windows: list[float]
    bits_per_value: float | None
    paper_bits: float | None
    same_top: float
    bytes_at_16_bit: int
    smaller: float
    positions: list[Bucket]
    tasks: dict[str, TaskScores]
    sink: int
    recent: int
    block: int
    front: bool
    bytes_at_length: int
    bytes_at_length_16_bit: int


class DemoRow(TypedDict):
    """A cache of `kvcal demo`. same: how many of `of` next tokens are those of full precision; kl: nats per token."""

    name: str
    nbytes: int
    bits_per_value: float | None
    kl: float
    same: int
    of: int


class Demo(TypedDict):
    """What `kvcal demo` returns. generated: what `kvcal generate --json` printed; sample: its text."""

    model: str
    rows_of_text: int
    length: int
    rows: list[DemoRow]
    bundle: str
    sha256: object
    sample: str
    generated: dict[str, object]
    next: str
    seconds: float


class RecommendedRow(TypedDict):
    """A scheme of the ladder. kl: through the cache, in nats per token, None where it was not measured."""

    scheme: str
    bits_per_value: float
    times_smaller: float
    forecast_kl: float
    kl: float | None
    kl_se: float | None
    learned: bool
    naive: bool
    kernel: bool
    resident_bytes: int
    command: str


_Omitted = TypedDict("_Omitted", {"left_out": dict[str, str]})  # noqa: UP013  (a key of --json, not a name)


class Recommendation(_Omitted):
    """What `kvcal recommend` returns. left_out: why, by scheme; attention_errors: by scheme, a row per layer."""

    bundle: str
    sha256: str
    bytes: int
    model: str
    chosen: str
    runner_up: str | None
    instead_of: str | None
    reason: str
    max_bits: float | None
    max_kl: float | None
    rows: list[RecommendedRow]
    outliers: list[HeadOutlier]
    attention_errors: dict[str, list[ErrorRow] | None]
    text: str
    train_windows: int
    holdout_windows: int
    length: int
    device: str
    dtype: str
    next: str
    seconds: float
