//! TAPIR's messages and records.

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use orthodrome_core::store::Start;
use orthodrome_core::txn::Read;
use orthodrome_core::{Key, NodeId, PartitionId, Timestamp, TxnId};
use orthodrome_protocols::ir::{Offer, View};
use orthodrome_protocols::tapir::{
    Answer, Ballot, Cast, Change, Entry, Image, Msg, Part, Record, State, Tapir, Vote,
};
use prost::Message as _;

use super::common::{
    acknowledged_from_wire, acknowledged_to_wire, decided_from_wire, key_versions_from_wire,
    key_versions_to_wire, keys_from_wire, keys_to_wire, need, nodes_from_wire, nodes_to_wire,
    outcome_from_wire, outcome_to_wire, partitions_from_wire, partitions_to_wire,
    portion_from_wire, portion_to_wire, read_list_from_wire, read_list_to_wire, reason_from_wire,
    reason_to_wire, txn_id_from_wire, txn_id_to_wire, txns_from_wire, txns_to_wire,
    versions_from_wire, versions_to_wire, writes_from_wire, writes_to_wire,
};
use super::{WireError, WireProtocol, internal, tapir_schema as wire};

fn ballot_to_wire(ballot: Ballot) -> wire::Ballot {
    let Ballot { takeover, node, round } = ballot;
    wire::Ballot { takeover, node: node.0, round }
}

fn ballot_from_wire(ballot: Option<wire::Ballot>) -> Ballot {
    // The client's first is all zeroes.
    let ballot = ballot.unwrap_or_default();
    Ballot { takeover: ballot.takeover, node: NodeId(ballot.node), round: ballot.round }
}

fn part_to_wire(part: &Part) -> wire::Part {
    wire::Part { reads: versions_to_wire(&part.reads), writes: writes_to_wire(&part.writes) }
}

fn part_from_wire(part: wire::Part) -> Result<Part, WireError> {
    Ok(Part { reads: versions_from_wire(part.reads)?, writes: writes_from_wire(part.writes)? })
}

fn reads_to_wire(reads: &[(Key, Read)]) -> wire::msg::Reads {
    wire::msg::Reads { reads: read_list_to_wire(reads), is_too_much: false }
}

fn vote_to_wire(vote: Vote) -> wire::Vote {
    use wire::vote::Vote as Wire;
    let vote = match vote {
        Vote::PrepareOk(timestamp) => Wire::PrepareOk(timestamp.0),
        Vote::Abort => Wire::Abort(wire::vote::Abort {}),
        Vote::Abstain => Wire::Abstain(wire::vote::Abstain {}),
        Vote::Retry(timestamp) => Wire::Retry(timestamp.0),
        Vote::Refused(reason) => Wire::Refused(reason_to_wire(reason)),
    };
    wire::Vote { vote: Some(vote) }
}

fn vote_from_wire(vote: Option<wire::Vote>) -> Result<Vote, WireError> {
    use wire::vote::Vote as Wire;
    Ok(match need(vote.and_then(|vote| vote.vote), "vote")? {
        Wire::PrepareOk(timestamp) => Vote::PrepareOk(Timestamp(timestamp)),
        Wire::Abort(_) => Vote::Abort,
        Wire::Abstain(_) => Vote::Abstain,
        Wire::Retry(timestamp) => Vote::Retry(Timestamp(timestamp)),
        Wire::Refused(reason) => Vote::Refused(reason_from_wire(reason)?),
    })
}

fn cast_to_wire(cast: Cast) -> wire::Cast {
    let Cast { ballot, vote, is_final } = cast;
    wire::Cast { ballot: Some(ballot_to_wire(ballot)), vote: Some(vote_to_wire(vote)), is_final }
}

fn cast_from_wire(cast: wire::Cast) -> Result<Cast, WireError> {
    let (ballot, vote) = (ballot_from_wire(cast.ballot), vote_from_wire(cast.vote)?);
    Ok(Cast { ballot, vote, is_final: cast.is_final })
}

