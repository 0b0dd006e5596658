//! Every message and record there and back; and bytes that are neither.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::{BufMut as _, Bytes, BytesMut};
use orthodrome_core::procedure::{Call, Procedure};
use orthodrome_core::session::Floor;
use orthodrome_core::store::Versions;
use orthodrome_core::txn::{AbortReason, Kind, Op, Priority, Read, Version, Writes};
use orthodrome_core::{
    ClientId, Decision, Key, Message as _, NodeId, Outcome, PartitionId, RegionId, Rng, Time,
    Timestamp, Txn, TxnId, Value,
};
use orthodrome_protocols::Portion;
use orthodrome_protocols::carousel::{
    Carousel, Chunk, Command, Coordinated, Ended, FastVote, Listed, Log, Msg, Prepared, Record,
    Request, State, Verdict, Vote,
};
use orthodrome_protocols::gateway::{Participant, Snapshot};
use orthodrome_protocols::replication::{self, Beat, Entry, Index, Members, Payload, Term};
use proptest::prelude::*;

use super::replication::WireReplicated as _;
use super::*;

mod deterministic;
mod natto;
mod ocean_vista;
mod tapir;
mod two_phase_locking;

/// Draws values whose sizes are those of real traffic; with keys that nobody wrote, or without.
struct Draw(Rng, bool);

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.below(bound)
    }

    fn many<T>(&mut self, most: u64, mut draw: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.below(most + 1)).map(|_| draw(self)).collect()
    }

    fn option<T>(&mut self, draw: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (self.below(2) == 0).then(|| draw(self))
    }

    fn bytes(&mut self, most: u64) -> Bytes {
        self.many(most, |draw| draw.below(256) as u8).into()
    }

    fn txn_id(&mut self) -> TxnId {
        let client = ClientId(((1_001 + self.below(9)) << 40) | self.below(100_000));
        let attempt = if self.below(4) == 0 { self.below(5) as u32 } else { 0 };
        TxnId { client, counter: self.below(1_000_000), attempt }
    }

    fn timestamp(&mut self) -> Timestamp {
        Timestamp(1_790_000_000_000_000_000 + self.below(1 << 50))
    }

    fn version(&mut self) -> Version {
        if self.1 && self.below(5) == 0 {
            return Version::INITIAL;
        }
        Version { timestamp: self.timestamp(), writer: self.txn_id() }
    }

    fn key(&mut self) -> Key {
        Key(self.bytes(40))
    }

    fn keys(&mut self) -> Vec<Key> {
        let mut keys = self.many(5, Self::key);
        keys.sort();
        keys.dedup();
        keys
    }

    fn value(&mut self) -> Option<Value> {
        self.option(|draw| Value(draw.bytes(100)))
    }

    fn reason(&mut self) -> AbortReason {
        *self.0.pick(&REASONS).unwrap()
    }

    fn outcome(&mut self) -> Outcome {
        match self.below(3) {
            0 => Outcome::Committed(self.timestamp()),
            1 => Outcome::Aborted(self.reason()),
            _ => Outcome::Unknown,
        }
    }

    fn writes(&mut self) -> Writes {
        self.keys().into_iter().map(|key| (key, self.value())).collect()
    }

    fn reads(&mut self) -> Vec<(Key, Read)> {
        self.many(4, |draw| (draw.key(), Read { value: draw.value(), version: draw.version() }))
    }

    fn versions(&mut self) -> Vec<(Key, Version)> {
        self.many(4, |draw| (draw.key(), draw.version()))
    }

    fn partition(&mut self) -> PartitionId {
        PartitionId(self.below(300) as u32)
    }

    fn partitions(&mut self) -> Vec<PartitionId> {
        self.many(5, Self::partition)
    }

    fn node(&mut self) -> NodeId {
        NodeId(self.below(1_100) as u32)
    }

    fn participant(&mut self) -> Participant {
        let (partition, reads, writes) = (self.partition(), self.keys(), self.keys());
        let floor = if self.below(2) == 0 { Timestamp::ZERO } else { self.timestamp() };
        Participant { partition, reads, writes, floor }
    }

    fn vote(&mut self) -> Vote {
        match self.below(2) {
            0 => Vote::Prepared { versions: self.versions(), proposal: self.timestamp() },
            _ => Vote::Refused(self.reason()),
        }
    }

    fn listed(&mut self) -> Listed {
        let prepared = Prepared {
            coordinator: self.partition(),
            versions: self.versions(),
            writes: self.keys(),
            proposal: self.timestamp(),
        };
        Listed { term: Term(self.below(1_000)), prepared }
    }

    fn verdict(&mut self) -> Verdict {
        match self.below(2) {
            0 => Verdict::Commit(self.timestamp(), self.writes()),
            _ => Verdict::Abort(self.reason()),
        }
    }

    /// One of Carousel's messages, by number, except those of replication.
    fn msg(&mut self, kind: u64) -> Msg {
        let (txn, partition, coordinator) = (self.txn_id(), self.partition(), self.partition());
        let (participant, participants) = (self.participant(), self.partitions());
        let acknowledged_below = self.below(100_000);
        match kind {
            0 => Msg::ReadAndPrepare {
                txn,
                participant,
                coordinator,
                priority: Priority(self.below(3) as u8),
                acknowledged_below,
            },
            1 => Msg::ReadResult { txn, partition, reads: self.reads() },
            2 => {
                let participants = self.many(4, Self::participant);
                Msg::CoordinatorPrepare { txn, coordinator, participants, acknowledged_below }
            }
            3 => {
                let (writes, versions) = (self.writes(), self.versions());
                Msg::Commit { txn, coordinator, participants, writes, versions }
            }
            4 => Msg::Abort { txn, coordinator, participants },
            5 => Msg::Heartbeat { coordinator, txns: self.many(20, Self::txn_id) },
            6 => Msg::Resolve { txn, coordinator, participants },
            7 => Msg::Decided { txn, outcome: self.outcome() },
            8 => Msg::PrepareResult { txn, coordinator, partition, vote: self.vote() },
            9 => Msg::Writeback { txn, partition, coordinator, verdict: self.verdict() },
            10 => Msg::WritebackAck { txn, coordinator, partition },
            11 => Msg::QueryPrepare { txn, participant, coordinator },
            12 => Msg::QueryDecision { txn, coordinator, partition, vote: self.vote() },
            13 => Msg::MayForget { coordinator, partition, txns: self.many(20, Self::txn_id) },
            14 => Msg::Forget { coordinator, partition, txns: self.many(20, Self::txn_id) },
            15 => Msg::ReadOnly { txn, partition, keys: self.keys(), at_least: self.timestamp() },
            16 => {
                let snapshot = self
                    .option(|draw| Snapshot { reads: draw.reads(), valid_until: draw.timestamp() });
                let is_too_much = self.below(2) == 0;
                Msg::ReadOnlyResult { txn, partition, snapshot, is_too_much }
            }
            17 => Msg::FastPrepare {
                txn,
                participant,
                coordinator,
                priority: Priority(self.below(3) as u8),
                acknowledged_below,
                timestamp: self.timestamp(),
                wants_reads: self.below(2) == 0,
            },
            18 => {
                let (reads, leader) = (self.reads(), self.option(Self::node));
                Msg::FollowerReadResult { txn, partition, reads, leader }
            }
            19 => {
                let (term, vote) = (Term(self.below(1_000)), self.vote());
                let node = self.node();
                let voters = self.option(|draw| {
                    let mut voters = draw.many(4, Self::node);
                    voters.push(node);
                    voters
                });
                let vote = FastVote { term, vote, voters };
                Msg::FastPrepareResult { txn, coordinator, partition, vote }
            }
            20 => Msg::FastDecided { txn, outcome: self.outcome() },
            21 => Msg::CollectPending { partition, term: Term(self.below(1_000)) },
            22 => {
                let term = Term(self.below(1_000));
                let listed = self.many(5, |draw| (draw.txn_id(), draw.listed()));
                Msg::PendingList { partition, term, listed, portion: self.portion() }
            }
            23 => {
                let txns = self.many(20, |draw| (draw.txn_id(), draw.partition()));
                Msg::QueryPending { partition, txns }
            }
            24 => Msg::NotLeader { partition, leader: self.option(Self::node), txn: Some(txn) },
            25 => Msg::Members {
                partition,
                since: Index(self.below(1 << 30)),
                voters: self.many(8, Self::node),
            },
            _ => Msg::NotLeader { partition, leader: None, txn: None },
        }
    }

    fn members(&mut self) -> Members {
        let mut set = || {
            let mut nodes = self.many(5, Self::node);
            nodes.sort();
            nodes.dedup();
            nodes
        };
        Members { voters: set(), outgoing: set(), learners: set() }
    }

    fn entry(&mut self) -> Entry<Command> {
        let payload = match self.below(4) {
            0 => Payload::Noop,
            1 => Payload::Members(Arc::new(self.members())),
            _ => {
                let kind = self.below(COMMANDS);
                Payload::Command(Arc::new(self.command(kind)))
            }
        };
        Entry { term: Term(self.below(1_000)), payload }
    }

    fn command(&mut self, kind: u64) -> Command {
        let (txn, coordinator) = (self.txn_id(), self.partition());
        let acknowledged_below = self.below(100_000);
        match kind {
            0 => Command::Prepare {
                txn,
                coordinator,
                versions: self.versions(),
                writes: self.keys(),
                proposal: self.timestamp(),
                acknowledged_below,
            },
            1 => Command::Refuse { txn, coordinator, reason: self.reason() },
            2 => Command::End { txn, coordinator, verdict: self.verdict() },
            3 => {
                let participants = self.many(4, Self::participant);
                Command::Coordinate { txn, participants, acknowledged_below }
            }
            4 => Command::RequestCommit {
                txn,
                participants: self.partitions(),
                writes: self.writes(),
                versions: self.versions(),
            },
            5 => Command::Decide {
                txn,
                outcome: self.outcome(),
                unilateral: self.below(2) == 0,
                participants: self.partitions(),
            },
            6 => Command::Settle(self.many(9, Self::txn_id)),
            7 => Command::Forget(self.many(9, Self::txn_id)),
            8 => {
                Command::Acknowledge(self.many(9, |draw| {
                    (ClientId((1_001 << 40) | draw.below(1_000)), draw.below(9_999))
                }))
            }
            _ => Command::Ceiling(self.timestamp()),
        }
    }

    fn state(&mut self) -> State {
        let map = |entries: Vec<_>| entries.into_iter().collect::<BTreeMap<_, _>>();
        let prepared = self.many(3, |draw| {
            let prepared = Prepared {
                coordinator: draw.partition(),
                versions: draw.versions(),
                writes: draw.keys(),
                proposal: draw.timestamp(),
            };
            (draw.txn_id(), prepared)
        });
        let ended = self.many(3, |draw| {
            let ended = Ended {
                coordinator: draw.partition(),
                outcome: draw.outcome(),
                is_forgettable: draw.below(2) == 0,
            };
            (draw.txn_id(), ended)
        });
        let coordinated = self.many(3, |draw| {
            let request =
                |draw: &mut Self| Request { writes: draw.writes(), versions: draw.versions() };
            let coordinated = Coordinated {
                participants: draw.many(3, Self::participant),
                request: draw.option(request),
                decision: draw.option(Self::outcome),
            };
            (draw.txn_id(), coordinated)
        });
        let settled = self.many(3, |draw| (draw.txn_id(), draw.outcome()));
        let acknowledged = self.many(3, |draw| (draw.txn_id().client, draw.below(999)));
        State {
            applied: Index(self.below(1 << 40)),
            prepared: map(prepared),
            ended: ended.into_iter().collect(),
            coordinated: coordinated.into_iter().collect(),
            settled: settled.into_iter().collect(),
            floor: self.timestamp(),
            ceiling: self.timestamp(),
            acknowledged: acknowledged.into_iter().collect(),
        }
    }

    fn portion(&mut self) -> Portion {
        let of = 1 + self.below(5) as u32;
        let number = self.below(u64::from(of)) as u32;
        match of {
            1 => Portion::WHOLE,
            _ => Portion { sent_at: Time(self.below(1 << 40)), number, of },
        }
    }

    fn chunk(&mut self) -> Chunk<State> {
        let keys = self.many(4, |draw| {
            let mut versions: Versions =
                draw.many(3, |draw| (draw.version(), draw.value())).into_iter().collect();
            versions.sort_by_key(|(version, _)| *version);
            versions.dedup_by_key(|(version, _)| *version);
            (draw.key(), versions)
        });
        Chunk { state: self.option(|draw| Box::new(draw.state())), keys }
    }

    /// One of replication's messages, by number.
    fn replication(&mut self, kind: u64) -> replication::Message<Log> {
        use replication::Message as M;
        let mut index = || Index(self.0.below(1 << 30));
        let (prev_index, last_index, chosen, matched) = (index(), index(), index(), index());
        let (received, hint_index, at_least) = (index(), index(), index());
        let mut term = || Term(self.0.below(1_000));
        let (term, last_term) = (term(), term());
        let granted = self.below(2) == 0;
        let beat = Beat { round: self.below(1 << 20), sent_at: Time(self.below(1 << 50)) };
        match kind {
            0 => M::PreVote { term, last_index, last_term },
            1 => M::PreVoteReply { term, granted },
            2 => M::RequestVote { term, last_index, last_term, transfer: granted },
            3 => M::VoteReply { term, granted },
            4 => {
                let entries = self.many(6, Self::entry);
                M::AppendEntries { term, prev_index, prev_term: last_term, entries, chosen, beat }
            }
            5 => M::AppendReply { term, matched, received, beat },
            6 => M::AppendReject {
                term,
                prev_index,
                hint_index,
                hint_term: last_term,
                wants_snapshot: granted,
                beat,
            },
            7 => M::Heartbeat { term, chosen, beat },
            8 => M::HeartbeatReply { term, matched, received, beat },
            9 => M::SnapshotPiece {
                term,
                snapshot: self.below(100),
                piece: self.below(100),
                index: last_index,
                index_term: last_term,
                members: self.members(),
                chunk: self.chunk(),
                is_last: granted,
                beat,
            },
            10 => {
                let (snapshot, next) = (self.below(100), self.below(100));
                M::SnapshotReply { term, snapshot, next, at_least, beat }
            }
            _ => M::TimeoutNow { term, round: self.below(1 << 20) },
        }
    }

    /// One of the records, by number.
    fn record(&mut self, kind: u64) -> Record {
        use replication::Record as R;
        let partition = self.partition();
        let (index, term) = (Index(self.below(1 << 40)), Term(self.below(1_000)));
        let record = match kind {
            0 => R::Base { index, term, members: self.members() },
            1 => R::Incomplete,
            2 => R::HardState { term, vote: self.option(Self::node) },
            3 => R::Entry { index, entry: self.entry() },
            4 => R::Truncate { from: index },
            5 => return Record::Own(partition, Box::new((self.txn_id(), self.listed()))),
            _ => return Record::State(partition, Box::new(self.state())),
        };
        Record::Replication(partition, record)
    }

    fn any_msg(&mut self) -> Msg {
        match self.below(MSGS + REPLICATION) {
            kind if kind < MSGS => self.msg(kind),
            kind => {
                let (partition, message) = (self.partition(), self.replication(kind - MSGS));
                Msg::Replication { partition, message }
            }
        }
    }

    fn any_record(&mut self) -> Record {
        let kind = self.below(RECORDS);
        self.record(kind)
    }
}

