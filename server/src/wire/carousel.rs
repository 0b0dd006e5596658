//! Carousel's messages and records.

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use orthodrome_core::txn::Priority;
use orthodrome_core::{NodeId, PartitionId, Timestamp, TxnId};
use orthodrome_protocols::carousel::{
    Carousel, Chunk, Command, Coordinated, Ended, FastVote, Listed, Log, Msg, Prepared, Record,
    Request, State, Verdict, Vote,
};
use orthodrome_protocols::gateway::Participant;
use orthodrome_protocols::replication::{Index, Term};
use prost::Message as _;

use super::common::{
    acknowledged_from_wire, acknowledged_to_wire, key_versions_from_wire, key_versions_to_wire,
    keys_from_wire, keys_to_wire, narrow, need, nodes_from_wire, nodes_to_wire, outcome_from_wire,
    outcome_to_wire, participant_from_wire, participant_to_wire, partitions_from_wire,
    partitions_to_wire, portion_from_wire, portion_to_wire, read_list_from_wire, read_list_to_wire,
    reason_from_wire, reason_to_wire, snapshot_from_wire, snapshot_to_wire, txn_id_from_wire,
    txn_id_to_wire, txns_from_wire, txns_to_wire, versions_from_wire, versions_to_wire,
    writes_from_wire, writes_to_wire,
};
use super::replication::{
    WireReplicated, message_from_wire, message_to_wire, record_from_wire, record_to_wire,
};
use super::{WireError, WireProtocol, carousel_schema as wire, internal};

fn participants_to_wire(participants: &[Participant]) -> Vec<internal::Participant> {
    participants.iter().map(participant_to_wire).collect()
}

fn participants_from_wire(participants: Vec<internal::Participant>) -> Vec<Participant> {
    participants.into_iter().map(participant_from_wire).collect()
}

fn vote_to_wire(vote: &Vote) -> wire::Vote {
    let vote = match vote {
        Vote::Prepared { versions, proposal } => wire::vote::Vote::Prepared(wire::vote::Prepared {
            versions: versions_to_wire(versions),
            proposal: proposal.0,
        }),
        Vote::Refused(reason) => wire::vote::Vote::Refused(reason_to_wire(*reason)),
        Vote::Committed(timestamp) => wire::vote::Vote::Committed(timestamp.0),
    };
    wire::Vote { vote: Some(vote) }
}

fn vote_from_wire(vote: Option<wire::Vote>) -> Result<Vote, WireError> {
    Ok(match need(vote.and_then(|vote| vote.vote), "Msg.vote")? {
        wire::vote::Vote::Prepared(vote) => Vote::Prepared {
            versions: versions_from_wire(vote.versions)?,
            proposal: Timestamp(vote.proposal),
        },
        wire::vote::Vote::Refused(reason) => Vote::Refused(reason_from_wire(reason)?),
        wire::vote::Vote::Committed(timestamp) => Vote::Committed(Timestamp(timestamp)),
    })
}

pub(super) fn verdict_to_wire(verdict: &Verdict) -> wire::Verdict {
    let verdict = match verdict {
        Verdict::Commit(timestamp, writes) => {
            let (timestamp, writes) = (timestamp.0, writes_to_wire(writes));
            wire::verdict::Verdict::Commit(wire::verdict::Commit { timestamp, writes })
        }
        Verdict::Abort(reason) => wire::verdict::Verdict::Abort(reason_to_wire(*reason)),
    };
    wire::Verdict { verdict: Some(verdict) }
}

pub(super) fn verdict_from_wire(verdict: Option<wire::Verdict>) -> Result<Verdict, WireError> {
    Ok(match need(verdict.and_then(|verdict| verdict.verdict), "Msg.verdict")? {
        wire::verdict::Verdict::Commit(commit) => {
            Verdict::Commit(Timestamp(commit.timestamp), writes_from_wire(commit.writes)?)
        }
        wire::verdict::Verdict::Abort(reason) => Verdict::Abort(reason_from_wire(reason)?),
    })
}

fn listed_to_wire(txn: &TxnId, listed: &Listed) -> wire::Listed {
    let Listed { term, prepared } = listed;
    wire::Listed {
        txn: Some(txn_id_to_wire(txn)),
        term: term.0,
        coordinator: prepared.coordinator.0,
        versions: versions_to_wire(&prepared.versions),
        writes: keys_to_wire(&prepared.writes),
        proposal: prepared.proposal.0,
    }
}

