//! Messages and records of Natto; its protocols share them.

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use orthodrome_core::time::{Duration, nanos};
use orthodrome_core::txn::Priority;
use orthodrome_core::{NodeId, PartitionId, Timestamp};
use orthodrome_protocols::natto::{
    Chunk, Command, Coordinated, Elsewhere, Ended, Log, Msg, Natto, Prepared, Record, Request,
    State, Turn, Vote,
};
use orthodrome_protocols::replication::Index;
use prost::Message as _;

use super::carousel::{verdict_from_wire, verdict_to_wire};
use super::common::{
    acknowledged_from_wire, acknowledged_to_wire, key_versions_from_wire, key_versions_to_wire,
    keys_from_wire, keys_to_wire, narrow, need, nodes_from_wire, nodes_to_wire, outcome_from_wire,
    outcome_to_wire, participant_from_wire, participant_to_wire, partitions_from_wire,
    partitions_to_wire, read_list_from_wire, read_list_to_wire, reason_from_wire, reason_to_wire,
    snapshot_from_wire, snapshot_to_wire, txn_id_from_wire, txn_id_to_wire, txns_from_wire,
    txns_to_wire, versions_from_wire, versions_to_wire, writes_from_wire, writes_to_wire,
};
use super::replication::{
    WireReplicated, message_from_wire, message_to_wire, record_from_wire, record_to_wire,
};
use super::{WireError, WireProtocol, internal, natto_schema as wire};

fn turn_to_wire(turn: Turn) -> wire::Turn {
    wire::Turn { timestamp: turn.timestamp.0, priority: turn.priority.0.into() }
}

fn turn_from_wire(turn: Option<wire::Turn>) -> Result<Turn, WireError> {
    let turn = need(turn, "Turn")?;
    let priority = Priority(narrow(turn.priority, "Turn.priority")?);
    Ok(Turn { timestamp: Timestamp(turn.timestamp), priority })
}

fn elsewhere_to_wire(elsewhere: &Elsewhere) -> wire::Elsewhere {
    let Elsewhere { participant, arrives } = elsewhere;
    wire::Elsewhere { participant: Some(participant_to_wire(participant)), arrives: arrives.0 }
}

fn elsewhere_from_wire(elsewhere: wire::Elsewhere) -> Result<Elsewhere, WireError> {
    let participant = participant_from_wire(need(elsewhere.participant, "Elsewhere")?);
    Ok(Elsewhere { participant, arrives: Timestamp(elsewhere.arrives) })
}

fn vote_to_wire(vote: &Vote) -> wire::Vote {
    let vote = match vote {
        Vote::Prepared { versions, proposal, unless, refused } => {
            wire::vote::Vote::Prepared(wire::vote::Prepared {
                versions: versions_to_wire(versions),
                proposal: proposal.0,
                unless: txns_to_wire(unless),
                refused: txns_to_wire(refused),
            })
        }
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
            unless: txns_from_wire(&vote.unless)?,
            refused: txns_from_wire(&vote.refused)?,
        },
        wire::vote::Vote::Refused(reason) => Vote::Refused(reason_from_wire(reason)?),
        wire::vote::Vote::Committed(timestamp) => Vote::Committed(Timestamp(timestamp)),
    })
}

