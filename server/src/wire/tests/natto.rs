//! The messages and records of Natto: there and back, their sizes, and damage.

use orthodrome_core::time::Duration;
use orthodrome_protocols::gateway::Snapshot;
use orthodrome_protocols::natto::{
    Command, Coordinated, Elsewhere, Ended, Msg, Natto, Prepared, Record, Request, State, Turn,
    Vote,
};

use super::*;

type Protocol = Natto;

const MSGS: u64 = 24;
const COMMANDS: u64 = 10;

fn turn(draw: &mut Draw) -> Turn {
    Turn { timestamp: draw.timestamp(), priority: Priority(draw.below(3) as u8) }
}

fn vote(draw: &mut Draw) -> Vote {
    match draw.below(3) {
        0 => Vote::Prepared {
            versions: draw.versions(),
            proposal: draw.timestamp(),
            unless: draw.many(2, Draw::txn_id),
            refused: draw.many(2, Draw::txn_id),
        },
        1 => Vote::Refused(draw.reason()),
        _ => Vote::Committed(draw.timestamp()),
    }
}

fn msg(draw: &mut Draw, kind: u64) -> Msg {
    let (txn, partition, coordinator) = (draw.txn_id(), draw.partition(), draw.partition());
    let (participants, acknowledged_below) = (draw.partitions(), draw.below(100_000));
    match kind {
        0 => {
            let (participant, turn) = (draw.participant(), turn(draw));
            let lasts = Duration::from_nanos(draw.below(1 << 30));
            let elsewhere = draw.many(3, |draw| {
                let (participant, arrives) = (draw.participant(), draw.timestamp());
                Elsewhere { participant, arrives }
            });
            Msg::ReadAndPrepare {
                txn,
                participant,
                coordinator,
                turn,
                lasts,
                elsewhere,
                acknowledged_below,
            }
        }
        1 => {
            let (reads, is_provisional) = (draw.reads(), draw.below(2) == 0);
            Msg::ReadResult { txn, partition, reads, is_provisional }
        }
        2 => Msg::CoordinatorPrepare { txn, coordinator, participants, acknowledged_below },
        3 => {
            let (writes, versions) = (draw.writes(), draw.versions());
            let (round, is_provisional) = (1 + draw.below(4) as u32, draw.below(2) == 0);
            Msg::Commit { txn, coordinator, participants, writes, versions, round, is_provisional }
        }
        4 => {
            let (round, is_stale) = (draw.below(4) as u32, draw.below(2) == 0);
            Msg::Abort { txn, coordinator, participants, round, is_stale }
        }
        5 => Msg::Heartbeat { coordinator, txns: draw.many(20, Draw::txn_id) },
        6 => Msg::Resolve { txn, coordinator, participants },
        7 => Msg::Decided { txn, outcome: draw.outcome() },
        8 => Msg::PrepareResult { txn, coordinator, partition, vote: vote(draw) },
        9 => Msg::Writeback { txn, partition, coordinator, verdict: draw.verdict() },
        10 => Msg::WritebackAck { txn, coordinator, partition },
        11 => Msg::QueryPrepare { txn, partition, coordinator },
        12 => Msg::QueryDecision { txn, coordinator, partition, vote: vote(draw) },
        13 => Msg::MayForget { coordinator, partition, txns: draw.many(20, Draw::txn_id) },
        14 => Msg::Forget { coordinator, partition, txns: draw.many(20, Draw::txn_id) },
        15 => Msg::ReadOnly { txn, partition, keys: draw.keys(), at_least: draw.timestamp() },
        16 => {
            let snapshot = Snapshot { reads: draw.reads(), valid_until: draw.timestamp() };
            let is_too_much = draw.below(2) == 0;
            Msg::ReadOnlyResult { txn, partition, snapshot, is_too_much }
        }
        17 => Msg::Waiting { txn, partition },
        18 => Msg::Probe { clock: draw.timestamp() },
        19 => {
            let delay = i64::try_from(draw.below(1 << 30)).unwrap();
            Msg::ProbeReply { delay: if draw.below(2) == 0 { delay } else { -delay } }
        }
        20 => {
            let (client, of, reads) = (draw.node(), draw.txn_id(), draw.reads());
            Msg::ForwardRead { txn, client, partition, of, coordinator, reads }
        }
        21 => Msg::ForwardedRead { txn, partition, reads: draw.reads() },
        22 => Msg::Members {
            partition,
            since: Index(draw.below(1 << 30)),
            voters: draw.many(8, Draw::node),
        },
        _ => Msg::NotLeader { partition, leader: draw.option(Draw::node), txn: Some(txn) },
    }
}

