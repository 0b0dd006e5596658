//! Ocean Vista's messages and records. What servers say to each other about who takes part, and what
//! the directory logs, is in [`control`].

mod control;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use orthodrome_core::txn::{Read, Version};
use orthodrome_core::{ClientId, Key, PartitionId, Timestamp, TxnId, Value};
use orthodrome_protocols::ocean_vista::{
    Ask, Body, Change, Fate, Functor, Holding, Image, Knowledge, Msg, Name, OceanVista, Output,
    Path, Phase, Reason, Record, Refusal, Rest, Seen, Shown, State, View, What, takeover,
};
use prost::Message as _;

use super::common::{
    acknowledged_from_wire, acknowledged_to_wire, decided_from_wire, key_set_from_wire,
    key_versions_from_wire, key_versions_to_wire, keys_from_wire, keys_to_wire, need, op_from_wire,
    op_to_wire, outcome_from_wire, outcome_to_wire, reads_from_wire, reads_to_wire,
    reason_from_wire as abort_from_wire, reason_to_wire as abort_to_wire, txn_id_from_wire,
    txn_id_to_wire, version_from_wire, version_to_wire, versions_from_wire, versions_to_wire,
    writes_from_wire, writes_to_wire,
};
use super::{WireError, WireProtocol, internal, ocean_vista_schema as wire};

/// Entries with names of their own.
pub(super) fn keyed<K: Ord, V>(
    entries: impl Iterator<Item = Result<(K, V), WireError>>,
    field: &'static str,
) -> Result<BTreeMap<K, V>, WireError> {
    let mut all = BTreeMap::new();
    for entry in entries {
        let (key, value) = entry?;
        if all.insert(key, value).is_some() {
            let (found, wanted) = ("one entry twice".into(), "each entry once");
            return Err(WireError::Value { field, found, wanted });
        }
    }
    Ok(all)
}

/// A case that this version does not know.
fn unknown(field: &'static str, found: i32) -> WireError {
    WireError::Value { field, found: found.to_string(), wanted: "a case that this version knows" }
}

fn txn_from_wire(txn: Option<internal::TxnId>) -> Result<TxnId, WireError> {
    Ok(txn_id_from_wire(&need(txn, "txn")?))
}

// Transactions.

pub(super) fn functor_to_wire(functor: &Functor) -> wire::Functor {
    let Functor { txn, reads, writes, body, acknowledged_below } = functor;
    let body = match body {
        Body::Ops(ops) => wire::functor::Body::Ops(wire::functor::Ops {
            ops: ops.iter().map(op_to_wire).collect(),
        }),
        Body::Validate { expected, writes } => {
            wire::functor::Body::Validate(wire::functor::Validate {
                expected: versions_to_wire(expected),
                writes: writes_to_wire(writes),
            })
        }
    };
    wire::Functor {
        txn: Some(txn_id_to_wire(txn)),
        reads: keys_to_wire(reads),
        writes: keys_to_wire(writes),
        body: Some(body),
        acknowledged_below: *acknowledged_below,
    }
}

pub(super) fn functor_from_wire(functor: Option<wire::Functor>) -> Result<Arc<Functor>, WireError> {
    let functor = need(functor, "functor")?;
    let body = match need(functor.body, "Functor.body")? {
        wire::functor::Body::Ops(wire::functor::Ops { ops }) => {
            Body::Ops(ops.into_iter().map(op_from_wire).collect::<Result<_, _>>()?)
        }
        wire::functor::Body::Validate(wire::functor::Validate { expected, writes }) => {
            let (expected, writes) = (versions_from_wire(expected)?, writes_from_wire(writes)?);
            Body::Validate { expected, writes }
        }
    };
    Ok(Arc::new(Functor {
        txn: txn_from_wire(functor.txn)?,
        reads: key_set_from_wire(functor.reads, "Functor.reads")?,
        writes: key_set_from_wire(functor.writes, "Functor.writes")?,
        body,
        acknowledged_below: functor.acknowledged_below,
    }))
}

fn output_to_wire(output: &Output) -> wire::Output {
    let output = match output {
        Ok(writes) => {
            wire::output::Output::Writes(wire::output::Writes { writes: writes_to_wire(writes) })
        }
        Err(reason) => wire::output::Output::Aborted(abort_to_wire(*reason)),
    };
    wire::Output { output: Some(output) }
}