fn answer_to_wire(answer: &Answer) -> wire::Answer {
    wire::Answer {
        view: answer.view.0,
        promised: Some(ballot_to_wire(answer.promised)),
        cast: answer.cast.map(cast_to_wire),
        ended: answer.ended.map(outcome_to_wire),
        absent: nodes_to_wire(&answer.absent),
        is_forgotten: answer.is_forgotten,
    }
}

fn answer_from_wire(answer: wire::Answer) -> Result<Answer, WireError> {
    Ok(Answer {
        view: View(answer.view),
        promised: ballot_from_wire(answer.promised),
        cast: answer.cast.map(cast_from_wire).transpose()?,
        ended: answer.ended.map(outcome_from_wire).transpose()?,
        absent: nodes_from_wire(answer.absent).collect(),
        is_forgotten: answer.is_forgotten,
    })
}

fn entry_to_wire((txn, entry): (&TxnId, &Entry)) -> wire::Entry {
    let Entry { participants, part, promised, cast, ended } = entry;
    wire::Entry {
        txn: Some(txn_id_to_wire(txn)),
        participants: partitions_to_wire(participants),
        part: part.as_ref().map(part_to_wire),
        promised: Some(ballot_to_wire(*promised)),
        cast: cast.map(cast_to_wire),
        ended: ended.map(outcome_to_wire),
    }
}

fn entry_from_wire(entry: wire::Entry) -> Result<(TxnId, Entry), WireError> {
    let txn = txn_id_from_wire(&need(entry.txn, "Entry.txn")?);
    let entry = Entry {
        participants: partitions_from_wire(entry.participants).collect(),
        part: entry.part.map(part_from_wire).transpose()?,
        promised: ballot_from_wire(entry.promised),
        cast: entry.cast.map(cast_from_wire).transpose()?,
        ended: entry.ended.map(outcome_from_wire).transpose()?,
    };
    Ok((txn, entry))
}

fn image_to_wire(image: &Image) -> wire::Image {
    let entries = image.entries.iter().map(|(txn, entry)| entry_to_wire((txn, entry)));
    wire::Image {
        entries: entries.collect(),
        acknowledged: acknowledged_to_wire(image.acknowledged.iter().copied()),
        ceiling: image.ceiling.0,
    }
}

fn image_from_wire(image: Option<wire::Image>) -> Result<Image, WireError> {
    let image = image.unwrap_or_default();
    let entries = image.entries.into_iter().map(entry_from_wire);
    Ok(Image {
        entries: entries.collect::<Result<_, _>>()?,
        acknowledged: acknowledged_from_wire(image.acknowledged).collect(),
        ceiling: Timestamp(image.ceiling),
    })
}

fn synced_to_wire(synced: &BTreeMap<NodeId, View>) -> Vec<wire::Synced> {
    synced.iter().map(|(node, since)| wire::Synced { node: node.0, since: since.0 }).collect()
}

fn synced_from_wire(synced: Vec<wire::Synced>) -> BTreeMap<NodeId, View> {
    synced.into_iter().map(|entry| (NodeId(entry.node), View(entry.since))).collect()
}

fn offer_to_wire(offer: &Offer<Image>) -> wire::Offer {
    wire::Offer {
        normal_view: offer.normal_view.0,
        is_whole: offer.is_whole,
        synced: synced_to_wire(&offer.synced),
        image: Some(image_to_wire(&offer.image)),
    }
}

fn offer_from_wire(offer: wire::Offer) -> Result<Box<Offer<Image>>, WireError> {
    Ok(Box::new(Offer {
        normal_view: View(offer.normal_view),
        is_whole: offer.is_whole,
        synced: synced_from_wire(offer.synced),
        image: image_from_wire(offer.image)?,
    }))
}

fn start_to_wire(start: &Start) -> (Option<Bytes>, Option<internal::KeyVersion>) {
    let Start { after, within } = start;
    let within = within.iter().flat_map(|within| versions_to_wire(std::slice::from_ref(within)));
    (after.as_ref().map(|key| key.0.clone()), within.last())
}

fn start_from_wire(
    after: Option<Bytes>,
    within: Option<internal::KeyVersion>,
) -> Result<Start, WireError> {
    let within = versions_from_wire(within.into_iter().collect())?.pop();
    Ok(Start { after: after.map(Key), within })
}