const REASONS: [AbortReason; 9] = [
    AbortReason::Conflict,
    AbortReason::StaleRead,
    AbortReason::Client,
    AbortReason::Guard,
    AbortReason::Recovery,
    AbortReason::Abandoned,
    AbortReason::Overload,
    AbortReason::Invalid,
    AbortReason::TooLarge,
];
const MSGS: u64 = 27;
const REPLICATION: u64 = 12;
const COMMANDS: u64 = 10;
const RECORDS: u64 = 7;

fn draw(seed: u64) -> Draw {
    Draw(Rng::stream(seed, "wire", 0), true)
}

fn msg_bytes(msg: &Msg) -> Bytes {
    let mut out = BytesMut::new();
    Carousel::encode_msg(msg, &mut out);
    out.freeze()
}

fn record_bytes(record: &Record) -> Bytes {
    let mut out = BytesMut::new();
    Carousel::encode_record(record, &mut out);
    out.freeze()
}

#[test]
fn every_message_and_record_comes_back_as_it_was() {
    for seed in 0..300 {
        let mut draw = draw(seed);
        let mut msgs: Vec<Msg> = (0..MSGS).map(|kind| draw.msg(kind)).collect();
        for kind in 0..REPLICATION {
            let (partition, message) = (draw.partition(), draw.replication(kind));
            msgs.push(Msg::Replication { partition, message });
        }
        for kind in 0..COMMANDS {
            let payload = Payload::Command(Arc::new(draw.command(kind)));
            let entries = vec![Entry { term: Term(1), payload }];
            let message = replication::Message::AppendEntries {
                term: Term(1),
                prev_index: Index(0),
                prev_term: Term(0),
                entries,
                chosen: Index(0),
                beat: Beat::default(),
            };
            msgs.push(Msg::Replication { partition: PartitionId(0), message });
        }
        for msg in msgs {
            assert_eq!(Carousel::decode_msg(msg_bytes(&msg)).as_ref(), Ok(&msg));
        }
        for kind in 0..RECORDS {
            let record = draw.record(kind);
            let bytes = record_bytes(&record);
            assert_eq!(Carousel::decode_record(bytes).as_ref(), Ok(&record));
        }
    }
}