fn listed_from_wire(listed: wire::Listed) -> Result<(TxnId, Listed), WireError> {
    let txn = txn_id_from_wire(&need(listed.txn, "Listed.txn")?);
    let prepared = Prepared {
        coordinator: PartitionId(listed.coordinator),
        versions: versions_from_wire(listed.versions)?,
        writes: keys_from_wire(listed.writes),
        proposal: Timestamp(listed.proposal),
    };
    Ok((txn, Listed { term: Term(listed.term), prepared }))
}

fn query_pending_from_wire(query: wire::msg::QueryPending) -> Result<Msg, WireError> {
    let txns = txns_from_wire(&query.txns)?;
    let coordinators: Vec<PartitionId> = partitions_from_wire(query.coordinators).collect();
    if txns.len() != coordinators.len() {
        let found = format!("{} of {} transactions", coordinators.len(), txns.len());
        return Err(WireError::Value { field: "coordinators", found, wanted: "one of each" });
    }
    let txns = txns.into_iter().zip(coordinators).collect();
    Ok(Msg::QueryPending { partition: PartitionId(query.partition), txns })
}

fn msg_to_wire(msg: &Msg) -> wire::Msg {
    use wire::msg as m;
    use wire::msg::Msg as Wire;
    let wire = match msg {
        Msg::ReadAndPrepare { participant, coordinator, priority, acknowledged_below, .. } => {
            Wire::ReadAndPrepare(m::ReadAndPrepare {
                participant: Some(participant_to_wire(participant)),
                coordinator: coordinator.0,
                priority: priority.0.into(),
                acknowledged_below: *acknowledged_below,
            })
        }
        Msg::ReadResult { partition, reads, .. } => Wire::ReadResult(m::ReadResult {
            partition: partition.0,
            reads: read_list_to_wire(reads),
        }),
        Msg::CoordinatorPrepare { coordinator, participants, acknowledged_below, .. } => {
            Wire::CoordinatorPrepare(m::CoordinatorPrepare {
                coordinator: coordinator.0,
                participants: participants_to_wire(participants),
                acknowledged_below: *acknowledged_below,
            })
        }
        Msg::Commit { coordinator, participants, writes, versions, .. } => {
            Wire::Commit(m::Commit {
                coordinator: coordinator.0,
                participants: partitions_to_wire(participants),
                writes: writes_to_wire(writes),
                versions: versions_to_wire(versions),
            })
        }
        Msg::Abort { coordinator, participants, .. } => Wire::Abort(m::Abort {
            coordinator: coordinator.0,
            participants: partitions_to_wire(participants),
        }),
        Msg::Heartbeat { coordinator, txns } => {
            Wire::Heartbeat(m::Heartbeat { coordinator: coordinator.0, txns: txns_to_wire(txns) })
        }
        Msg::Resolve { coordinator, participants, .. } => Wire::Resolve(m::Resolve {
            coordinator: coordinator.0,
            participants: partitions_to_wire(participants),
        }),
        Msg::Decided { outcome, .. } => {
            Wire::Decided(m::Decided { outcome: Some(outcome_to_wire(*outcome)) })
        }
        Msg::PrepareResult { coordinator, partition, vote, .. } => {
            Wire::PrepareResult(m::PrepareResult {
                coordinator: coordinator.0,
                partition: partition.0,
                vote: Some(vote_to_wire(vote)),
            })
        }
        Msg::Writeback { partition, coordinator, verdict, .. } => Wire::Writeback(m::Writeback {
            partition: partition.0,
            coordinator: coordinator.0,
            verdict: Some(verdict_to_wire(verdict)),
        }),
        Msg::WritebackAck { coordinator, partition, .. } => Wire::WritebackAck(m::WritebackAck {
            coordinator: coordinator.0,
            partition: partition.0,
        }),
        Msg::QueryPrepare { participant, coordinator, .. } => Wire::QueryPrepare(m::QueryPrepare {
            participant: Some(participant_to_wire(participant)),
            coordinator: coordinator.0,
        }),
        Msg::QueryDecision { coordinator, partition, vote, .. } => {
            Wire::QueryDecision(m::QueryDecision {
                coordinator: coordinator.0,
                partition: partition.0,
                vote: Some(vote_to_wire(vote)),
            })
        }
        Msg::MayForget { coordinator, partition, txns } => Wire::MayForget(m::MayForget {
            coordinator: coordinator.0,
            partition: partition.0,
            txns: txns_to_wire(txns),
        }),
        Msg::Forget { coordinator, partition, txns } => Wire::Forget(m::Forget {
            partition: partition.0,
            txns: txns_to_wire(txns),
            coordinator: coordinator.0,
        }),
        Msg::ReadOnly { partition, keys, at_least, .. } => Wire::ReadOnly(m::ReadOnly {
            partition: partition.0,
            keys: keys_to_wire(keys),
            at_least: at_least.0,
        }),
        Msg::ReadOnlyResult { partition, snapshot, is_too_much, .. } => {
            Wire::ReadOnlyResult(m::ReadOnlyResult {
                partition: partition.0,
                snapshot: snapshot.as_ref().map(snapshot_to_wire),
                is_too_much: *is_too_much,
            })
        }
        Msg::FastPrepare {
            participant,
            coordinator,
            priority,
            acknowledged_below,
            timestamp,
            wants_reads,
            ..
        } => Wire::FastPrepare(m::FastPrepare {
            participant: Some(participant_to_wire(participant)),
            coordinator: coordinator.0,
            priority: priority.0.into(),
            acknowledged_below: *acknowledged_below,
            timestamp: timestamp.0,
            wants_reads: *wants_reads,
        }),
        Msg::FollowerReadResult { partition, reads, leader, .. } => {
            Wire::FollowerReadResult(m::FollowerReadResult {
                partition: partition.0,
                reads: read_list_to_wire(reads),
                leader: leader.map(|node| node.0),
            })
        }
        Msg::FastPrepareResult { coordinator, partition, vote, .. } => {
            Wire::FastPrepareResult(m::FastPrepareResult {
                coordinator: coordinator.0,
                partition: partition.0,
                term: vote.term.0,
                vote: Some(vote_to_wire(&vote.vote)),
                voters: nodes_to_wire(vote.voters.iter().flatten()),
            })
        }
        Msg::FastDecided { outcome, .. } => {
            Wire::FastDecided(m::Decided { outcome: Some(outcome_to_wire(*outcome)) })
        }
        Msg::CollectPending { partition, term } => {
            Wire::CollectPending(m::CollectPending { partition: partition.0, term: term.0 })
        }
        Msg::PendingList { partition, term, listed, portion } => {
            Wire::PendingList(m::PendingList {
                partition: partition.0,
                term: term.0,
                listed: listed.iter().map(|(txn, listed)| listed_to_wire(txn, listed)).collect(),
                portion: portion_to_wire(*portion),
            })
        }
        Msg::QueryPending { partition, txns } => {
            let (txns, coordinators): (Vec<TxnId>, Vec<PartitionId>) = txns.iter().copied().unzip();
            Wire::QueryPending(m::QueryPending {
                partition: partition.0,
                txns: txns_to_wire(&txns),
                coordinators: partitions_to_wire(&coordinators),
            })
        }
        Msg::NotLeader { partition, leader, .. } => Wire::NotLeader(m::NotLeader {
            partition: partition.0,
            leader: leader.map(|node| node.0),
        }),
        Msg::Members { partition, since, voters } => Wire::Members(m::Members {
            partition: partition.0,
            since: since.0,
            voters: nodes_to_wire(voters),
        }),
        Msg::Replication { partition, message } => Wire::Replication(m::Replication {
            partition: partition.0,
            message: Some(message_to_wire(message)),
        }),
    };
    let txn = orthodrome_core::Message::txn(msg).as_ref().map(txn_id_to_wire);
    wire::Msg { txn, msg: Some(wire) }
}