fn msg_to_wire(msg: &Msg) -> wire::Msg {
    use wire::msg as m;
    use wire::msg::Msg as Wire;
    let (partition, wire) = match msg {
        Msg::Read { partition, keys, .. } => {
            (partition, Wire::Read(m::Read { keys: keys_to_wire(keys) }))
        }
        Msg::ReadResult { partition, reads, is_too_much, .. } => {
            let reads = m::Reads { is_too_much: *is_too_much, ..reads_to_wire(reads) };
            (partition, Wire::ReadResult(reads))
        }
        Msg::ProposeConsensus { partition, ballot, timestamp, part, participants, .. } => {
            let propose = m::ProposeConsensus {
                ballot: Some(ballot_to_wire(*ballot)),
                timestamp: timestamp.0,
                part: Some(part_to_wire(part)),
                participants: partitions_to_wire(participants),
            };
            (partition, Wire::ProposeConsensus(propose))
        }
        Msg::ReplyConsensus { partition, answer, .. } => {
            (partition, Wire::ReplyConsensus(answer_to_wire(answer)))
        }
        Msg::FinalizeConsensus { partition, view, ballot, vote, part, participants, .. } => {
            let finalize = m::FinalizeConsensus {
                view: view.0,
                ballot: Some(ballot_to_wire(*ballot)),
                vote: Some(vote_to_wire(*vote)),
                part: part.as_ref().map(part_to_wire),
                participants: partitions_to_wire(participants),
            };
            (partition, Wire::FinalizeConsensus(finalize))
        }
        Msg::Confirm { partition, answer, .. } => {
            (partition, Wire::Confirm(answer_to_wire(answer)))
        }
        Msg::ProposeInconsistent { partition, outcome, part, participants, .. } => {
            let propose = m::ProposeInconsistent {
                outcome: Some(outcome_to_wire(*outcome)),
                part: part.as_ref().map(part_to_wire),
                participants: partitions_to_wire(participants),
            };
            (partition, Wire::ProposeInconsistent(propose))
        }
        Msg::ReplyInconsistent { partition, absent, .. } => {
            let reply = m::ReplyInconsistent { absent: nodes_to_wire(absent) };
            (partition, Wire::ReplyInconsistent(reply))
        }
        Msg::FinalizeInconsistent { partition, txns, acknowledged } => {
            let finalize = m::FinalizeInconsistent {
                txns: txns_to_wire(txns),
                acknowledged: acknowledged_to_wire(acknowledged.iter().copied()),
            };
            (partition, Wire::FinalizeInconsistent(finalize))
        }
        Msg::CoordinatorChange { partition, ballot, participants, .. } => {
            let change = m::CoordinatorChange {
                ballot: Some(ballot_to_wire(*ballot)),
                participants: partitions_to_wire(participants),
            };
            (partition, Wire::CoordinatorChange(change))
        }
        Msg::CoordinatorChangeReply { partition, answer, part, .. } => {
            let reply = m::CoordinatorChangeReply {
                answer: Some(answer_to_wire(answer)),
                part: part.as_ref().map(part_to_wire),
            };
            (partition, Wire::CoordinatorChangeReply(reply))
        }
        Msg::ReadOnly { partition, keys, timestamp, .. } => {
            let read = m::ReadOnly { keys: keys_to_wire(keys), timestamp: timestamp.0 };
            (partition, Wire::ReadOnly(read))
        }
        Msg::ReadOnlyResult { partition, timestamp, reads, is_too_much, .. } => {
            let reads = reads.as_ref().map(|reads| reads_to_wire(reads));
            let (timestamp, is_too_much) = (timestamp.0, *is_too_much);
            let result = m::ReadOnlyResult { reads, is_too_much, timestamp };
            (partition, Wire::ReadOnlyResult(result))
        }
        Msg::NotNormal { partition, .. } => (partition, Wire::NotNormal(m::NotNormal {})),
        Msg::DoViewChange { partition, view, offer, portion } => {
            let offer = offer.as_ref().map(|offer| offer_to_wire(offer));
            let portion = portion_to_wire(*portion);
            (partition, Wire::DoViewChange(m::DoViewChange { view: view.0, offer, portion }))
        }
        Msg::StartView { partition, view, synced, is_new_group, image, portion } => {
            let start = m::StartView {
                view: view.0,
                synced: synced_to_wire(synced),
                is_new_group: *is_new_group,
                image: Some(image_to_wire(image)),
                portion: portion_to_wire(*portion),
            };
            (partition, Wire::StartView(start))
        }
        Msg::Gossip { partition, view, is_normal } => {
            (partition, Wire::Gossip(m::Gossip { view: view.0, is_normal: *is_normal }))
        }
        Msg::FetchState { partition, view, start } => {
            let (after, within) = start_to_wire(start);
            (partition, Wire::FetchState(m::FetchState { view: view.0, after, within }))
        }
        Msg::StateChunk { partition, view, start, keys, is_cut, is_last } => {
            let (after, within) = start_to_wire(start);
            let chunk = m::StateChunk {
                view: view.0,
                after,
                keys: keys.iter().map(key_versions_to_wire).collect(),
                is_last: *is_last,
                within,
                is_cut: *is_cut,
            };
            (partition, Wire::StateChunk(chunk))
        }
    };
    let txn = orthodrome_core::Message::txn(msg).as_ref().map(txn_id_to_wire);
    wire::Msg { partition: partition.0, txn, msg: Some(wire) }
}