/// Fields of one transaction, and the other types that no message of Carousel carries.
#[test]
fn common_types_come_back_as_they_were() {
    for seed in 0..300 {
        let mut draw = draw(seed);
        let key = draw.key();
        let ops = vec![
            Op::Get(key.clone()),
            Op::Compare(key.clone(), draw.value()),
            Op::Put(key.clone(), Value(draw.bytes(9))),
            Op::Add(key.clone(), -5),
            Op::Append(key.clone(), Value(draw.bytes(9))),
            Op::Delete(key),
            Op::Call(Call {
                procedure: Procedure::TpccPayment,
                reads: draw.keys(),
                writes: draw.keys(),
                arguments: Value(draw.bytes(9)),
            }),
        ];
        let reading = [Kind::ReadOnly, Kind::StaleReadOnly];
        for kind in
            [Kind::Interactive, Kind::General, Kind::Procedure(ops)].into_iter().chain(reading)
        {
            let txn = Txn {
                id: draw.txn_id(),
                home: RegionId(draw.below(9) as u16),
                priority: Priority(draw.below(3) as u8),
                kind,
                reads: draw.keys(),
                writes: draw.keys(),
                acknowledged_below: draw.below(99),
                floors: draw
                    .keys()
                    .into_iter()
                    .map(|key| {
                        let (timestamp, is_deletion) = (draw.timestamp(), draw.below(2) == 0);
                        (key, Floor { timestamp, is_deletion })
                    })
                    .collect(),
            };
            assert_eq!(common::txn_from_wire(common::txn_to_wire(&txn)), Ok(txn));
        }
        for decision in [Decision::Commit(draw.writes()), Decision::Abort] {
            let wire = common::decision_to_wire(&decision);
            assert_eq!(common::decision_from_wire(wire), Ok(decision));
        }
        let reads = draw.reads().into_iter().collect();
        assert_eq!(common::reads_from_wire(common::reads_to_wire(&reads)), Ok(reads));
    }
}