fn msg_from_wire(msg: wire::Msg) -> Result<Msg, WireError> {
    use wire::msg::Msg as Wire;
    let known = msg.txn.as_ref().map(txn_id_from_wire);
    let txn = || need(known, "Msg.txn");
    Ok(match need(msg.msg, "Msg.msg")? {
        Wire::ReadAndPrepare(m) => Msg::ReadAndPrepare {
            txn: txn()?,
            participant: participant_from_wire(need(m.participant, "Msg.participant")?),
            coordinator: PartitionId(m.coordinator),
            priority: Priority(narrow(m.priority, "Msg.priority")?),
            acknowledged_below: m.acknowledged_below,
        },
        Wire::ReadResult(m) => Msg::ReadResult {
            txn: txn()?,
            partition: PartitionId(m.partition),
            reads: read_list_from_wire(m.reads)?,
        },
        Wire::CoordinatorPrepare(m) => Msg::CoordinatorPrepare {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            participants: participants_from_wire(m.participants),
            acknowledged_below: m.acknowledged_below,
        },
        Wire::Commit(m) => Msg::Commit {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            participants: partitions_from_wire(m.participants).collect(),
            writes: writes_from_wire(m.writes)?,
            versions: versions_from_wire(m.versions)?,
        },
        Wire::Abort(m) => Msg::Abort {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            participants: partitions_from_wire(m.participants).collect(),
        },
        Wire::Heartbeat(m) => Msg::Heartbeat {
            coordinator: PartitionId(m.coordinator),
            txns: txns_from_wire(&m.txns)?,
        },
        Wire::Resolve(m) => Msg::Resolve {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            participants: partitions_from_wire(m.participants).collect(),
        },
        Wire::Decided(m) => Msg::Decided {
            txn: txn()?,
            outcome: outcome_from_wire(need(m.outcome, "Msg.outcome")?)?,
        },
        Wire::PrepareResult(m) => Msg::PrepareResult {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            partition: PartitionId(m.partition),
            vote: vote_from_wire(m.vote)?,
        },
        Wire::Writeback(m) => Msg::Writeback {
            txn: txn()?,
            partition: PartitionId(m.partition),
            coordinator: PartitionId(m.coordinator),
            verdict: verdict_from_wire(m.verdict)?,
        },
        Wire::WritebackAck(m) => Msg::WritebackAck {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            partition: PartitionId(m.partition),
        },
        Wire::QueryPrepare(m) => Msg::QueryPrepare {
            txn: txn()?,
            participant: participant_from_wire(need(m.participant, "Msg.participant")?),
            coordinator: PartitionId(m.coordinator),
        },
        Wire::QueryDecision(m) => Msg::QueryDecision {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            partition: PartitionId(m.partition),
            vote: vote_from_wire(m.vote)?,
        },
        Wire::MayForget(m) => Msg::MayForget {
            coordinator: PartitionId(m.coordinator),
            partition: PartitionId(m.partition),
            txns: txns_from_wire(&m.txns)?,
        },
        Wire::Forget(m) => {
            let txns = txns_from_wire(&m.txns)?;
            let (coordinator, partition) = (PartitionId(m.coordinator), PartitionId(m.partition));
            Msg::Forget { coordinator, partition, txns }
        }
        Wire::ReadOnly(m) => Msg::ReadOnly {
            txn: txn()?,
            partition: PartitionId(m.partition),
            keys: keys_from_wire(m.keys),
            at_least: Timestamp(m.at_least),
        },
        Wire::ReadOnlyResult(m) => Msg::ReadOnlyResult {
            txn: txn()?,
            partition: PartitionId(m.partition),
            snapshot: m.snapshot.map(snapshot_from_wire).transpose()?,
            is_too_much: m.is_too_much,
        },
        Wire::FastPrepare(m) => Msg::FastPrepare {
            txn: txn()?,
            participant: participant_from_wire(need(m.participant, "Msg.participant")?),
            coordinator: PartitionId(m.coordinator),
            priority: Priority(narrow(m.priority, "Msg.priority")?),
            acknowledged_below: m.acknowledged_below,
            timestamp: Timestamp(m.timestamp),
            wants_reads: m.wants_reads,
        },
        Wire::FollowerReadResult(m) => Msg::FollowerReadResult {
            txn: txn()?,
            partition: PartitionId(m.partition),
            reads: read_list_from_wire(m.reads)?,
            leader: m.leader.map(NodeId),
        },
        Wire::FastPrepareResult(m) => {
            let voters: Vec<NodeId> = nodes_from_wire(m.voters).collect();
            let vote = FastVote {
                term: Term(m.term),
                vote: vote_from_wire(m.vote)?,
                voters: (!voters.is_empty()).then_some(voters),
            };
            let (coordinator, partition) = (PartitionId(m.coordinator), PartitionId(m.partition));
            Msg::FastPrepareResult { txn: txn()?, coordinator, partition, vote }
        }
        Wire::FastDecided(m) => Msg::FastDecided {
            txn: txn()?,
            outcome: outcome_from_wire(need(m.outcome, "Msg.outcome")?)?,
        },
        Wire::CollectPending(m) => {
            Msg::CollectPending { partition: PartitionId(m.partition), term: Term(m.term) }
        }
        Wire::PendingList(m) => Msg::PendingList {
            partition: PartitionId(m.partition),
            term: Term(m.term),
            listed: m.listed.into_iter().map(listed_from_wire).collect::<Result<_, _>>()?,
            portion: portion_from_wire(m.portion),
        },
        Wire::QueryPending(m) => query_pending_from_wire(m)?,
        Wire::NotLeader(m) => Msg::NotLeader {
            partition: PartitionId(m.partition),
            leader: m.leader.map(NodeId),
            txn: known,
        },
        Wire::Members(m) => Msg::Members {
            partition: PartitionId(m.partition),
            since: Index(m.since),
            voters: nodes_from_wire(m.voters).collect(),
        },
        Wire::Replication(m) => Msg::Replication {
            partition: PartitionId(m.partition),
            message: message_from_wire(need(m.message, "Replication.message")?)?,
        },
    })
}