fn msg_from_wire(msg: wire::Msg) -> Result<Msg, WireError> {
    use wire::msg::Msg as Wire;
    let partition = PartitionId(msg.partition);
    let known = msg.txn.as_ref().map(txn_id_from_wire);
    let txn = || need(known, "Msg.txn");
    let parts = |ids: Vec<u32>| partitions_from_wire(ids).collect::<Vec<_>>();
    Ok(match need(msg.msg, "Msg.msg")? {
        Wire::Read(m) => Msg::Read { txn: txn()?, partition, keys: keys_from_wire(m.keys) },
        Wire::ReadResult(m) => {
            let (is_too_much, reads) = (m.is_too_much, read_list_from_wire(m.reads)?);
            Msg::ReadResult { txn: txn()?, partition, reads, is_too_much }
        }
        Wire::ProposeConsensus(m) => Msg::ProposeConsensus {
            txn: txn()?,
            partition,
            ballot: ballot_from_wire(m.ballot),
            timestamp: Timestamp(m.timestamp),
            part: part_from_wire(need(m.part, "ProposeConsensus.part")?)?,
            participants: parts(m.participants),
        },
        Wire::ReplyConsensus(m) => {
            Msg::ReplyConsensus { txn: txn()?, partition, answer: answer_from_wire(m)? }
        }
        Wire::FinalizeConsensus(m) => Msg::FinalizeConsensus {
            txn: txn()?,
            partition,
            view: View(m.view),
            ballot: ballot_from_wire(m.ballot),
            vote: vote_from_wire(m.vote)?,
            part: m.part.map(part_from_wire).transpose()?,
            participants: parts(m.participants),
        },
        Wire::Confirm(m) => Msg::Confirm { txn: txn()?, partition, answer: answer_from_wire(m)? },
        Wire::ProposeInconsistent(m) => Msg::ProposeInconsistent {
            txn: txn()?,
            partition,
            outcome: decided_from_wire(m.outcome)?,
            part: m.part.map(part_from_wire).transpose()?,
            participants: parts(m.participants),
        },
        Wire::ReplyInconsistent(m) => {
            let absent = nodes_from_wire(m.absent).collect();
            Msg::ReplyInconsistent { txn: txn()?, partition, absent }
        }
        Wire::FinalizeInconsistent(m) => Msg::FinalizeInconsistent {
            partition,
            txns: txns_from_wire(&m.txns)?,
            acknowledged: acknowledged_from_wire(m.acknowledged).collect(),
        },
        Wire::CoordinatorChange(m) => Msg::CoordinatorChange {
            txn: txn()?,
            partition,
            ballot: ballot_from_wire(m.ballot),
            participants: parts(m.participants),
        },
        Wire::CoordinatorChangeReply(m) => Msg::CoordinatorChangeReply {
            txn: txn()?,
            partition,
            answer: answer_from_wire(need(m.answer, "CoordinatorChangeReply.answer")?)?,
            part: m.part.map(part_from_wire).transpose()?,
        },
        Wire::ReadOnly(m) => Msg::ReadOnly {
            txn: txn()?,
            partition,
            keys: keys_from_wire(m.keys),
            timestamp: Timestamp(m.timestamp),
        },
        Wire::ReadOnlyResult(m) => {
            let reads = m.reads.map(|m| read_list_from_wire(m.reads)).transpose()?;
            let (timestamp, is_too_much) = (Timestamp(m.timestamp), m.is_too_much);
            Msg::ReadOnlyResult { txn: txn()?, partition, timestamp, reads, is_too_much }
        }
        Wire::NotNormal(_) => Msg::NotNormal { partition, txn: txn()? },
        Wire::DoViewChange(m) => {
            let offer = m.offer.map(offer_from_wire).transpose()?;
            let portion = portion_from_wire(m.portion);
            Msg::DoViewChange { partition, view: View(m.view), offer, portion }
        }
        Wire::StartView(m) => Msg::StartView {
            partition,
            view: View(m.view),
            synced: synced_from_wire(m.synced),
            is_new_group: m.is_new_group,
            image: Box::new(image_from_wire(m.image)?),
            portion: portion_from_wire(m.portion),
        },
        Wire::Gossip(m) => Msg::Gossip { partition, view: View(m.view), is_normal: m.is_normal },
        Wire::FetchState(m) => {
            let start = start_from_wire(m.after, m.within)?;
            Msg::FetchState { partition, view: View(m.view), start }
        }
        Wire::StateChunk(m) => {
            let keys = m.keys.into_iter().map(key_versions_from_wire);
            Msg::StateChunk {
                partition,
                view: View(m.view),
                start: start_from_wire(m.after, m.within)?,
                keys: keys.collect::<Result<_, _>>()?,
                is_cut: m.is_cut,
                is_last: m.is_last,
            }
        }
    })
}

