//! Messages and records of two-phase locking; the three variants share them.

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use orthodrome_core::txn::{Outcome, Priority};
use orthodrome_core::{NodeId, PartitionId, Timestamp, TxnId};
use orthodrome_protocols::replication::Index;
use orthodrome_protocols::two_phase_locking::{
    Chunk, Command, Decided, Locking, Log, Msg, Prepared, Rank, Record, State, Vote,
};
use prost::Message as _;

use super::common::{
    acknowledged_from_wire, acknowledged_to_wire, decided_from_wire, key_versions_from_wire,
    key_versions_to_wire, keys_from_wire, keys_to_wire, narrow, need, nodes_from_wire,
    nodes_to_wire, outcome_from_wire, outcome_to_wire, participant_from_wire, participant_to_wire,
    partitions_from_wire, partitions_to_wire, read_list_from_wire, read_list_to_wire,
    reason_from_wire, reason_to_wire, snapshot_from_wire, snapshot_to_wire, txn_id_from_wire,
    txn_id_to_wire, txns_from_wire, txns_to_wire, versions_from_wire, versions_to_wire,
    writes_from_wire, writes_to_wire,
};
use super::replication::{
    WireReplicated, message_from_wire, message_to_wire, record_from_wire, record_to_wire,
};
use super::{WireError, WireProtocol, internal, two_phase_locking_schema as wire};

fn vote_to_wire(vote: Vote) -> wire::Vote {
    let vote = match vote {
        Vote::Prepared { proposal } => wire::vote::Vote::Prepared(proposal.0),
        Vote::Refused(reason) => wire::vote::Vote::Refused(reason_to_wire(reason)),
    };
    wire::Vote { vote: Some(vote) }
}

fn vote_from_wire(vote: Option<wire::Vote>) -> Result<Vote, WireError> {
    Ok(match need(vote.and_then(|vote| vote.vote), "Msg.vote")? {
        wire::vote::Vote::Prepared(proposal) => Vote::Prepared { proposal: Timestamp(proposal) },
        wire::vote::Vote::Refused(reason) => Vote::Refused(reason_from_wire(reason)?),
    })
}

fn rank_to_wire(rank: Rank) -> wire::Rank {
    wire::Rank { priority: rank.priority.0.into(), age: rank.age.0 }
}

fn rank_from_wire(rank: Option<wire::Rank>) -> Result<Rank, WireError> {
    let rank = need(rank, "Msg.rank")?;
    let priority = Priority(narrow(rank.priority, "Rank.priority")?);
    Ok(Rank { priority, age: Timestamp(rank.age) })
}