/// How far a message's own count of its bytes may be off: a tenth, or 16 bytes. Replication counts
/// its fixed parts, its entries and snapshots of state more roughly.
fn tolerance(msg: &Msg, real: usize) -> usize {
    use replication::Message as M;
    let Msg::Replication { message, .. } = msg else { return (real / 10).max(16) };
    if let M::AppendEntries { entries, .. } = message {
        return (real / 10).max(28 + 20 * entries.len());
    }
    if let M::SnapshotPiece { .. } = message { real * 2 } else { 24 }
}

#[test]
fn the_size_that_models_count_is_about_that_of_the_bytes() {
    let mut worst: BTreeMap<&str, (f64, usize, usize)> = BTreeMap::new();
    for seed in 0..2_000 {
        let mut draw = draw(seed);
        draw.1 = false;
        let msg = draw.any_msg();
        let (real, claimed) = (msg_bytes(&msg).len(), msg.wire_size());
        let excess = claimed.abs_diff(real) as f64 / tolerance(&msg, real) as f64;
        let entry = worst.entry(msg.kind()).or_insert((0.0, 0, 0));
        if excess >= entry.0 {
            *entry = (excess, real, claimed);
        }
    }
    println!("kind: (times the tolerance, bytes, claimed): {worst:#?}");
    worst.retain(|_, (excess, ..)| *excess > 1.0);
    assert!(worst.is_empty(), "kind: (times the tolerance, bytes, claimed): {worst:#?}");
}