fn change_to_wire(change: &Change) -> wire::Change {
    use wire::change as c;
    use wire::change::Change as Wire;
    let change = match change {
        Change::Cast { txn, participants, part, cast } => Wire::Cast(c::Casting {
            txn: Some(txn_id_to_wire(txn)),
            participants: partitions_to_wire(participants),
            part: part.as_ref().map(part_to_wire),
            cast: Some(cast_to_wire(*cast)),
        }),
        Change::Promise { txn, participants, ballot } => Wire::Promise(c::Promise {
            txn: Some(txn_id_to_wire(txn)),
            participants: partitions_to_wire(participants),
            ballot: Some(ballot_to_wire(*ballot)),
        }),
        Change::End { txn, participants, part, outcome } => Wire::End(c::End {
            txn: Some(txn_id_to_wire(txn)),
            participants: partitions_to_wire(participants),
            part: part.as_ref().map(part_to_wire),
            outcome: Some(outcome_to_wire(*outcome)),
        }),
        Change::Forget(txns) => Wire::Forget(c::Forget { txns: txns_to_wire(txns) }),
        Change::Acknowledge(clients) => Wire::Acknowledge(c::Acknowledge {
            clients: acknowledged_to_wire(clients.iter().copied()),
        }),
        Change::Ceiling(ceiling) => Wire::Ceiling(ceiling.0),
        Change::Enter(view) => Wire::Enter(view.0),
        Change::Install { view, synced, image, is_whole } => Wire::Install(c::Install {
            view: view.0,
            synced: synced_to_wire(synced),
            image: Some(image_to_wire(image)),
            is_whole: *is_whole,
        }),
        Change::Gather { view, number, image } => {
            let image = Some(image_to_wire(image));
            Wire::Gather(c::Gather { view: view.0, number: *number, image })
        }
        Change::Whole => Wire::Whole(c::Whole {}),
    };
    wire::Change { change: Some(change) }
}