fn command(draw: &mut Draw, kind: u64) -> Command {
    let (txn, coordinator) = (draw.txn_id(), draw.partition());
    let acknowledged_below = draw.below(100_000);
    match kind {
        0 => Command::Prepare {
            txn,
            coordinator,
            turn: turn(draw),
            versions: draw.versions(),
            writes: draw.keys(),
            proposal: draw.timestamp(),
            unless: draw.many(2, Draw::txn_id),
            refused: draw.many(2, Draw::txn_id),
            acknowledged_below,
        },
        1 => Command::Refuse { txn, coordinator, reason: draw.reason() },
        2 => Command::End { txn, coordinator, verdict: draw.verdict() },
        3 => {
            let participants = draw.partitions();
            Command::Coordinate { txn, participants, acknowledged_below }
        }
        4 => Command::RequestCommit {
            txn,
            participants: draw.partitions(),
            writes: draw.writes(),
            versions: draw.versions(),
            round: 1 + draw.below(4) as u32,
            is_provisional: draw.below(2) == 0,
        },
        5 => Command::Decide {
            txn,
            outcome: draw.outcome(),
            only_after: draw.option(|draw| draw.below(4) as u32),
            participants: draw.partitions(),
        },
        6 => Command::Settle(draw.many(9, Draw::txn_id)),
        7 => Command::Forget(draw.many(9, Draw::txn_id)),
        8 => Command::Acknowledge(draw.many(9, |draw| (draw.txn_id().client, draw.below(9_999)))),
        _ => Command::Ceiling(draw.timestamp()),
    }
}

fn state(draw: &mut Draw) -> State {
    let prepared = draw.many(3, |draw| {
        let prepared = Prepared {
            coordinator: draw.partition(),
            turn: turn(draw),
            versions: draw.versions(),
            writes: draw.keys(),
            proposal: draw.timestamp(),
            unless: draw.many(2, Draw::txn_id),
            refused: draw.many(2, Draw::txn_id),
        };
        (draw.txn_id(), prepared)
    });
    let ended = draw.many(3, |draw| {
        let (coordinator, outcome) = (draw.partition(), draw.outcome());
        (draw.txn_id(), Ended { coordinator, outcome, is_forgettable: draw.below(2) == 0 })
    });
    let coordinated = draw.many(3, |draw| {
        let request = |draw: &mut Draw| {
            let (writes, versions) = (draw.writes(), draw.versions());
            let (round, is_provisional) = (1 + draw.below(4) as u32, draw.below(2) == 0);
            Request { writes, versions, round, is_provisional }
        };
        let coordinated = Coordinated {
            participants: draw.partitions(),
            request: draw.option(request),
            decision: draw.option(Draw::outcome),
        };
        (draw.txn_id(), coordinated)
    });
    let acknowledged = draw.many(3, |draw| (draw.txn_id().client, draw.below(999)));
    State {
        applied: Index(draw.below(1 << 40)),
        prepared: prepared.into_iter().collect(),
        ended: ended.into_iter().collect(),
        coordinated: coordinated.into_iter().collect(),
        settled: draw.many(3, |draw| (draw.txn_id(), draw.outcome())).into_iter().collect(),
        floor: draw.timestamp(),
        ceiling: draw.timestamp(),
        acknowledged: acknowledged.into_iter().collect(),
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