fn output_from_wire(output: Option<wire::Output>) -> Result<Arc<Output>, WireError> {
    let output = need(output.and_then(|output| output.output), "output")?;
    Ok(Arc::new(match output {
        wire::output::Output::Writes(wire::output::Writes { writes }) => {
            Ok(writes_from_wire(writes)?)
        }
        wire::output::Output::Aborted(reason) => Err(abort_from_wire(reason)?),
    }))
}

fn path_to_wire(path: Path) -> i32 {
    let path = match path {
        Path::Fast => wire::Path::Fast,
        Path::Slow => wire::Path::Slow,
        Path::WriteOnly => wire::Path::WriteOnly,
        Path::ReadOnly => wire::Path::ReadOnly,
        Path::Recovered => wire::Path::Recovered,
    };
    path as i32
}

fn path_from_wire(path: i32) -> Result<Path, WireError> {
    Ok(match wire::Path::try_from(path) {
        Ok(wire::Path::Fast) => Path::Fast,
        Ok(wire::Path::Slow) => Path::Slow,
        Ok(wire::Path::WriteOnly) => Path::WriteOnly,
        Ok(wire::Path::ReadOnly) => Path::ReadOnly,
        Ok(wire::Path::Recovered) => Path::Recovered,
        Ok(wire::Path::Unspecified) | Err(_) => return Err(unknown("Path", path)),
    })
}

fn reason_to_wire(reason: Reason) -> i32 {
    let reason = match reason {
        Reason::Inactive => wire::Reason::Inactive,
        Reason::Busy => wire::Reason::Busy,
        Reason::Collected => wire::Reason::Collected,
        Reason::TooLarge => wire::Reason::TooLarge,
    };
    reason as i32
}

fn reason_from_wire(reason: i32) -> Result<Reason, WireError> {
    Ok(match wire::Reason::try_from(reason) {
        Ok(wire::Reason::Inactive) => Reason::Inactive,
        Ok(wire::Reason::Busy) => Reason::Busy,
        Ok(wire::Reason::Collected) => Reason::Collected,
        Ok(wire::Reason::TooLarge) => Reason::TooLarge,
        Ok(wire::Reason::Unspecified) | Err(_) => return Err(unknown("Reason", reason)),
    })
}

fn refusal_to_wire(refusal: Refusal) -> i32 {
    let refusal = match refusal {
        Refusal::Ahead => wire::Refusal::Ahead,
        Refusal::Known => wire::Refusal::Known,
        Refusal::Below => wire::Refusal::Below,
        Refusal::Outvoted => wire::Refusal::Outvoted,
        Refusal::Final => wire::Refusal::Final,
    };
    refusal as i32
}

fn refusal_from_wire(refusal: i32) -> Result<Refusal, WireError> {
    Ok(match wire::Refusal::try_from(refusal) {
        Ok(wire::Refusal::Ahead) => Refusal::Ahead,
        Ok(wire::Refusal::Known) => Refusal::Known,
        Ok(wire::Refusal::Below) => Refusal::Below,
        Ok(wire::Refusal::Outvoted) => Refusal::Outvoted,
        Ok(wire::Refusal::Final) => Refusal::Final,
        Ok(wire::Refusal::Unspecified) | Err(_) => return Err(unknown("Refusal", refusal)),
    })
}

// What replicas hold.

fn phase_to_wire(phase: Phase) -> i32 {
    let phase = match phase {
        Phase::Tentative => wire::Phase::Tentative,
        Phase::Finalized => wire::Phase::Finalized,
        Phase::Aborted => wire::Phase::Aborted,
    };
    phase as i32
}

fn phase_from_wire(phase: i32) -> Result<Phase, WireError> {
    Ok(match wire::Phase::try_from(phase) {
        Ok(wire::Phase::Tentative) => Phase::Tentative,
        Ok(wire::Phase::Finalized) => Phase::Finalized,
        Ok(wire::Phase::Aborted) => Phase::Aborted,
        Ok(wire::Phase::Unspecified) | Err(_) => return Err(unknown("Phase", phase)),
    })
}

fn pending_to_wire((ts, image): (&Timestamp, &Image)) -> wire::Pending {
    let Image { functor, incarnation, ballot, phase, output } = image;
    let image = wire::Image {
        functor: Some(functor_to_wire(functor)),
        incarnation: *incarnation,
        ballot: *ballot,
        phase: phase_to_wire(*phase),
        output: output.as_ref().map(|output| output_to_wire(output)),
    };
    wire::Pending { ts: ts.0, image: Some(image) }
}

