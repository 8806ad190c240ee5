"""Makes the ledger of a pipeline from the records of the caches and the plan."""

from __future__ import annotations

from easypipe.core.ledger import Ledger
from easypipe.core.protocols import ShardedSource
from easypipe.loader.rows.targets import count_targets, stream_start
from easypipe.plan.plan_stats import DatasetStats
from easypipe.stages.mix.mixture import Mixture, PlannedSource, planned_of
from easypipe.stages.tokenize.documents import is_documents

# targets in pieces that continue a conversation or completion from another row
WITHOUT_PROMPT = "without their prompt"


def ledger_of(name: str, source: ShardedSource) -> Ledger:
    """Returns every balance from the input to one epoch of `source`, which is called `name`.

    Raises:
        LedgerError: An entry does not balance.
    """
    ledger = Ledger()
    if is_documents(source):
        ledger.extend(source.materialize().ledger)
    elif (planned := planned_of(source)) is not None:
        for cache in planned.mixture.prepare():
            ledger.extend(cache.ledger)
        if not planned.mixture.endless:
            _plan_entries(ledger, name, planned)
    ledger.check()
    return ledger


def _plan_entries(ledger: Ledger, whole: str, planned: PlannedSource) -> None:
    """Adds the balances of a plan to the ledger.

    Documents of all passes → drawn → placed; tokens drawn and EOS added → placed → targets; slots →
    tokens and padding.
    """
    mixture, plan, packed = planned.mixture, planned.plan(), planned.packing is not None
    stage, stats, joined = "pack" if packed else "mix", plan.stats(), planned.joined
    first = (
        stream_start(plan) if joined else -1
    )  # the only dataset whose first token is not a target
    trained = None
    if mixture.has_loss_mask:  # the only number that does not follow from lengths
        hold = packed and planned.rows().hold
        trained = count_targets(plan, mixture.prepare(), stats.rows, joined=joined, hold=hold)
    for i, (name, part) in enumerate(stats.datasets.items()):
        passes = {"passes x documents": part.passes * part.num_docs}
        drawn = {"drawn": part.draws, "unreached": part.unreached}
        ledger.add("mix", name, "documents", into=passes, out=drawn)
        ledger.facts[f"mix.{name}.epochs"] = part.epochs
        part.enter(ledger, stage, name, _eos_added(mixture, i, part) if packed else 0)
        starts = int(i == first) if joined else part.segments * (2 if mixture.paired else 1)
        labels = part.tokens_placed - starts
        out = {"targets": labels}
        if trained is not None:
            targets, held = trained[:, i].tolist()
            out = {"targets": targets, "masked": labels - targets - held}
            out |= {WITHOUT_PROMPT: held} if held else {}
        placed = {"placed": part.tokens_placed}
        ledger.add("labels", name, "tokens", into=placed, out={**out, "segment starts": starts})
    if packed:
        slots = {"tokens": stats.slots - stats.padding, "padding": stats.padding}
        ledger.add("pack", whole, "slots", into={"slots": stats.slots}, out=slots)
        ledger.facts |= {f"pack.{whole}.rows": stats.rows, f"pack.{whole}.fill": stats.fill}


def _eos_added(mixture: Mixture, i: int, part: DatasetStats) -> int | None:
    """Returns how many EOS tokens the plan added to what was drawn.

    It is None if only a part was drawn of a dataset in which some documents already end with EOS.
    """
    lacking = mixture.without_eos()[i]
    if lacking in (0, part.num_docs):
        return part.draws if lacking else 0
    return part.passes * lacking if part.unreached == 0 else None