fn msg_to_wire(msg: &Msg) -> wire::Msg {
    use wire::msg as m;
    use wire::msg::Msg as Wire;
    let wire = match msg {
        Msg::ReadAndPrepare {
            participant,
            coordinator,
            turn,
            lasts,
            elsewhere,
            acknowledged_below,
            ..
        } => Wire::ReadAndPrepare(m::ReadAndPrepare {
            participant: Some(participant_to_wire(participant)),
            coordinator: coordinator.0,
            turn: Some(turn_to_wire(*turn)),
            lasts_ns: nanos(*lasts),
            elsewhere: elsewhere.iter().map(elsewhere_to_wire).collect(),
            acknowledged_below: *acknowledged_below,
        }),
        Msg::ReadResult { partition, reads, is_provisional, .. } => {
            Wire::ReadResult(m::ReadResult {
                partition: partition.0,
                reads: read_list_to_wire(reads),
                is_provisional: *is_provisional,
            })
        }
        Msg::ForwardRead { client, partition, of, coordinator, reads, .. } => {
            Wire::ForwardRead(m::ForwardRead {
                client: client.0,
                partition: partition.0,
                of: Some(txn_id_to_wire(of)),
                coordinator: coordinator.0,
                reads: read_list_to_wire(reads),
            })
        }
        Msg::ForwardedRead { partition, reads, .. } => Wire::ForwardedRead(m::ForwardedRead {
            partition: partition.0,
            reads: read_list_to_wire(reads),
        }),
        Msg::CoordinatorPrepare { coordinator, participants, acknowledged_below, .. } => {
            Wire::CoordinatorPrepare(m::CoordinatorPrepare {
                coordinator: coordinator.0,
                participants: partitions_to_wire(participants),
                acknowledged_below: *acknowledged_below,
            })
        }
        Msg::Commit {
            coordinator, participants, writes, versions, round, is_provisional, ..
        } => Wire::Commit(m::Commit {
            coordinator: coordinator.0,
            participants: partitions_to_wire(participants),
            writes: writes_to_wire(writes),
            versions: versions_to_wire(versions),
            round: *round,
            is_provisional: *is_provisional,
        }),
        Msg::Abort { coordinator, participants, round, is_stale, .. } => Wire::Abort(m::Abort {
            coordinator: coordinator.0,
            participants: partitions_to_wire(participants),
            round: *round,
            is_stale: *is_stale,
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
        Msg::QueryPrepare { partition, coordinator, .. } => Wire::QueryPrepare(m::QueryPrepare {
            partition: partition.0,
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
                snapshot: Some(snapshot_to_wire(snapshot)),
                is_too_much: *is_too_much,
            })
        }
        Msg::Waiting { partition, .. } => Wire::Waiting(m::Waiting { partition: partition.0 }),
        Msg::Probe { clock } => Wire::Probe(m::Probe { clock: clock.0 }),
        Msg::ProbeReply { delay } => Wire::ProbeReply(m::ProbeReply { delay: *delay }),
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
            turn: turn_from_wire(m.turn)?,
            lasts: Duration::from_nanos(m.lasts_ns),
            elsewhere: m
                .elsewhere
                .into_iter()
                .map(elsewhere_from_wire)
                .collect::<Result<_, _>>()?,
            acknowledged_below: m.acknowledged_below,
        },
        Wire::ReadResult(m) => Msg::ReadResult {
            txn: txn()?,
            partition: PartitionId(m.partition),
            reads: read_list_from_wire(m.reads)?,
            is_provisional: m.is_provisional,
        },
        Wire::ForwardRead(m) => Msg::ForwardRead {
            txn: txn()?,
            client: NodeId(m.client),
            partition: PartitionId(m.partition),
            of: txn_id_from_wire(&need(m.of, "ForwardRead.of")?),
            coordinator: PartitionId(m.coordinator),
            reads: read_list_from_wire(m.reads)?,
        },
        Wire::ForwardedRead(m) => Msg::ForwardedRead {
            txn: txn()?,
            partition: PartitionId(m.partition),
            reads: read_list_from_wire(m.reads)?,
        },
        Wire::CoordinatorPrepare(m) => Msg::CoordinatorPrepare {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            participants: partitions_from_wire(m.participants).collect(),
            acknowledged_below: m.acknowledged_below,
        },
        Wire::Commit(m) => Msg::Commit {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            participants: partitions_from_wire(m.participants).collect(),
            writes: writes_from_wire(m.writes)?,
            versions: versions_from_wire(m.versions)?,
            round: m.round,
            is_provisional: m.is_provisional,
        },
        Wire::Abort(m) => Msg::Abort {
            txn: txn()?,
            coordinator: PartitionId(m.coordinator),
            participants: partitions_from_wire(m.participants).collect(),
            round: m.round,
            is_stale: m.is_stale,
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
            partition: PartitionId(m.partition),
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
            snapshot: snapshot_from_wire(need(m.snapshot, "Msg.snapshot")?)?,
            is_too_much: m.is_too_much,
        },
        Wire::Waiting(m) => Msg::Waiting { txn: txn()?, partition: PartitionId(m.partition) },
        Wire::Probe(m) => Msg::Probe { clock: Timestamp(m.clock) },
        Wire::ProbeReply(m) => Msg::ProbeReply { delay: m.delay },
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
        Command::Prepare {
            txn,
            coordinator,
            turn,
            versions,
            writes,
            proposal,
            unless,
            refused,
            acknowledged_below,
        } => (
            Some(txn),
            Wire::Prepare(c::Prepare {
                coordinator: coordinator.0,
                turn: Some(turn_to_wire(*turn)),
                versions: versions_to_wire(versions),
                writes: keys_to_wire(writes),
                proposal: proposal.0,
                unless: txns_to_wire(unless),
                refused: txns_to_wire(refused),
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
                participants: partitions_to_wire(participants),
                acknowledged_below: *acknowledged_below,
            }),
        ),
        Command::RequestCommit { txn, participants, writes, versions, round, is_provisional } => (
            Some(txn),
            Wire::RequestCommit(c::RequestCommit {
                participants: partitions_to_wire(participants),
                writes: writes_to_wire(writes),
                versions: versions_to_wire(versions),
                round: *round,
                is_provisional: *is_provisional,
            }),
        ),
        Command::Decide { txn, outcome, only_after, participants } => (
            Some(txn),
            Wire::Decide(c::Decide {
                outcome: Some(outcome_to_wire(*outcome)),
                only_after: *only_after,
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
            turn: turn_from_wire(c.turn)?,
            versions: versions_from_wire(c.versions)?,
            writes: keys_from_wire(c.writes),
            proposal: Timestamp(c.proposal),
            unless: txns_from_wire(&c.unless)?,
            refused: txns_from_wire(&c.refused)?,
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
            participants: partitions_from_wire(c.participants).collect(),
            acknowledged_below: c.acknowledged_below,
        },
        Wire::RequestCommit(c) => Command::RequestCommit {
            txn: txn()?,
            participants: partitions_from_wire(c.participants).collect(),
            writes: writes_from_wire(c.writes)?,
            versions: versions_from_wire(c.versions)?,
            round: c.round,
            is_provisional: c.is_provisional,
        },
        Wire::Decide(c) => Command::Decide {
            txn: txn()?,
            outcome: outcome_from_wire(need(c.outcome, "Decide.outcome")?)?,
            only_after: c.only_after,
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
        turn: Some(turn_to_wire(prepared.turn)),
        versions: versions_to_wire(&prepared.versions),
        writes: keys_to_wire(&prepared.writes),
        proposal: prepared.proposal.0,
        unless: txns_to_wire(&prepared.unless),
        refused: txns_to_wire(&prepared.refused),
    });
    let ended = ended.iter().map(|(txn, ended)| s::Ended {
        txn: Some(txn_id_to_wire(txn)),
        coordinator: ended.coordinator.0,
        outcome: Some(outcome_to_wire(ended.outcome)),
        is_forgettable: ended.is_forgettable,
    });
    let coordinated = coordinated.iter().map(|(txn, entry)| s::Coordinated {
        txn: Some(txn_id_to_wire(txn)),
        participants: partitions_to_wire(&entry.participants),
        request: entry.request.as_ref().map(|request| s::Request {
            writes: writes_to_wire(&request.writes),
            versions: versions_to_wire(&request.versions),
            round: request.round,
            is_provisional: request.is_provisional,
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
            turn: turn_from_wire(entry.turn)?,
            versions: versions_from_wire(entry.versions)?,
            writes: keys_from_wire(entry.writes),
            proposal: Timestamp(entry.proposal),
            unless: txns_from_wire(&entry.unless)?,
            refused: txns_from_wire(&entry.refused)?,
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
            let versions = versions_from_wire(request.versions)?;
            let (round, is_provisional) = (request.round, request.is_provisional);
            Ok::<_, WireError>(Request { writes, versions, round, is_provisional })
        });
        let value = Coordinated {
            participants: partitions_from_wire(entry.participants).collect(),
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
        Record::Own(_, none) => match **none {},
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
        wire::record::Record::State(state) => {
            Record::State(partition, Box::new(state_from_wire(state)?))
        }
        wire::record::Record::Replication(record) => {
            Record::Replication(partition, record_from_wire(record)?)
        }
    })
}

impl WireProtocol for Natto {
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