fn pending_from_wire(pending: wire::Pending) -> Result<(Timestamp, Image), WireError> {
    let image = need(pending.image, "Pending.image")?;
    let image = Image {
        functor: functor_from_wire(image.functor)?,
        incarnation: image.incarnation,
        ballot: image.ballot,
        phase: phase_from_wire(image.phase)?,
        output: image.output.map(|output| output_from_wire(Some(output))).transpose()?,
    };
    Ok((Timestamp(pending.ts), image))
}

/// What a name stands for, with the name.
type Named = ((ClientId, u64), Name);

fn name_to_wire((name, stands): (&(ClientId, u64), &Name)) -> wire::Name {
    let Name { attempt, ts, fate } = stands;
    let fate = match fate {
        Fate::Refused { is_final } => {
            wire::name::Fate::Refused(wire::name::Refused { is_final: *is_final })
        }
        Fate::At => wire::name::Fate::At(wire::name::At {}),
        Fate::Ended(outcome) => wire::name::Fate::Ended(outcome_to_wire(*outcome)),
    };
    let (client, counter) = (name.0.0, name.1);
    wire::Name { client, counter, attempt: *attempt, ts: ts.0, fate: Some(fate) }
}

fn name_from_wire(name: wire::Name) -> Result<Named, WireError> {
    let fate = match need(name.fate, "Name.fate")? {
        wire::name::Fate::Refused(refused) => Fate::Refused { is_final: refused.is_final },
        wire::name::Fate::At(_) => Fate::At,
        wire::name::Fate::Ended(outcome) => Fate::Ended(decided_from_wire(Some(outcome))?),
    };
    let stands = Name { attempt: name.attempt, ts: Timestamp(name.ts), fate };
    Ok(((ClientId(name.client), name.counter), stands))
}

fn names_to_wire(names: &[Named]) -> Vec<wire::Name> {
    names.iter().map(|(name, stands)| name_to_wire((name, stands))).collect()
}

fn names_from_wire(names: Vec<wire::Name>) -> Result<Vec<Named>, WireError> {
    names.into_iter().map(name_from_wire).collect()
}

fn rest_to_wire(rest: Rest) -> wire::Rest {
    wire::Rest { as_of: rest.as_of.0, skip: rest.skip }
}

fn rest_from_wire(rest: wire::Rest) -> Rest {
    Rest { as_of: Timestamp(rest.as_of), skip: rest.skip }
}

fn knowledge_to_wire(knowledge: &Knowledge) -> wire::Knowledge {
    use wire::knowledge as k;
    let knowledge = match knowledge {
        Knowledge::Refused { is_final } => {
            k::Knowledge::Refused(k::Refused { is_final: *is_final, is_forgotten: false })
        }
        // To whoever does not know better it is a refusal.
        Knowledge::Forgotten => {
            k::Knowledge::Refused(k::Refused { is_final: false, is_forgotten: true })
        }
        Knowledge::Stored(held) => {
            let held = held.iter().map(|holding| k::Holding {
                ts: holding.ts.0,
                ballot: holding.ballot,
                is_aborted: holding.is_aborted,
                functor: Some(functor_to_wire(&holding.functor)),
            });
            k::Knowledge::Stored(k::Stored { held: held.collect() })
        }
        Knowledge::Ended(outcome) => k::Knowledge::Ended(outcome_to_wire(*outcome)),
    };
    wire::Knowledge { knowledge: Some(knowledge) }
}

fn knowledge_from_wire(knowledge: Option<wire::Knowledge>) -> Result<Knowledge, WireError> {
    use wire::knowledge as k;
    Ok(match need(knowledge.and_then(|knowledge| knowledge.knowledge), "knowledge")? {
        k::Knowledge::Refused(refused) if refused.is_forgotten => Knowledge::Forgotten,
        k::Knowledge::Refused(refused) => Knowledge::Refused { is_final: refused.is_final },
        k::Knowledge::Stored(stored) => {
            let holding = |holding: k::Holding| {
                Ok::<_, WireError>(Holding {
                    ts: Timestamp(holding.ts),
                    ballot: holding.ballot,
                    is_aborted: holding.is_aborted,
                    functor: functor_from_wire(holding.functor)?,
                })
            };
            if stored.held.is_empty() {
                let (field, found) = ("Stored.held", "nothing".into());
                return Err(WireError::Value { field, found, wanted: "what is stored" });
            }
            Knowledge::Stored(stored.held.into_iter().map(holding).collect::<Result<_, _>>()?)
        }
        k::Knowledge::Ended(outcome) => Knowledge::Ended(decided_from_wire(Some(outcome))?),
    })
}

