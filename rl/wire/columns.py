"""The table of columns: what stands beside the token ids of a sequence, each declared once.

A column has one entry per token, turn, sequence or sample. Conversation, trajectory, batch part, pack and file carry
what the table says and name no column themselves. To add one, declare it in a module of your own, say `my_columns.py`,

    TEACHER_LOGP = Column("teacher_logp", "float32", masked=0.0, producer="generator")

and name it in the recipe: `algo.columns: [my_columns:TEACHER_LOGP]`. The run file tells every process of the run, which
puts the column into its table at start. Broker and environment servers do so too, hence no torch in that module. Then

* a generator's engine answers it in `Sampled.columns["teacher_logp"]`, one entry per sampled token; with
  `covers="context"` also in `Sampled.context["teacher_logp"]`, one entry per token of the prompt that it is asked for;
* an environment answers one entry in `Step.columns[name]` with every step;
* the teacher of a distillation fills the one that is declared here, `TEACHER_LOGP`, when an episode has ended;
* the learner computes one with `pack.with_columns(name=values)` or `rl.learner.update.with_logp`;
* a loss reads `inputs.columns["teacher_logp"]`, (T, ...): what has one entry per turn, sequence or sample stands there
  at each of its tokens. The model's forward reads `pack.columns["teacher_logp"]` if the column says `reads="forward"`.

A column that is not in the table is refused wherever it turns up, and so is a reply or a step that lacks one.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeGuard, TypeVar, get_args

import numpy as np

from rl.config.plugins import load
from rl.config.schema import ConfigError

T = TypeVar("T")
Producer = Literal["generator", "environment", "conversation", "teacher", "learner"]
Scope = Literal["token", "turn", "sequence", "sample"]
Covers = Literal["sampled", "context"]
Reads = Literal["loss", "forward"]

ONE_TURN: dict[Scope, int] = {"turn": 1, "sequence": 1, "sample": 1}
"""Entries that one reply of a generator, or one step of an environment, has of each scope beyond its tokens."""

WIRE_DTYPES = {name: np.dtype(name) for name in ("<i4", "<i8", "<f4", "|u1", "<u2")}
"""int32, int64, float32, uint8 and uint16, by the name that stands in a message."""


@dataclass(frozen=True)
class Column:
    """The declaration of one column. Raises ValueError for what no trajectory could carry.

    * `producer`: a `learner` column is added to packs and never crosses a socket.
    * `scope` is what has one entry of `shape`.
    * `masked` is the entry of a token that nobody has filled (`token_ids` apart: the prompt's ids stand there).
    * `covers`: a `sampled` column has entries for generated tokens. A `context` column of the generators has them for
      prompts and observations as well, each filled by the engine that read the token.
    * `reads` is what uses it at the learner.
    * `shape` is that of one entry. A name stands for the field of the model's config.json that holds the number.
    """

    name: str
    dtype: str
    masked: float = 0
    producer: Producer = "generator"
    scope: Scope = "token"
    shape: tuple[int | str, ...] = ()
    covers: Covers = "sampled"
    reads: Reads = "loss"

    def __post_init__(self) -> None:
        if wrong := next(self._faults(), ""):
            raise ValueError(f"column {self.name!r}: {wrong}")

    def _faults(self) -> Iterator[str]:
        if not self.name.isidentifier():
            yield "the name must be an identifier"
        for field, known in _CHOICES.items():
            if (value := getattr(self, field)) not in known:
                yield f"unknown {field} {value!r}; one of {', '.join(known)}"
        for size in self.shape:
            if not (isinstance(size, str) or _is_size(size)):
                yield f"shape holds {size!r}; give sizes, or fields of the model's config"

        if self.covers == "context" and (self.producer, self.scope) != ("generator", "token"):
            made = f"it is made by the {self.producer} for each {self.scope}"
            yield f"covers='context' is for tokens that a generator reads; {made}"
        if self.producer == "environment" and self.scope == "token":
            yield "an environment answers with text and knows no tokens; give it the scope turn, sequence or sample"
        if self.producer == "learner" and self.scope != "token":
            yield "what the learner adds to a pack has an entry per token"

        if np.dtype(self.dtype) not in WIRE_DTYPES.values():
            yield f"dtype {self.dtype} is none of {', '.join(map(str, WIRE_DTYPES.values()))}"

    @property
    def entry_shape(self) -> tuple[int, ...]:
        """The shape of one entry, in numbers. Raises ValueError where the model, which has them, is not known here."""
        sizes = tuple(size for size in self.shape if not isinstance(size, str))
        if len(sizes) < len(self.shape):
            raise ValueError(f"column {self.name!r}: its shape {self.shape} comes from a model, and none is known here")
        return sizes

    def of_model(self, config: Mapping[str, Any]) -> Column:
        """The column with the numbers of this model. Raises ValueError for a field that is missing or holds no size."""
        sizes: list[int] = []
        for named in self.shape:
            size = config.get(named) if isinstance(named, str) else named
            if not _is_size(size):
                has = f"has no {named!r}" if named not in config else f"has {named}={size!r}"
                raise ValueError(f"column {self.name!r}: shape names {named!r}, but the model's config.json {has}")
            sizes.append(size)
        return replace(self, shape=tuple(sizes))

    def full(self, entries: int) -> np.ndarray:
        """(entries, ...) of the masked value."""
        return np.full((entries, *self.entry_shape), self.masked, self.dtype)


_CHOICES = {
    "producer": get_args(Producer),
    "scope": get_args(Scope),
    "covers": get_args(Covers),
    "reads": get_args(Reads),
}


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_WELL_KNOWN = [
    Column("token_ids", "int32"),
    Column("loss_mask", "uint8", producer="conversation"),  # 1 on generated ids only
    Column("logp_behavior", "float32"),  # of the distribution sampled from (temperature applied)
    Column("policy_version", "int32", masked=-1),  # of the weights that sampled the token
    Column("staleness", "int64", producer="learner"),  # version being trained minus the token's version
    Column("advantages", "float32", producer="learner"),
    Column("token_weights", "float32", producer="learner"),  # of the token's loss in the sum over the minibatch
    Column("logp_proximal", "float32", producer="learner"),  # of the policy before the batch's first step
    Column("logp_reference", "float32", producer="learner"),  # of the frozen reference
    Column("values", "float32", producer="learner"),  # of the critic before the batch
    Column("returns", "float32", producer="learner"),  # what the critic regresses to
]
COLUMNS = {column.name: column for column in _WELL_KNOWN}
"""The table: every declared column by its name."""
BUILT_IN = frozenset(COLUMNS)
TEACHER_LOGP = Column("teacher_logp", "float32", producer="teacher")
"""Of the tokens that the student sampled, under the model that `algo.teacher` names."""
ROUTED_EXPERTS = "routed_experts"
"""Which experts of each layer the engine's routers chose, at the position that predicted the token."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of a `config.json`, of which a mixture of experts has one."""


def register(column: Column) -> None:
    """Add a column to the table; again, if it is declared alike. Raises ValueError if the name means another one."""
    known = COLUMNS.setdefault(column.name, column)
    if _fits(known, column):
        COLUMNS[column.name] = column
    elif not _fits(column, known):
        raise ValueError(f"column {column.name!r} is registered twice: as {known} and as {column}")


def _fits(column: Column, other: Column) -> bool:
    """Whether they are declared alike, and the other one's shape has numbers where this one's has names."""
    shape = tuple(
        number if isinstance(size, str) else size for size, number in zip(column.shape, other.shape, strict=False)
    )
    return len(column.shape) == len(other.shape) and replace(column, shape=shape) == other


def register_configured(names: Iterable[str]) -> None:
    """Add the columns that `algo.columns` names, each as `package.module:NAME`. Raises ConfigError."""
    for name in names:
        column = load("algo.columns", name, {})
        if not isinstance(column, Column):
            raise ConfigError(f"algo.columns={name!r} is a {type(column).__name__}, not a rl.wire.columns.Column")
        try:
            register(column)
        except ValueError as error:
            raise ConfigError(f"algo.columns={name!r}: {error}") from None


def routed_experts(told: Mapping[str, Any]) -> Column | None:
    """The column of router replay for the model whose `config.json` this is; None for a dense one."""
    count = next((told[name] for name in EXPERT_COUNTS if told.get(name)), 0)
    if not count:
        return None
    dtype, masked = ("uint8", 255) if count <= 255 else ("uint16", 65535)
    shape = ("num_hidden_layers", "num_experts_per_tok")
    return Column(ROUTED_EXPERTS, dtype, masked, shape=shape, covers="context", reads="forward").of_model(told)


def shape_by_model(folder: Path | None, *, replay: bool = False) -> None:
    """Give every column of the table whose shape names fields of the model's config its numbers. Raises ConfigError.

    replay: whether a mixture of experts gets the column of its routers.
    """
    if replay and folder is not None and (column := routed_experts(_text_config(folder))):
        register(column)
    for column in [each for each in COLUMNS.values() if any(isinstance(size, str) for size in each.shape)]:
        if folder is None:
            raise ConfigError(
                f"algo.columns: column {column.name!r} takes its shape {column.shape} from the model, and this run has "
                "none; declare it in numbers, or name a model in model.path"
            )
        try:
            register(column.of_model(_text_config(folder)))
        except ValueError as error:
            raise ConfigError(f"algo.columns: {error} in {str(folder)!r}") from None


def _text_config(folder: Path) -> Mapping[str, Any]:
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    told: Mapping[str, Any] = config.get("text_config", config)
    return told


def declared(name: str) -> Column:
    """The column of this name. Raises ValueError for one that is not in the table."""
    if name not in COLUMNS:
        raise ValueError(f"column {name!r} is not registered: {_HOW_TO_REGISTER}")
    return COLUMNS[name]


def carried(scopes: Container[Scope] = get_args(Scope), producer: Producer | None = None) -> list[Column]:
    """The columns of trajectories and batch parts: all but the learner's; of one producer, if one is named."""
    return [
        column
        for column in COLUMNS.values()
        if column.producer != "learner" and column.scope in scopes and producer in (None, column.producer)
    ]


def forward_columns() -> list[Column]:
    """Columns that the model's forward reads beside the token ids: a prefix is shared only where they are equal."""
    return [column for column in COLUMNS.values() if column.reads == "forward"]


def context_columns() -> list[Column]:
    """Columns that have entries for prompts and observations as well."""
    return [column for column in COLUMNS.values() if column.covers == "context"]


def mismatch(columns: Mapping[str, np.ndarray], entries: Mapping[Scope, int], producer: Producer | None = None) -> str:
    """What is wrong with names, dtypes or shapes, in one line, or the empty string.

    entries: how many there are of each scope that `columns` should hold, all of them by the table.
    """
    return _mismatch(columns, {column: entries[column.scope] for column in carried(entries, producer)})


def context_mismatch(context: Mapping[str, np.ndarray], entries: int) -> str:
    """What is wrong with the context columns of so many tokens that a generator has read."""
    wrong = _mismatch(context, dict.fromkeys(context_columns(), entries))
    return wrong and f"of what it has read: {wrong}"


def _mismatch(columns: Mapping[str, np.ndarray], expected: Mapping[Column, int]) -> str:
    for column, entries in expected.items():
        array = columns.get(column.name)
        if array is None:
            return f"column {column.name!r} is missing: it is registered as made by the {column.producer}"
        shape = (entries, *column.entry_shape)
        if array.shape != shape or array.dtype != column.dtype:
            return f"{column.name} is {array.dtype}{array.shape}, expected {column.dtype}{shape}"
    if len(columns) > len(expected):
        strange = sorted(columns.keys() - {column.name for column in expected})
        return f"column {strange[0]!r} is not registered for this place: {_HOW_TO_REGISTER}"
    return ""


class Accessor(Generic[T]):
    """`token_ids = Accessor[Array]()` in a class with a mapping `columns`: short for `self.columns["token_ids"]`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: Any, owner: type) -> T:
        value: T = holder.columns[self._name]
        return value


class OptionalAccessor(Accessor[T | None]):
    """An `Accessor` that gives None where there is no such column."""

    def __get__(self, holder: Any, owner: type) -> T | None:
        value: T | None = holder.columns.get(self._name)
        return value


def masked_columns(entries: Mapping[Scope, int], producer: Producer | None = None) -> dict[str, np.ndarray]:
    """The carried columns of these scopes, by one producer if one is named, with nothing but masked values."""
    return {column.name: column.full(entries[column.scope]) for column in carried(entries, producer)}


def masked_context(entries: int) -> dict[str, np.ndarray]:
    """The context columns with nothing but masked values."""
    return {column.name: column.full(entries) for column in context_columns()}


_HOW_TO_REGISTER = "list its declaration under algo.columns (rl/wire/columns.py)"