fn command_to_wire(command: &Command) -> wire::Command {
    use wire::command as c;
    use wire::command::Command as Wire;
    let (txn, command) = match command {
        Command::Prepare { txn, coordinator, versions, writes, proposal, acknowledged_below } => (
            Some(txn),
            Wire::Prepare(c::Prepare {
                coordinator: coordinator.0,
                versions: versions_to_wire(versions),
                writes: keys_to_wire(writes),
                proposal: proposal.0,
                acknowledged_below: *acknowledged_below,
            }),
        ),
        Command::Refuse { txn, coordinator, reason } => {
            let (coordinator, reason) = (coordinator.0, reason_to_wire(*reason));
            (Some(txn), Wire::Refuse(c::Refuse { coordinator, reason }))
        }
        Command::End { txn, coordinator, verdict } => {
            let verdict = Some(verdict_to_wire(verdict));
            (Some(txn), Wire::End(c::End { coordinator: coordinator.0, verdict }))
        }
        Command::Coordinate { txn, participants, acknowledged_below } => (
            Some(txn),
            Wire::Coordinate(c::Coordinate {
                participants: participants_to_wire(participants),
                acknowledged_below: *acknowledged_below,
            }),
        ),
        Command::RequestCommit { txn, participants, writes, versions } => (
            Some(txn),
            Wire::RequestCommit(c::RequestCommit {
                participants: partitions_to_wire(participants),
                writes: writes_to_wire(writes),
                versions: versions_to_wire(versions),
            }),
        ),
        Command::Decide { txn, outcome, unilateral, participants } => (
            Some(txn),
            Wire::Decide(c::Decide {
                outcome: Some(outcome_to_wire(*outcome)),
                unilateral: *unilateral,
                participants: partitions_to_wire(participants),
            }),
        ),
        Command::Settle(txns) => (None, Wire::Settle(c::Txns { txns: txns_to_wire(txns) })),
        Command::Forget(txns) => (None, Wire::Forget(c::Txns { txns: txns_to_wire(txns) })),
        Command::Acknowledge(clients) => {
            let clients = acknowledged_to_wire(clients.iter().copied());
            (None, Wire::Acknowledge(c::Acknowledge { clients }))
        }
        Command::Ceiling(timestamp) => (None, Wire::Ceiling(timestamp.0)),
    };
    wire::Command { txn: txn.map(txn_id_to_wire), command: Some(command) }
}