// Reading.

fn ask_to_wire(ask: &Ask) -> wire::Ask {
    let Ask { key, below, resolve } = ask;
    wire::Ask { key: key.0.clone(), below: below.0, resolve: resolve.map(|ts| ts.0) }
}

fn ask_from_wire(ask: wire::Ask) -> Ask {
    let (key, below) = (Key(ask.key), Timestamp(ask.below));
    Ask { key, below, resolve: ask.resolve.map(Timestamp) }
}

fn shown_to_wire(shown: &Shown) -> wire::Shown {
    let Shown { ts, ballot, txn, is_finalized, what } = shown;
    let what = match what {
        What::Aborted => wire::shown::What::Aborted(wire::shown::Aborted {}),
        What::Void => wire::shown::What::Void(wire::shown::Void {}),
        What::Functor => wire::shown::What::Functor(wire::shown::Functor {}),
        What::Final(value) => {
            let value = value.as_ref().map(|value| value.0.clone());
            wire::shown::What::Final(wire::shown::Final { value })
        }
    };
    wire::Shown {
        ts: ts.0,
        ballot: *ballot,
        txn: Some(txn_id_to_wire(txn)),
        is_finalized: *is_finalized,
        what: Some(what),
    }
}

fn shown_from_wire(shown: wire::Shown) -> Result<Shown, WireError> {
    Ok(Shown {
        ts: Timestamp(shown.ts),
        ballot: shown.ballot,
        txn: txn_from_wire(shown.txn)?,
        is_finalized: shown.is_finalized,
        what: match need(shown.what, "Shown.what")? {
            wire::shown::What::Aborted(_) => What::Aborted,
            wire::shown::What::Void(_) => What::Void,
            wire::shown::What::Functor(_) => What::Functor,
            wire::shown::What::Final(value) => What::Final(value.value.map(Value)),
        },
    })
}

fn seen_to_wire(seen: &Seen) -> wire::Seen {
    let Seen { key, below, view: View { versions, complete_from, settled } } = seen;
    wire::Seen {
        key: key.0.clone(),
        below: below.0,
        versions: versions.iter().map(shown_to_wire).collect(),
        complete_from: complete_from.0,
        version: (settled.version != Version::INITIAL).then(|| version_to_wire(&settled.version)),
        value: settled.value.as_ref().map(|value| value.0.clone()),
    }
}

fn seen_from_wire(seen: wire::Seen) -> Result<Seen, WireError> {
    let versions = seen.versions.into_iter().map(shown_from_wire).collect::<Result<Vec<_>, _>>()?;
    if !versions.is_sorted_by(|a, b| a.ts > b.ts) {
        let (field, found) = ("Seen.versions", "versions out of order".into());
        return Err(WireError::Value { field, found, wanted: "newest first, each once" });
    }
    let version = seen.version.as_ref().map_or(Version::INITIAL, version_from_wire);
    let settled = Read { value: seen.value.map(Value), version };
    let view = View { versions, complete_from: Timestamp(seen.complete_from), settled };
    Ok(Seen { key: Key(seen.key), below: Timestamp(seen.below), view })
}

// Messages.

fn store_to_wire(
    ts: Timestamp,
    ballot: u64,
    incarnation: u32,
    functor: &Functor,
) -> wire::msg::Store {
    wire::msg::Store { ts: ts.0, ballot, incarnation, functor: Some(functor_to_wire(functor)) }
}

fn put_to_wire(ts: Timestamp, output: &Output) -> wire::msg::Put {
    wire::msg::Put { ts: ts.0, output: Some(output_to_wire(output)) }
}

