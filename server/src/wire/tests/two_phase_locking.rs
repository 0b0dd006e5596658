//! The messages and records of two-phase locking: there and back, their sizes, and damage.

use orthodrome_protocols::gateway::Snapshot;
use orthodrome_protocols::two_phase_locking::{
    Command, Decided, Locking, Msg, Prepared, Rank, Record, State, Vote,
};

use super::*;

type Protocol = Locking;

const MSGS: u64 = 19;
const COMMANDS: u64 = 6;

fn decision(draw: &mut Draw) -> Outcome {
    match draw.below(2) {
        0 => Outcome::Committed(draw.timestamp()),
        _ => Outcome::Aborted(draw.reason()),
    }
}

fn msg(draw: &mut Draw, kind: u64) -> Msg {
    let (txn, partition, coordinator) = (draw.txn_id(), draw.partition(), draw.partition());
    let (participants, acknowledged_below) = (draw.partitions(), draw.below(100_000));
    match kind {
        0 => {
            let rank = Rank { priority: Priority(draw.below(3) as u8), age: draw.timestamp() };
            let round = 1 + draw.below(9) as u32;
            Msg::Lock { txn, round, rank, participant: draw.participant() }
        }
        1 => {
            let round = 1 + draw.below(9) as u32;
            Msg::Locked { txn, round, partition, reads: draw.reads() }
        }
        2 => Msg::Waiting { txn, partition },
        3 => Msg::Wounded { txn, partition, reason: draw.reason() },
        4 => Msg::KeepAlive {
            partition,
            txns: draw.many(20, Draw::txn_id),
            waiting: draw.many(5, Draw::txn_id),
        },
        5 => Msg::Release { txn, partition },
        6 => {
            let (versions, writes) = (draw.versions(), draw.writes());
            Msg::Commit { txn, coordinator, participants, versions, writes, acknowledged_below }
        }
        7 => {
            let (versions, writes) = (draw.versions(), draw.writes());
            Msg::Prepare { txn, partition, coordinator, versions, writes, acknowledged_below }
        }
        8 => {
            let vote = match draw.below(2) {
                0 => Vote::Prepared { proposal: draw.timestamp() },
                _ => Vote::Refused(draw.reason()),
            };
            Msg::Vote { txn, coordinator, partition, vote }
        }
        9 => Msg::Decided { txn, outcome: draw.outcome() },
        10 => Msg::Decision { txn, partition, coordinator, outcome: decision(draw) },
        11 => Msg::DecisionAck { txn, coordinator, partition },
        12 => Msg::QueryDecision { txn, coordinator, partition, proposal: draw.timestamp() },
        13 => Msg::Resolve { txn, coordinator, participants },
        14 => Msg::ReadOnly { txn, partition, keys: draw.keys(), at_least: draw.timestamp() },
        15 => {
            let snapshot = Snapshot { reads: draw.reads(), valid_until: draw.timestamp() };
            let is_too_much = draw.below(2) == 0;
            Msg::ReadOnlyResult { txn, partition, snapshot, is_too_much }
        }
        16 => Msg::NotLeader { partition, leader: draw.option(Draw::node), txn: Some(txn) },
        17 => Msg::Members {
            partition,
            since: Index(draw.below(1 << 30)),
            voters: draw.many(8, Draw::node),
        },
        _ => Msg::NotLeader { partition, leader: None, txn: None },
    }
}

fn command(draw: &mut Draw, kind: u64) -> Command {
    let (txn, coordinator) = (draw.txn_id(), draw.partition());
    let acknowledged_below = draw.below(100_000);
    match kind {
        0 => Command::Prepare {
            txn,
            coordinator,
            reads: draw.keys(),
            writes: draw.writes(),
            proposal: draw.timestamp(),
            acknowledged_below,
        },
        1 => Command::End { txn, coordinator, outcome: decision(draw) },
        2 => {
            let (outcome, participants) = (decision(draw), draw.partitions());
            Command::Decide { txn, outcome, participants, acknowledged_below }
        }
        3 => Command::Settle(draw.many(9, Draw::txn_id)),
        4 => Command::Acknowledge(draw.many(9, |draw| (draw.txn_id().client, draw.below(9_999)))),
        _ => Command::Ceiling(draw.timestamp()),
    }
}