fn command_from_wire(command: wire::Command) -> Result<Command, WireError> {
    use wire::command::Command as Wire;
    let known = command.txn.as_ref().map(txn_id_from_wire);
    let txn = || need(known, "Command.txn");
    Ok(match need(command.command, "Command.command")? {
        Wire::Prepare(c) => Command::Prepare {
            txn: txn()?,
            coordinator: PartitionId(c.coordinator),
            versions: versions_from_wire(c.versions)?,
            writes: keys_from_wire(c.writes),
            proposal: Timestamp(c.proposal),
            acknowledged_below: c.acknowledged_below,
        },
        Wire::Refuse(c) => Command::Refuse {
            txn: txn()?,
            coordinator: PartitionId(c.coordinator),
            reason: reason_from_wire(c.reason)?,
        },
        Wire::End(c) => Command::End {
            txn: txn()?,
            coordinator: PartitionId(c.coordinator),
            verdict: verdict_from_wire(c.verdict)?,
        },
        Wire::Coordinate(c) => Command::Coordinate {
            txn: txn()?,
            participants: participants_from_wire(c.participants),
            acknowledged_below: c.acknowledged_below,
        },
        Wire::RequestCommit(c) => Command::RequestCommit {
            txn: txn()?,
            participants: partitions_from_wire(c.participants).collect(),
            writes: writes_from_wire(c.writes)?,
            versions: versions_from_wire(c.versions)?,
        },
        Wire::Decide(c) => Command::Decide {
            txn: txn()?,
            outcome: outcome_from_wire(need(c.outcome, "Decide.outcome")?)?,
            unilateral: c.unilateral,
            participants: partitions_from_wire(c.participants).collect(),
        },
        Wire::Settle(c) => Command::Settle(txns_from_wire(&c.txns)?),
        Wire::Forget(c) => Command::Forget(txns_from_wire(&c.txns)?),
        Wire::Acknowledge(c) => Command::Acknowledge(acknowledged_from_wire(c.clients).collect()),
        Wire::Ceiling(timestamp) => Command::Ceiling(Timestamp(timestamp)),
    })
}