fn msg_to_wire(msg: &Msg) -> wire::msg::Msg {
    use wire::msg as m;
    use wire::msg::Msg as Wire;
    match msg {
        Msg::Submit { functor } => Wire::Submit(functor_to_wire(functor)),
        Msg::Answer { txn, outcome, reads, path } => Wire::Answer(m::Answer {
            txn: Some(txn_id_to_wire(txn)),
            outcome: Some(outcome_to_wire(*outcome)),
            reads: reads.as_ref().map(|reads| m::answer::Reads { reads: reads_to_wire(reads) }),
            path: path_to_wire(*path),
        }),
        Msg::Look { txn, round, keys, at } => Wire::Look(m::Look {
            txn: Some(txn_id_to_wire(txn)),
            round: *round,
            keys: keys_to_wire(keys),
            at: at.map(|at| at.0),
        }),
        Msg::Found { txn, round, at, reads } => Wire::Found(m::Found {
            txn: Some(txn_id_to_wire(txn)),
            round: *round,
            at: at.0,
            reads: reads_to_wire(reads),
        }),
        Msg::Declined { txn, reason } => {
            let (txn, reason) = (Some(txn_id_to_wire(txn)), reason_to_wire(*reason));
            Wire::Declined(m::Declined { txn, reason })
        }
        Msg::Inquire { functor } => Wire::Inquire(functor_to_wire(functor)),
        Msg::Write { ts, ballot, incarnation, functor } => {
            Wire::Write(store_to_wire(*ts, *ballot, *incarnation, functor))
        }
        Msg::Written { ts, ballot } => Wire::Written(m::At { ts: ts.0, ballot: *ballot }),
        Msg::Refused { ts, ballot, refusal } => {
            let refusal = refusal_to_wire(*refusal);
            Wire::Refused(m::Refused { ts: ts.0, ballot: *ballot, refusal })
        }
        Msg::Finalize { ts, ballot } => Wire::Finalize(m::At { ts: ts.0, ballot: *ballot }),
        Msg::Confirm { ts, ballot, is_held } => {
            Wire::Confirm(m::Confirm { ts: ts.0, ballot: *ballot, is_held: *is_held })
        }
        Msg::Abort { ts, ballot, incarnation, functor } => {
            Wire::Abort(store_to_wire(*ts, *ballot, *incarnation, functor))
        }
        Msg::Aborted { ts, ballot } => Wire::Aborted(m::At { ts: ts.0, ballot: *ballot }),
        Msg::Get { query, partition, asks, replicated, epoch } => Wire::Get(m::Get {
            query: *query,
            partition: partition.0,
            asks: asks.iter().map(ask_to_wire).collect(),
            replicated: replicated.0,
            epoch: *epoch,
        }),
        Msg::Got { query, replicated, seen, is_cut } => Wire::Got(m::Got {
            query: *query,
            replicated: replicated.0,
            seen: seen.iter().map(seen_to_wire).collect(),
            is_cut: *is_cut,
        }),
        Msg::NotReady { query, reason } => {
            Wire::NotReady(m::NotReady { query: *query, reason: reason_to_wire(*reason) })
        }
        Msg::Put { ts, output } => Wire::Put(put_to_wire(*ts, output)),
        Msg::Executed { ts, output, reads } => Wire::Executed(m::Executed {
            ts: ts.0,
            output: Some(output_to_wire(output)),
            reads: reads_to_wire(reads),
        }),
        Msg::Query { txn, is_final, round, epoch } => {
            let txn = Some(txn_id_to_wire(txn));
            Wire::Query(m::Query { txn, is_final: *is_final, round: *round, epoch: *epoch })
        }
        Msg::Known { txn, round, settled, knowledge } => Wire::Known(m::Known {
            txn: Some(txn_id_to_wire(txn)),
            round: *round,
            settled: settled.0,
            knowledge: Some(knowledge_to_wire(knowledge)),
        }),
        Msg::Missing { from, to } => Wire::Missing(m::Range { from: from.0, to: to.0 }),
        Msg::Have { from, to } => Wire::Have(m::Range { from: from.0, to: to.0 }),
        Msg::Pull { partition, round, from, to, rest } => Wire::Pull(m::Pull {
            partition: partition.0,
            round: *round,
            from: from.0,
            to: to.0,
            rest: rest.map(rest_to_wire),
        }),
        Msg::Pulled {
            partition,
            round,
            piece,
            next,
            settled,
            entries,
            names,
            forgotten,
            promises,
        } => {
            let promises =
                promises.iter().map(|of| control::takeover_record_to_wire(*partition, of));
            Wire::Pulled(m::Pulled {
                partition: partition.0,
                round: *round,
                settled: settled.0,
                entries: entries.iter().map(|(ts, image)| pending_to_wire((ts, image))).collect(),
                names: names_to_wire(names),
                forgotten: acknowledged_to_wire(forgotten.iter().copied()),
                promises: promises.collect(),
                piece: Some(rest_to_wire(*piece)),
                next: *next,
            })
        }
        Msg::Scan { partition, round, from, after } => Wire::Scan(m::Scan {
            partition: partition.0,
            round: *round,
            from: from.0,
            after: after.as_ref().map(|key| key.0.clone()),
        }),
        Msg::Scanned { partition, round, keys, next, collected, settled } => {
            Wire::Scanned(m::Scanned {
                partition: partition.0,
                round: *round,
                keys: keys.iter().map(key_versions_to_wire).collect(),
                next: next.as_ref().map(|key| key.0.clone()),
                collected: collected.0,
                settled: settled.0,
            })
        }
        Msg::Intent { ts, incarnation, functor } => Wire::Intent(m::Intent {
            ts: ts.0,
            incarnation: *incarnation,
            functor: functor.as_ref().map(|functor| functor_to_wire(functor)),
        }),
        Msg::Directory(msg) => Wire::Directory(control::directory_to_wire(msg)),
        Msg::Takeover(msg) => Wire::Takeover(control::takeover_to_wire(msg)),
        Msg::Gossip(msg) => Wire::Gossip(control::gossip_to_wire(msg)),
    }
}