#[test]
fn unknown_fields_are_skipped() {
    for seed in 0..200 {
        let mut draw = draw(seed);
        let msg = draw.any_msg();
        // Field 900 as a number, and field 901 as bytes, in front and behind.
        let unknown = [0xa0, 0x38, 0x07, 0xaa, 0x38, 0x03, 1, 2, 3];
        let mut bytes = BytesMut::from(&unknown[..]);
        Carousel::encode_msg(&msg, &mut bytes);
        bytes.put_slice(&unknown);
        assert_eq!(Carousel::decode_msg(bytes.freeze()), Ok(msg));
        let record = draw.any_record();
        let mut bytes = BytesMut::from(&unknown[..]);
        Carousel::encode_record(&record, &mut bytes);
        bytes.put_slice(&unknown);
        assert_eq!(Carousel::decode_record(bytes.freeze()), Ok(record));
    }
}

/// Protobuf has no length of its own, so a message cut between two fields is another message; the
/// frame around it is what tells. Here: never a panic, and never the same message.
#[test]
fn a_message_cut_anywhere_is_never_taken_for_the_whole() {
    for seed in 0..300 {
        let mut draw = draw(seed);
        let (msg, record) = (draw.any_msg(), draw.any_record());
        let (msg_bytes, record_bytes) = (msg_bytes(&msg), record_bytes(&record));
        for cut in 0..msg_bytes.len() {
            let cut = Carousel::decode_msg(msg_bytes.slice(..cut));
            assert_ne!(cut.as_ref(), Ok(&msg));
        }
        for cut in 0..record_bytes.len() {
            let cut = Carousel::decode_record(record_bytes.slice(..cut));
            assert_ne!(cut.as_ref(), Ok(&record));
        }
    }
}