fn state(draw: &mut Draw) -> State {
    let prepared = draw.many(3, |draw| {
        let prepared = Prepared {
            coordinator: draw.partition(),
            reads: draw.keys(),
            writes: draw.writes(),
            proposal: draw.timestamp(),
        };
        (draw.txn_id(), prepared)
    });
    let decided = draw.many(3, |draw| {
        let decided = Decided { outcome: decision(draw), participants: draw.partitions() };
        (draw.txn_id(), decided)
    });
    State {
        applied: Index(draw.below(1 << 40)),
        prepared: prepared.into_iter().collect(),
        ended: draw.many(3, |draw| (draw.txn_id(), decision(draw))).into_iter().collect(),
        decided: decided.into_iter().collect(),
        settled: draw.many(3, |draw| (draw.txn_id(), decision(draw))).into_iter().collect(),
        floor: draw.timestamp(),
        ceiling: draw.timestamp(),
        acknowledged: draw
            .many(3, |draw| (draw.txn_id().client, draw.below(999)))
            .into_iter()
            .collect(),
    }
}

fn everything(draw: &mut Draw) -> (Vec<Msg>, Vec<Record>) {
    let msgs = (0..MSGS).map(|kind| msg(draw, kind)).collect();
    let mut records: Vec<Record> = (0..COMMANDS)
        .map(|kind| {
            let payload = Payload::Command(Arc::new(command(draw, kind)));
            let (index, entry) = (Index(1), Entry { term: Term(1), payload });
            Record::Replication(PartitionId(3), replication::Record::Entry { index, entry })
        })
        .collect();
    records.push(Record::State(PartitionId(2), Box::new(state(draw))));
    (msgs, records)
}

fn msg_bytes(msg: &Msg) -> Bytes {
    let mut out = BytesMut::new();
    Protocol::encode_msg(msg, &mut out);
    out.freeze()
}

fn record_bytes(record: &Record) -> Bytes {
    let mut out = BytesMut::new();
    Protocol::encode_record(record, &mut out);
    out.freeze()
}

#[test]
fn every_message_and_record_comes_back_as_it_was() {
    for seed in 0..300 {
        let (msgs, records) = everything(&mut draw(seed));
        for msg in msgs {
            assert_eq!(Protocol::decode_msg(msg_bytes(&msg)).as_ref(), Ok(&msg));
        }
        for record in records {
            assert_eq!(Protocol::decode_record(record_bytes(&record)).as_ref(), Ok(&record));
        }
    }
}

#[test]
fn the_size_that_models_count_is_about_that_of_the_bytes() {
    for seed in 0..500 {
        let mut draw = draw(seed);
        draw.1 = false;
        for msg in everything(&mut draw).0 {
            let (real, claimed) = (msg_bytes(&msg).len(), msg.wire_size());
            let off = claimed.abs_diff(real);
            assert!(off <= (real / 10).max(24), "{real} bytes, {claimed} claimed: {msg:?}");
        }
    }
}

#[test]
fn cut_or_damaged_bytes_never_panic_nor_pass_for_the_whole() {
    for seed in 0..60 {
        let mut draw = draw(seed);
        let (msgs, records) = everything(&mut draw);
        for msg in msgs {
            let bytes = msg_bytes(&msg);
            for at in 0..bytes.len() {
                assert_ne!(Protocol::decode_msg(bytes.slice(..at)).as_ref(), Ok(&msg));
                let mut damaged = bytes.to_vec();
                damaged[at] = draw.below(256) as u8;
                let _ = Protocol::decode_msg(damaged.into());
            }
        }
        for record in records {
            let bytes = record_bytes(&record);
            for at in 0..bytes.len() {
                assert_ne!(Protocol::decode_record(bytes.slice(..at)).as_ref(), Ok(&record));
                let mut damaged = bytes.to_vec();
                damaged[at] = draw.below(256) as u8;
                let _ = Protocol::decode_record(damaged.into());
            }
        }
    }
}

#[test]
fn an_undecided_decision_is_refused() {
    let (txn, partition) = (TxnId::new(ClientId(1), 1), PartitionId(1));
    let outcome = Outcome::Unknown;
    let msg = Msg::Decision { txn, partition, coordinator: partition, outcome };
    let error = Protocol::decode_msg(msg_bytes(&msg)).unwrap_err().to_string();
    assert!(error.contains("a commit or an abort"), "{error}");
}