fn msg_from_wire(msg: wire::Msg) -> Result<Msg, WireError> {
    use wire::msg::Msg as Wire;
    Ok(match need(msg.msg, "Msg.msg")? {
        Wire::Submit(functor) => Msg::Submit { functor: functor_from_wire(Some(functor))? },
        Wire::Answer(m) => Msg::Answer {
            txn: txn_from_wire(m.txn)?,
            outcome: outcome_from_wire(need(m.outcome, "Answer.outcome")?)?,
            reads: m.reads.map(|reads| reads_from_wire(reads.reads)).transpose()?,
            path: path_from_wire(m.path)?,
        },
        Wire::Look(m) => Msg::Look {
            txn: txn_from_wire(m.txn)?,
            round: m.round,
            keys: keys_from_wire(m.keys),
            at: m.at.map(Timestamp),
        },
        Wire::Found(m) => Msg::Found {
            txn: txn_from_wire(m.txn)?,
            round: m.round,
            at: Timestamp(m.at),
            reads: reads_from_wire(m.reads)?,
        },
        Wire::Declined(m) => {
            Msg::Declined { txn: txn_from_wire(m.txn)?, reason: reason_from_wire(m.reason)? }
        }
        Wire::Inquire(functor) => Msg::Inquire { functor: functor_from_wire(Some(functor))? },
        Wire::Write(m) => Msg::Write {
            ts: Timestamp(m.ts),
            ballot: m.ballot,
            incarnation: m.incarnation,
            functor: functor_from_wire(m.functor)?,
        },
        Wire::Written(m) => Msg::Written { ts: Timestamp(m.ts), ballot: m.ballot },
        Wire::Refused(m) => {
            let refusal = refusal_from_wire(m.refusal)?;
            Msg::Refused { ts: Timestamp(m.ts), ballot: m.ballot, refusal }
        }
        Wire::Finalize(m) => Msg::Finalize { ts: Timestamp(m.ts), ballot: m.ballot },
        Wire::Confirm(m) => {
            Msg::Confirm { ts: Timestamp(m.ts), ballot: m.ballot, is_held: m.is_held }
        }
        Wire::Abort(m) => Msg::Abort {
            ts: Timestamp(m.ts),
            ballot: m.ballot,
            incarnation: m.incarnation,
            functor: functor_from_wire(m.functor)?,
        },
        Wire::Aborted(m) => Msg::Aborted { ts: Timestamp(m.ts), ballot: m.ballot },
        Wire::Get(m) => Msg::Get {
            query: m.query,
            partition: PartitionId(m.partition),
            asks: m.asks.into_iter().map(ask_from_wire).collect(),
            replicated: Timestamp(m.replicated),
            epoch: m.epoch,
        },
        Wire::Got(m) => Msg::Got {
            query: m.query,
            replicated: Timestamp(m.replicated),
            seen: m.seen.into_iter().map(seen_from_wire).collect::<Result<_, _>>()?,
            is_cut: m.is_cut,
        },
        Wire::NotReady(m) => Msg::NotReady { query: m.query, reason: reason_from_wire(m.reason)? },
        Wire::Put(m) => Msg::Put { ts: Timestamp(m.ts), output: output_from_wire(m.output)? },
        Wire::Executed(m) => Msg::Executed {
            ts: Timestamp(m.ts),
            output: output_from_wire(m.output)?,
            reads: reads_from_wire(m.reads)?,
        },
        Wire::Query(m) => {
            let txn = txn_from_wire(m.txn)?;
            Msg::Query { txn, is_final: m.is_final, round: m.round, epoch: m.epoch }
        }
        Wire::Known(m) => Msg::Known {
            txn: txn_from_wire(m.txn)?,
            round: m.round,
            settled: Timestamp(m.settled),
            knowledge: knowledge_from_wire(m.knowledge)?,
        },
        Wire::Missing(m) => Msg::Missing { from: Timestamp(m.from), to: Timestamp(m.to) },
        Wire::Have(m) => Msg::Have { from: Timestamp(m.from), to: Timestamp(m.to) },
        Wire::Pull(m) => Msg::Pull {
            partition: PartitionId(m.partition),
            round: m.round,
            from: Timestamp(m.from),
            to: Timestamp(m.to),
            rest: m.rest.map(rest_from_wire),
        },
        Wire::Pulled(m) => Msg::Pulled {
            partition: PartitionId(m.partition),
            round: m.round,
            piece: rest_from_wire(need(m.piece, "Pulled.piece")?),
            next: m.next,
            settled: Timestamp(m.settled),
            entries: m.entries.into_iter().map(pending_from_wire).collect::<Result<_, _>>()?,
            names: names_from_wire(m.names)?,
            forgotten: acknowledged_from_wire(m.forgotten).collect(),
            promises: m
                .promises
                .into_iter()
                .map(|record| promise_from_wire(m.partition, record))
                .collect::<Result<_, _>>()?,
        },
        Wire::Scan(m) => Msg::Scan {
            partition: PartitionId(m.partition),
            round: m.round,
            from: Timestamp(m.from),
            after: m.after.map(Key),
        },
        Wire::Scanned(m) => Msg::Scanned {
            partition: PartitionId(m.partition),
            round: m.round,
            keys: m.keys.into_iter().map(key_versions_from_wire).collect::<Result<_, _>>()?,
            next: m.next.map(Key),
            collected: Timestamp(m.collected),
            settled: Timestamp(m.settled),
        },
        Wire::Intent(m) => Msg::Intent {
            ts: Timestamp(m.ts),
            incarnation: m.incarnation,
            functor: m.functor.map(|functor| functor_from_wire(Some(functor))).transpose()?,
        },
        Wire::Directory(m) => Msg::Directory(Box::new(control::directory_from_wire(m)?)),
        Wire::Takeover(m) => Msg::Takeover(Box::new(control::takeover_from_wire(m)?)),
        Wire::Gossip(m) => Msg::Gossip(Box::new(control::gossip_from_wire(m)?)),
    })
}