#[test]
fn nesting_is_bounded() {
    // A chunk inside a message inside itself cannot be written in this schema; a deeply nested
    // unknown group can, and must not exhaust the stack.
    let mut bytes = vec![0xa3, 0x38]; // Field 900, start of a group.
    for _ in 0..100_000 {
        bytes.extend([0xa3, 0x38]);
    }
    assert!(Carousel::decode_msg(bytes.into()).is_err());
}

proptest! {
    #![proptest_config(crate::fuzz_config())]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let bytes = Bytes::from(bytes);
        let _ = Carousel::decode_msg(bytes.clone());
        let _ = Carousel::decode_record(bytes.clone());
        let _ = Log::decode_command(bytes.clone());
        let _ = Log::decode_chunk(bytes);
    }

    /// Bytes that begin as a message and go wrong: they reach deeper than arbitrary ones.
    #[test]
    fn damaged_messages_never_panic(
        seed in any::<u64>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut draw = draw(seed);
        for bytes in [msg_bytes(&draw.any_msg()), record_bytes(&draw.any_record())] {
            let mut bytes = bytes.to_vec();
            for (at, value) in &damage {
                if !bytes.is_empty() {
                    let at = at.index(bytes.len());
                    bytes[at] = *value;
                }
            }
            let bytes = Bytes::from(bytes);
            let _ = Carousel::decode_msg(bytes.clone());
            let _ = Carousel::decode_record(bytes);
        }
    }
}