fn msg_to_wire(msg: &Msg) -> wire::Msg {
    use wire::msg as m;
    use wire::msg::Msg as Wire;
    let wire = match msg {
        Msg::Lock { round, rank, participant, .. } => Wire::Lock(m::Lock {
            round: *round,
            rank: Some(rank_to_wire(*rank)),
            participant: Some(participant_to_wire(participant)),
        }),
        Msg::Locked { round, partition, reads, .. } => Wire::Locked(m::Locked {
            round: *round,
            partition: partition.0,
            reads: read_list_to_wire(reads),
        }),
        Msg::Waiting { partition, .. } => Wire::Waiting(m::Waiting { partition: partition.0 }),
        Msg::Wounded { partition, reason, .. } => {
            Wire::Wounded(m::Wounded { partition: partition.0, reason: reason_to_wire(*reason) })
        }
        Msg::KeepAlive { partition, txns, waiting } => Wire::KeepAlive(m::KeepAlive {
            partition: partition.0,
            txns: txns_to_wire(txns),
            waiting: txns_to_wire(waiting),
        }),
        Msg::Release { partition, .. } => Wire::Release(m::Release { partition: partition.0 }),
        Msg::Commit { coordinator, participants, versions, writes, acknowledged_below, .. } => {
            Wire::Commit(m::Commit {
                coordinator: coordinator.0,
                participants: partitions_to_wire(participants),
                versions: versions_to_wire(versions),
                writes: writes_to_wire(writes),
                acknowledged_below: *acknowledged_below,
            })
        }
        Msg::Prepare { partition, coordinator, versions, writes, acknowledged_below, .. } => {
            Wire::Prepare(m::Prepare {
                partition: partition.0,
                coordinator: coordinator.0,
                versions: versions_to_wire(versions),
                writes: writes_to_wire(writes),
                acknowledged_below: *acknowledged_below,
            })
        }
        Msg::Vote { coordinator, partition, vote, .. } => Wire::Vote(m::VoteCast {
            coordinator: coordinator.0,
            partition: partition.0,
            vote: Some(vote_to_wire(*vote)),
        }),
        Msg::Decided { outcome, .. } => {
            Wire::Decided(m::Decided { outcome: Some(outcome_to_wire(*outcome)) })
        }
        Msg::Decision { partition, coordinator, outcome, .. } => Wire::Decision(m::Decision {
            partition: partition.0,
            coordinator: coordinator.0,
            outcome: Some(outcome_to_wire(*outcome)),
        }),
        Msg::DecisionAck { coordinator, partition, .. } => {
            Wire::DecisionAck(m::DecisionAck { coordinator: coordinator.0, partition: partition.0 })
        }
        Msg::QueryDecision { coordinator, partition, proposal, .. } => {
            Wire::QueryDecision(m::QueryDecision {
                coordinator: coordinator.0,
                partition: partition.0,
                proposal: proposal.0,
            })
        }
        Msg::Resolve { coordinator, participants, .. } => Wire::Resolve(m::Resolve {
            coordinator: coordinator.0,
            participants: partitions_to_wire(participants),
        }),
        Msg::ReadOnly { partition, keys, at_least, .. } => Wire::ReadOnly(m::ReadOnly {
            partition: partition.0,
            keys: keys_to_wire(keys),
            at_least: at_least.0,
        }),
        Msg::ReadOnlyResult { partition, snapshot, is_too_much, .. } => {
            Wire::ReadOnlyResult(m::ReadOnlyResult {
                partition: partition.0,
                snapshot: Some(snapshot_to_wire(snapshot)),
                is_too_much: *is_too_much,
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
        Wire::Lock(m) => Msg::Lock {
            txn: txn()?,
            round: m.round,
            rank: rank_from_wire(m.rank)?,
            participant: participant_from_wire(need(m.participant, "Msg.participant")?),
        },
        Wire::Locked(m) => Msg::Locked {
            txn: txn()?,
            round: m.round,
            partition: PartitionId(m.partition),
            reads: read_list_from_wire(m.reads)?,
        },
        Wire::Waiting(m) => Msg::Waiting { txn: txn()?, partition: PartitionId(m.partition) },
        Wire::Wounded(m) => Msg::Wounded {
            txn: txn()?,
            partition: PartitionId(m.partition),
            reason: reason_from_wire(m.reason)?,
        },
        Wire::KeepAlive(m) => Msg::KeepAlive {
            partition: PartitionId(m.partition),
            txns: txns_from_wire(&m.txns)?,
            waiting: txns_from_wire(&m.waiting)?,
        },
        Wire::Release(m) => Msg::Release { txn: txn()?, partition: PartitionId(m.partition) },
        Wire::Commit(m) => Msg::Commit {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            participants: partitions_from_wire(m.participants).collect(),
            versions: versions_from_wire(m.versions)?,
            writes: writes_from_wire(m.writes)?,
            acknowledged_below: m.acknowledged_below,
        },
        Wire::Prepare(m) => Msg::Prepare {
            txn: txn()?,
            partition: PartitionId(m.partition),
            coordinator: PartitionId(m.coordinator),
            versions: versions_from_wire(m.versions)?,
            writes: writes_from_wire(m.writes)?,
            acknowledged_below: m.acknowledged_below,
        },
        Wire::Vote(m) => Msg::Vote {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            partition: PartitionId(m.partition),
            vote: vote_from_wire(m.vote)?,
        },
        Wire::Decided(m) => Msg::Decided {
            txn: txn()?,
            outcome: outcome_from_wire(need(m.outcome, "Msg.outcome")?)?,
        },
        Wire::Decision(m) => Msg::Decision {
            txn: txn()?,
            partition: PartitionId(m.partition),
            coordinator: PartitionId(m.coordinator),
            outcome: decided_from_wire(m.outcome)?,
        },
        Wire::DecisionAck(m) => Msg::DecisionAck {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            partition: PartitionId(m.partition),
        },
        Wire::QueryDecision(m) => Msg::QueryDecision {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            partition: PartitionId(m.partition),
            proposal: Timestamp(m.proposal),
        },
        Wire::Resolve(m) => Msg::Resolve {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            participants: partitions_from_wire(m.participants).collect(),
        },
        Wire::ReadOnly(m) => Msg::ReadOnly {
            txn: txn()?,
            partition: PartitionId(m.partition),
            keys: keys_from_wire(m.keys),
            at_least: Timestamp(m.at_least),
        },
        Wire::ReadOnlyResult(m) => Msg::ReadOnlyResult {
            txn: txn()?,
            partition: PartitionId(m.partition),
            snapshot: snapshot_from_wire(need(m.snapshot, "Msg.snapshot")?)?,
            is_too_much: m.is_too_much,
        },
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
            message: message_from_wire(need(m.message, "Msg.message")?)?,
        },
    })
}

fn command_to_wire(command: &Command) -> wire::Command {
    use wire::command as c;
    use wire::command::Command as Wire;
    let (txn, wire) = match command {
        Command::Prepare { txn, coordinator, reads, writes, proposal, acknowledged_below } => {
            let prepare = c::Prepare {
                coordinator: coordinator.0,
                reads: keys_to_wire(reads),
                writes: writes_to_wire(writes),
                proposal: proposal.0,
                acknowledged_below: *acknowledged_below,
            };
            (Some(txn), Wire::Prepare(prepare))
        }
        Command::End { txn, coordinator, outcome } => {
            let outcome = Some(outcome_to_wire(*outcome));
            (Some(txn), Wire::End(c::End { coordinator: coordinator.0, outcome }))
        }
        Command::Decide { txn, outcome, participants, acknowledged_below } => {
            let decide = c::Decide {
                outcome: Some(outcome_to_wire(*outcome)),
                participants: partitions_to_wire(participants),
                acknowledged_below: *acknowledged_below,
            };
            (Some(txn), Wire::Decide(decide))
        }
        Command::Settle(txns) => (None, Wire::Settle(c::Settle { txns: txns_to_wire(txns) })),
        Command::Acknowledge(clients) => {
            let clients = acknowledged_to_wire(clients.iter().copied());
            (None, Wire::Acknowledge(c::Acknowledge { clients }))
        }
        Command::Ceiling(timestamp) => (None, Wire::Ceiling(timestamp.0)),
    };
    wire::Command { txn: txn.map(txn_id_to_wire), command: Some(wire) }
}

fn command_from_wire(command: wire::Command) -> Result<Command, WireError> {
    use wire::command::Command as Wire;
    let known = command.txn.as_ref().map(txn_id_from_wire);
    let txn = || need(known, "Command.txn");
    Ok(match need(command.command, "Command.command")? {
        Wire::Prepare(c) => Command::Prepare {
            txn: txn()?,
            coordinator: PartitionId(c.coordinator),
            reads: keys_from_wire(c.reads),
            writes: writes_from_wire(c.writes)?,
            proposal: Timestamp(c.proposal),
            acknowledged_below: c.acknowledged_below,
        },
        Wire::End(c) => Command::End {
            txn: txn()?,
            coordinator: PartitionId(c.coordinator),
            outcome: decided_from_wire(c.outcome)?,
        },
        Wire::Decide(c) => Command::Decide {
            txn: txn()?,
            outcome: decided_from_wire(c.outcome)?,
            participants: partitions_from_wire(c.participants).collect(),
            acknowledged_below: c.acknowledged_below,
        },
        Wire::Settle(c) => Command::Settle(txns_from_wire(&c.txns)?),
        Wire::Acknowledge(c) => Command::Acknowledge(acknowledged_from_wire(c.clients).collect()),
        Wire::Ceiling(timestamp) => Command::Ceiling(Timestamp(timestamp)),
    })
}

fn ended_to_wire((txn, outcome): (&TxnId, &Outcome)) -> wire::state::Ended {
    let txn = Some(txn_id_to_wire(txn));
    wire::state::Ended { txn, outcome: Some(outcome_to_wire(*outcome)) }
}

fn ended_from_wire(ended: wire::state::Ended) -> Result<(TxnId, Outcome), WireError> {
    let txn = txn_id_from_wire(&need(ended.txn, "State.txn")?);
    Ok((txn, decided_from_wire(ended.outcome)?))
}

fn state_to_wire(state: &State) -> wire::State {
    use wire::state as s;
    let State { applied, prepared, ended, decided, settled, floor, ceiling, acknowledged } = state;
    let prepared = prepared.iter().map(|(txn, prepared)| s::Prepared {
        txn: Some(txn_id_to_wire(txn)),
        coordinator: prepared.coordinator.0,
        reads: keys_to_wire(&prepared.reads),
        writes: writes_to_wire(&prepared.writes),
        proposal: prepared.proposal.0,
    });
    let decided = decided.iter().map(|(txn, decided)| s::Decided {
        txn: Some(txn_id_to_wire(txn)),
        outcome: Some(outcome_to_wire(decided.outcome)),
        participants: partitions_to_wire(&decided.participants),
    });
    let acknowledged = acknowledged.iter().map(|(&client, &below)| (client, below));
    wire::State {
        applied: applied.0,
        prepared: prepared.collect(),
        ended: ended.iter().map(ended_to_wire).collect(),
        decided: decided.collect(),
        settled: settled.iter().map(ended_to_wire).collect(),
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
            reads: keys_from_wire(entry.reads),
            writes: writes_from_wire(entry.writes)?,
            proposal: Timestamp(entry.proposal),
        };
        prepared.insert(txn(entry.txn)?, value);
    }
    let mut decided = BTreeMap::new();
    for entry in state.decided {
        let value = Decided {
            outcome: decided_from_wire(entry.outcome)?,
            participants: partitions_from_wire(entry.participants).collect(),
        };
        decided.insert(txn(entry.txn)?, value);
    }
    Ok(State {
        applied: Index(state.applied),
        prepared,
        ended: state.ended.into_iter().map(ended_from_wire).collect::<Result<_, _>>()?,
        decided,
        settled: state.settled.into_iter().map(ended_from_wire).collect::<Result<_, _>>()?,
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

impl WireProtocol for Locking {
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
            Record::Replication(partition, record) => {
                (partition, wire::record::Record::Replication(record_to_wire(record)))
            }
            Record::Own(_, none) => match **none {},
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
            wire::record::Record::Replication(record) => {
                Record::Replication(partition, record_from_wire(record)?)
            }
        })
    }
}