fn promise_from_wire(
    partition: u32,
    record: wire::TakeoverRecord,
) -> Result<takeover::Record, WireError> {
    let (PartitionId(of), record) = control::takeover_record_from_wire(record)?;
    if of != partition {
        let (field, found) = ("Pulled.promises", format!("a promise of p{of}"));
        return Err(WireError::Value {
            field,
            found,
            wanted: "promises of the message's partition",
        });
    }
    Ok(record)
}

// Records.

fn state_to_wire(state: &State) -> wire::State {
    let State { pending, names, acknowledged, settled, collected, copied, forgotten } = state;
    let acknowledged = acknowledged.iter().map(|(client, (below, since))| {
        wire::state::Acknowledged { client: client.0, below: *below, since: since.0 }
    });
    wire::State {
        pending: pending.iter().map(pending_to_wire).collect(),
        names: names.iter().map(name_to_wire).collect(),
        acknowledged: acknowledged.collect(),
        settled: settled.0,
        collected: collected.0,
        copied: control::partitions_to_wire(copied),
        forgotten: acknowledged_to_wire(forgotten.iter().map(|(&client, &below)| (client, below))),
    }
}

fn state_from_wire(state: wire::State) -> Result<State, WireError> {
    let acknowledged = state
        .acknowledged
        .into_iter()
        .map(|entry| Ok((ClientId(entry.client), (entry.below, Timestamp(entry.since)))));
    Ok(State {
        pending: keyed(state.pending.into_iter().map(pending_from_wire), "State.pending")?,
        names: keyed(state.names.into_iter().map(name_from_wire), "State.names")?,
        acknowledged: keyed(acknowledged, "State.acknowledged")?,
        settled: Timestamp(state.settled),
        collected: Timestamp(state.collected),
        copied: control::partitions_from_wire(state.copied)?,
        forgotten: keyed(acknowledged_from_wire(state.forgotten).map(Ok), "State.forgotten")?,
    })
}