fn change_from_wire(change: wire::Change) -> Result<Change, WireError> {
    use wire::change::Change as Wire;
    let parts = |ids: Vec<u32>| partitions_from_wire(ids).collect::<Vec<_>>();
    let name =
        |txn: Option<internal::TxnId>| need(txn, "Change.txn").map(|txn| txn_id_from_wire(&txn));
    Ok(match need(change.change, "Change.change")? {
        Wire::Cast(c) => Change::Cast {
            txn: name(c.txn)?,
            participants: parts(c.participants),
            part: c.part.map(part_from_wire).transpose()?,
            cast: cast_from_wire(need(c.cast, "Casting.cast")?)?,
        },
        Wire::Promise(c) => Change::Promise {
            txn: name(c.txn)?,
            participants: parts(c.participants),
            ballot: ballot_from_wire(c.ballot),
        },
        Wire::End(c) => Change::End {
            txn: name(c.txn)?,
            participants: parts(c.participants),
            part: c.part.map(part_from_wire).transpose()?,
            outcome: decided_from_wire(c.outcome)?,
        },
        Wire::Forget(c) => Change::Forget(txns_from_wire(&c.txns)?),
        Wire::Acknowledge(c) => Change::Acknowledge(acknowledged_from_wire(c.clients).collect()),
        Wire::Ceiling(ceiling) => Change::Ceiling(Timestamp(ceiling)),
        Wire::Enter(view) => Change::Enter(View(view)),
        Wire::Install(c) => Change::Install {
            view: View(c.view),
            synced: synced_from_wire(c.synced),
            image: Box::new(image_from_wire(c.image)?),
            is_whole: c.is_whole,
        },
        Wire::Gather(c) => {
            let image = Box::new(image_from_wire(c.image)?);
            Change::Gather { view: View(c.view), number: c.number, image }
        }
        Wire::Whole(_) => Change::Whole,
    })
}

fn state_to_wire(state: &State) -> wire::State {
    let State { view, normal_view, synced, is_whole, entries, acknowledged, ceiling } = state;
    let acknowledged = acknowledged.iter().map(|(&client, &below)| (client, below));
    wire::State {
        view: view.0,
        normal_view: normal_view.0,
        synced: synced_to_wire(synced),
        is_whole: *is_whole,
        record: Some(wire::Image {
            entries: entries.iter().map(entry_to_wire).collect(),
            acknowledged: acknowledged_to_wire(acknowledged),
            ceiling: ceiling.0,
        }),
        ceiling: ceiling.0,
    }
}

fn state_from_wire(state: wire::State) -> Result<State, WireError> {
    let Image { entries, acknowledged, ceiling: _ } = image_from_wire(state.record)?;
    Ok(State {
        view: View(state.view),
        normal_view: View(state.normal_view),
        synced: synced_from_wire(state.synced),
        is_whole: state.is_whole,
        entries: entries.into_iter().collect(),
        acknowledged: acknowledged.into_iter().collect(),
        ceiling: Timestamp(state.ceiling),
    })
}

impl WireProtocol for Tapir {
    fn encode_msg(msg: &Msg, out: &mut BytesMut) {
        msg_to_wire(msg).encode_raw(out);
    }

    fn decode_msg(bytes: Bytes) -> Result<Msg, WireError> {
        msg_from_wire(wire::Msg::decode(bytes)?)
    }

    fn encode_record(record: &Record, out: &mut BytesMut) {
        let (partition, record) = match record {
            Record::State(partition, state) => {
                (partition, wire::record::Record::State(state_to_wire(state)))
            }
            Record::Change(partition, change) => {
                (partition, wire::record::Record::Change(change_to_wire(change)))
            }
        };
        wire::Record { partition: partition.0, record: Some(record) }.encode_raw(out);
    }

    fn decode_record(bytes: Bytes) -> Result<Record, WireError> {
        let record = wire::Record::decode(bytes)?;
        let partition = PartitionId(record.partition);
        Ok(match need(record.record, "Record.record")? {
            wire::record::Record::State(state) => {
                Record::State(partition, Box::new(state_from_wire(state)?))
            }
            wire::record::Record::Change(change) => {
                Record::Change(partition, change_from_wire(change)?)
            }
        })
    }
}