fn state_to_wire(state: &State) -> wire::State {
    use wire::state as s;
    let State { applied, prepared, ended, coordinated, settled, floor, ceiling, acknowledged } =
        state;
    let prepared = prepared.iter().map(|(txn, prepared)| s::Prepared {
        txn: Some(txn_id_to_wire(txn)),
        coordinator: prepared.coordinator.0,
        versions: versions_to_wire(&prepared.versions),
        writes: keys_to_wire(&prepared.writes),
        proposal: prepared.proposal.0,
    });
    let ended = ended.iter().map(|(txn, ended)| s::Ended {
        txn: Some(txn_id_to_wire(txn)),
        coordinator: ended.coordinator.0,
        outcome: Some(outcome_to_wire(ended.outcome)),
        is_forgettable: ended.is_forgettable,
    });
    let coordinated = coordinated.iter().map(|(txn, entry)| s::Coordinated {
        txn: Some(txn_id_to_wire(txn)),
        participants: participants_to_wire(&entry.participants),
        request: entry.request.as_ref().map(|request| s::Request {
            writes: writes_to_wire(&request.writes),
            versions: versions_to_wire(&request.versions),
        }),
        decision: entry.decision.map(outcome_to_wire),
    });
    let settled = settled.iter().map(|(txn, outcome)| s::Settled {
        txn: Some(txn_id_to_wire(txn)),
        outcome: Some(outcome_to_wire(*outcome)),
    });
    let acknowledged = acknowledged.iter().map(|(&client, &below)| (client, below));
    wire::State {
        applied: applied.0,
        prepared: prepared.collect(),
        ended: ended.collect(),
        coordinated: coordinated.collect(),
        settled: settled.collect(),
        floor: floor.0,
        ceiling: ceiling.0,
        acknowledged: acknowledged_to_wire(acknowledged),
    }
}