fn change_to_wire(change: &Change) -> wire::Change {
    use wire::change::Change as Wire;
    let change = match change {
        Change::Write { ts, ballot, incarnation, functor } => {
            Wire::Write(store_to_wire(*ts, *ballot, *incarnation, functor))
        }
        Change::Finalize(ts) => Wire::Finalize(ts.0),
        Change::Abort { ts, ballot, incarnation, functor } => {
            Wire::Abort(store_to_wire(*ts, *ballot, *incarnation, functor))
        }
        Change::Resolve { ts, output } => Wire::Resolve(put_to_wire(*ts, output)),
        Change::Refuse { txn, is_final, at } => Wire::Refuse(wire::change::Refuse {
            at: at.0,
            txn: Some(txn_id_to_wire(txn)),
            is_final: *is_final,
        }),
        Change::Names(names) => Wire::Names(wire::change::Names { names: names_to_wire(names) }),
        Change::Adopt { ts, image } => Wire::Adopt(pending_to_wire((ts, image))),
        Change::Forget(clients) => {
            let clients = acknowledged_to_wire(clients.iter().copied());
            Wire::Forget(wire::change::Forget { clients })
        }
    };
    wire::Change { change: Some(change) }
}

fn change_from_wire(change: wire::Change) -> Result<Change, WireError> {
    use wire::change::Change as Wire;
    Ok(match need(change.change, "Change.change")? {
        Wire::Write(c) => Change::Write {
            ts: Timestamp(c.ts),
            ballot: c.ballot,
            incarnation: c.incarnation,
            functor: functor_from_wire(c.functor)?,
        },
        Wire::Finalize(ts) => Change::Finalize(Timestamp(ts)),
        Wire::Abort(c) => Change::Abort {
            ts: Timestamp(c.ts),
            ballot: c.ballot,
            incarnation: c.incarnation,
            functor: functor_from_wire(c.functor)?,
        },
        Wire::Resolve(c) => {
            Change::Resolve { ts: Timestamp(c.ts), output: output_from_wire(c.output)? }
        }
        Wire::Refuse(c) => {
            Change::Refuse { txn: txn_from_wire(c.txn)?, is_final: c.is_final, at: Timestamp(c.at) }
        }
        Wire::Names(c) => Change::Names(names_from_wire(c.names)?),
        Wire::Adopt(pending) => {
            let (ts, image) = pending_from_wire(pending)?;
            Change::Adopt { ts, image }
        }
        Wire::Forget(c) => Change::Forget(acknowledged_from_wire(c.clients).collect()),
    })
}

impl WireProtocol for OceanVista {
    fn encode_msg(msg: &Msg, out: &mut BytesMut) {
        wire::Msg { msg: Some(msg_to_wire(msg)) }.encode_raw(out);
    }

    fn decode_msg(bytes: Bytes) -> Result<Msg, WireError> {
        msg_from_wire(wire::Msg::decode(bytes)?)
    }

    fn encode_record(record: &Record, out: &mut BytesMut) {
        use wire::record::Record as Wire;
        let record = match record {
            Record::State(state) => Wire::State(state_to_wire(state)),
            Record::Change(change) => Wire::Change(change_to_wire(change)),
            Record::Intact => Wire::Intact(wire::record::Intact {}),
            Record::Takeover(partition, record) => {
                Wire::Takeover(control::takeover_record_to_wire(*partition, record))
            }
            Record::Directory(record) => Wire::Directory(control::directory_record_to_wire(record)),
        };
        wire::Record { record: Some(record) }.encode_raw(out);
    }

    fn decode_record(bytes: Bytes) -> Result<Record, WireError> {
        use wire::record::Record as Wire;
        Ok(match need(wire::Record::decode(bytes)?.record, "Record.record")? {
            Wire::State(state) => Record::State(Box::new(state_from_wire(state)?)),
            Wire::Change(change) => Record::Change(change_from_wire(change)?),
            Wire::Intact(_) => Record::Intact,
            Wire::Takeover(record) => {
                let (partition, record) = control::takeover_record_from_wire(record)?;
                Record::Takeover(partition, record)
            }
            Wire::Directory(record) => {
                Record::Directory(control::directory_record_from_wire(record)?)
            }
        })
    }
}