fn state_from_wire(state: wire::State) -> Result<State, WireError> {
    let txn =
        |txn: Option<internal::TxnId>| need(txn, "State.txn").map(|txn| txn_id_from_wire(&txn));
    let mut prepared = BTreeMap::new();
    for entry in state.prepared {
        let value = Prepared {
            coordinator: PartitionId(entry.coordinator),
            versions: versions_from_wire(entry.versions)?,
            writes: keys_from_wire(entry.writes),
            proposal: Timestamp(entry.proposal),
        };
        prepared.insert(txn(entry.txn)?, value);
    }
    let mut ended = BTreeMap::new();
    for entry in state.ended {
        let value = Ended {
            coordinator: PartitionId(entry.coordinator),
            outcome: outcome_from_wire(need(entry.outcome, "Ended.outcome")?)?,
            is_forgettable: entry.is_forgettable,
        };
        ended.insert(txn(entry.txn)?, value);
    }
    let mut coordinated = BTreeMap::new();
    for entry in state.coordinated {
        let request = entry.request.map(|request| {
            let writes = writes_from_wire(request.writes)?;
            Ok::<_, WireError>(Request { writes, versions: versions_from_wire(request.versions)? })
        });
        let value = Coordinated {
            participants: participants_from_wire(entry.participants),
            request: request.transpose()?,
            decision: entry.decision.map(outcome_from_wire).transpose()?,
        };
        coordinated.insert(txn(entry.txn)?, value);
    }
    let mut settled = BTreeMap::new();
    for entry in state.settled {
        let outcome = outcome_from_wire(need(entry.outcome, "Settled.outcome")?)?;
        settled.insert(txn(entry.txn)?, outcome);
    }
    Ok(State {
        applied: Index(state.applied),
        prepared,
        ended,
        coordinated,
        settled,
        floor: Timestamp(state.floor),
        ceiling: Timestamp(state.ceiling),
        acknowledged: acknowledged_from_wire(state.acknowledged).collect(),
    })
}

impl WireReplicated for Log {
    fn encode_command(command: &Command) -> Bytes {
        command_to_wire(command).encode_to_vec().into()
    }

    fn decode_command(bytes: Bytes) -> Result<Command, WireError> {
        command_from_wire(wire::Command::decode(bytes)?)
    }

    fn encode_chunk(chunk: &Chunk<State>) -> Bytes {
        let Chunk { state, keys } = chunk;
        let state = state.as_ref().map(|state| state_to_wire(state));
        let keys = keys.iter().map(key_versions_to_wire).collect();
        wire::Chunk { state, keys }.encode_to_vec().into()
    }

    fn decode_chunk(bytes: Bytes) -> Result<Chunk<State>, WireError> {
        let chunk = wire::Chunk::decode(bytes)?;
        let state = chunk.state.map(state_from_wire).transpose()?.map(Box::new);
        let keys = chunk.keys.into_iter().map(key_versions_from_wire);
        Ok(Chunk { state, keys: keys.collect::<Result<_, _>>()? })
    }
}

fn record_bytes(record: &Record, out: &mut BytesMut) {
    let (partition, record) = match record {
        Record::Own(partition, entry) => {
            let (txn, listed) = entry.as_ref();
            (partition, wire::record::Record::Pending(listed_to_wire(txn, listed)))
        }
        Record::State(partition, state) => {
            (partition, wire::record::Record::State(state_to_wire(state)))
        }
        Record::Replication(partition, record) => {
            (partition, wire::record::Record::Replication(record_to_wire(record)))
        }
    };
    wire::Record { partition: partition.0, record: Some(record) }.encode_raw(out);
}

fn record_from_bytes(bytes: Bytes) -> Result<Record, WireError> {
    let record = wire::Record::decode(bytes)?;
    let partition = PartitionId(record.partition);
    Ok(match need(record.record, "Record.record")? {
        wire::record::Record::Pending(listed) => {
            Record::Own(partition, Box::new(listed_from_wire(listed)?))
        }
        wire::record::Record::State(state) => {
            Record::State(partition, Box::new(state_from_wire(state)?))
        }
        wire::record::Record::Replication(record) => {
            Record::Replication(partition, record_from_wire(record)?)
        }
    })
}

impl WireProtocol for Carousel {
    fn encode_msg(msg: &Msg, out: &mut BytesMut) {
        msg_to_wire(msg).encode_raw(out);
    }

    fn decode_msg(bytes: Bytes) -> Result<Msg, WireError> {
        msg_from_wire(wire::Msg::decode(bytes)?)
    }

    fn encode_record(record: &Record, out: &mut BytesMut) {
        record_bytes(record, out);
    }

    fn decode_record(bytes: Bytes) -> Result<Record, WireError> {
        record_from_bytes(bytes)
    }
}
